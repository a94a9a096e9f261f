# A worker: PyTorch, and scikit-learn for the example. The user's own libraries go on top of it.
FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
RUN groupadd --gid 7717 elche && useradd --uid 7717 --gid elche --create-home elche \
    && install -d -o elche -g elche /runs /run/elche
WORKDIR /home/elche

# Where torch comes from: an index of PyTorch's, such as that of its CPU builds (much smaller) or of one CUDA version.
# Without one it is pip's default, which runs on a CPU and on NVIDIA GPUs. PIP_FIND_LINKS: a page with wheels.
ARG TORCH_INDEX= PIP_FIND_LINKS=
RUN --mount=type=bind,source=constraints.txt,target=constraints.txt \
    pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
# What elche needs is a layer of its own: a change in elche's source leaves it as it is.
RUN --mount=type=bind,source=pyproject.toml,target=pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=constraints.txt \
    --mount=type=bind,source=docker/requirements.py,target=requirements.py \
    python requirements.py worker > /tmp/requirements.txt \
    && pip install -c constraints.txt -r /tmp/requirements.txt scikit-learn
RUN --mount=type=bind,target=/src,rw PIP_CONSTRAINT=/src/constraints.txt pip install --no-deps /src
COPY --chmod=755 docker/attends.py /usr/local/bin/attends

USER elche
VOLUME /runs
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["attends"]
ENTRYPOINT ["elche-worker", "--work-dir", "/runs"]

# A worker: PyTorch, and scikit-learn for the example. Build on top of it for further libraries.
FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
RUN groupadd --gid 7717 elche && useradd --uid 7717 --gid elche --create-home elche \
    && install -d -o elche -g elche /runs /run/elche
WORKDIR /home/elche

# TORCH_INDEX: a package index of PyTorch, such as that of its CPU builds (much smaller) or of one CUDA version; by
# default pip's, whose build runs on a CPU and on NVIDIA GPUs. PIP_FIND_LINKS: a page with wheels.
ARG TORCH_INDEX= PIP_FIND_LINKS=
RUN --mount=type=bind,source=constraints.txt,target=constraints.txt \
    pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
# Dependencies in a layer of their own, which a change of elche's source does not rebuild.
RUN --mount=type=bind,source=pyproject.toml,target=pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=constraints.txt \
    --mount=type=bind,source=docker/requirements.py,target=requirements.py \
    python requirements.py worker > /tmp/requirements.txt \
    && pip install -c constraints.txt -r /tmp/requirements.txt scikit-learn
RUN --mount=type=bind,target=/src,rw PIP_CONSTRAINT=/src/constraints.txt pip install --no-deps /src
COPY --chmod=755 docker/is_connected.py /usr/local/bin/is_connected

USER elche
VOLUME /runs
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["is_connected"]
ENTRYPOINT ["elche-worker", "--work-dir", "/runs"]

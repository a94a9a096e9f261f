# The coordinator, and the command `elche` (--entrypoint elche). No torch.
FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
# The base image has no bytecode, and this user could write none: without, each command would take three times as long.
RUN python -m compileall -q -x '/(tests?|lib2to3|idlelib|ensurepip|site-packages)/' \
    "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
RUN groupadd --gid 7717 elche && useradd --uid 7717 --gid elche --create-home elche \
    && install -d -o elche -g elche /data /artifacts /run/elche /run/grafana
WORKDIR /home/elche

# Dependencies in a layer of their own, which a change of elche's source does not rebuild.
RUN --mount=type=bind,source=pyproject.toml,target=pyproject.toml \
    --mount=type=bind,source=requirements.lock,target=requirements.lock \
    --mount=type=bind,source=docker/requirements.py,target=requirements.py \
    python requirements.py coordinator postgresql > /tmp/locked.txt \
    && pip install --no-deps --require-hashes -r /tmp/locked.txt
RUN --mount=type=bind,target=/src,rw cd /src \
    && python docker/requirements.py hatchling > /tmp/locked.txt \
    && pip install --target /tmp/build --no-compile --no-deps --require-hashes -r /tmp/locked.txt \
    && PYTHONPATH=/tmp/build pip install --no-deps --no-build-isolation . && rm -r /tmp/build

USER elche
VOLUME /data
EXPOSE 7717 7718
HEALTHCHECK --interval=5s --timeout=30s --start-period=30s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:7718/healthz', timeout=4)"]
ENTRYPOINT ["elche-coordinator", "--listen", "0.0.0.0:7717", "--http", "0.0.0.0:7718", "--data", "/data"]

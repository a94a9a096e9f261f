# A worker: PyTorch, and what LIBRARIES names. Build on top of it for libraries that requirements.lock does not have.
FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
# The base image has no bytecode, and this user could write none: without, each command would take three times as long.
RUN python -m compileall -q -x '/(tests?|lib2to3|idlelib|ensurepip|site-packages)/' \
    "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
RUN groupadd --gid 7717 elche && useradd --uid 7717 --gid elche --create-home elche \
    && install -d -o elche -g elche /runs /artifacts /run/elche
WORKDIR /home/elche

# What torch.compile compiles with: C++ for the CPU, and C to launch its kernels on a GPU. Python's headers are there.
# It links nothing statically but what each program has of gcc, and uses neither sanitizers nor optimization at link time.
RUN apt-get update -q && apt-get install -q -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/locale/* /usr/share/info /usr/bin/*-lto-dump-* \
    /usr/bin/*-dwp /usr/bin/*-ld.gold /usr/bin/*gcov* /usr/bin/*gp-* \
    && cd /usr/lib/*-linux-gnu && rm -rf *gprofng* lib*san.* libc.a libm[-v]*.a libtirpc.a libcrypt.a \
    && find /usr/lib/gcc \( -name 'lto*' -o -name 'lib*san*' -o -name '*.a' ! -name 'libgcc*' \) -delete

# Dependencies in a layer of their own, which a change of elche's source does not rebuild. Nobody runs their tests, checks
# types or debugs them here, and what is hardly imported needs no bytecode. NumPy's libraries do not load once stripped.
RUN --mount=type=bind,source=pyproject.toml,target=pyproject.toml \
    --mount=type=bind,source=requirements.lock,target=requirements.lock \
    --mount=type=bind,source=docker/requirements.py,target=requirements.py \
    python requirements.py --without torch worker > /tmp/locked.txt \
    && pip install --no-deps --require-hashes -r /tmp/locked.txt \
    && find /usr/local/lib -depth \( -type d -name tests -o -name '*.pyi' \) -exec rm -r {} + \
    && find /usr/local/lib -name '*.so' ! -path '*/numpy*' -exec strip --strip-unneeded {} + \
    && find /usr/local/lib -name '*.pyc' -regextype posix-extended -regex '.*/(pygments/lexers|networkx/algorithms\
|sympy/(physics|stats|parsing|vector)|numpy/(distutils|f2py))/.*' -delete
# TORCH_INDEX: a package index of PyTorch, such as that of its CPU builds (much smaller) or of one CUDA version; by
# default pip's, whose build runs on a CPU and on NVIDIA GPUs. PIP_FIND_LINKS: a page with wheels. Of torch only the
# version is locked: each build has its own hash, and its own CUDA libraries.
ARG TORCH_INDEX= PIP_FIND_LINKS=
RUN --mount=type=bind,source=requirements.lock,target=requirements.lock \
    pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep -o '^torch==[^ ]*' requirements.lock)" \
    && cd "$(python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')" \
    && rm -rf test bin/*[Tt]est* bin/protoc* lib/*_test.so lib/libaoti_custom_ops.so lib/libbackend_with_compiler.so \
    && find . -name '*.pyi' -delete && strip --strip-unneeded lib/libtorch*.so \
    && cd testing/_internal && rm -rf codegen data generated opinfo test_module common_m* common_n* common_q* \
    && cd distributed && rm -rf _[st]* nn pipelining rpc *_test.py
RUN --mount=type=bind,target=/src,rw cd /src \
    && python docker/requirements.py hatchling > /tmp/locked.txt \
    && pip install --target /tmp/build --no-compile --no-deps --require-hashes -r /tmp/locked.txt \
    && PYTHONPATH=/tmp/build pip install --no-deps --no-build-isolation . && rm -r /tmp/build
COPY --chmod=755 docker/is_connected.py /usr/local/bin/is_connected
# What jobs import besides PyTorch, of the packages in the lock, such as scikit-learn for examples/digits.py.
ARG LIBRARIES=
RUN --mount=type=bind,target=/src \
    test -z "$LIBRARIES" || (cd /src && python docker/requirements.py --without torch $LIBRARIES > /tmp/locked.txt \
    && pip install --no-deps --require-hashes -r /tmp/locked.txt)

USER elche
VOLUME /runs
HEALTHCHECK --interval=5s --timeout=30s --start-period=60s --retries=3 CMD ["is_connected"]
ENTRYPOINT ["elche-worker", "--work-dir", "/runs"]

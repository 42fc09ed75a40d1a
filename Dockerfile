# voltserve as images. Targets: `gpu` (Tesla V100), `cpu` (the same path without a GPU), and `ray`: the one that RAY_ON
# names, with Ray for several machines. Needs BuildKit.
#   scripts/docker_build.sh gpu     builds with tag and labels; docs/quickstart.md says how to run it
#
# The environment of each target is a stage of its own. Both the compiling stage and the final image start from it. So
# no compiler and no CUDA toolkit reaches the image, and 7 GB of libraries are written once.

# A Debian with Python 3.10–3.13 as python3. Has no effect on what is installed: every package is locked by hash.
ARG BASE_IMAGE=python:3.12-slim-bookworm
# The image that target `ray` starts from: gpu or cpu.
ARG RAY_ON=gpu

FROM ${BASE_IMAGE} AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Mirrors, where the usual places are slow or out of reach: Debian's (scheme and host), PyPI's, and the PyTorch index's CPU builds.
ARG DEBIAN_MIRROR
ARG PYPI_INDEX
ARG TORCH_CPU_INDEX
RUN if [ -n "${DEBIAN_MIRROR:-}" ]; then \
      find /etc/apt '(' -name '*.sources' -o -name sources.list ')' \
        -exec sed -i -E "s#https?://[^/ ]+/debian#$DEBIAN_MIRROR/debian#" {} +; \
    fi; \
    apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
# The only writable places: /tmp (sockets), the cache (kernels that Triton compiles), and /keys for `voltserve keys`.
RUN useradd --system --uid 10001 --home-dir /var/cache/voltserve --create-home voltserve && chmod 1777 /var/cache/voltserve && \
    install -d -o voltserve -m 0700 /keys
ENV PATH=/opt/voltserve/bin:$PATH HOME=/var/cache/voltserve PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VOLTSERVE_HOST=0.0.0.0
EXPOSE 8000
STOPSIGNAL SIGTERM
# The start period is voltserve's own --start-timeout: until then only a success counts.
HEALTHCHECK --interval=10s --timeout=10s --retries=3 --start-period=900s CMD ["python", "-m", "server.run.healthcheck"]
ENTRYPOINT ["tini", "--", "python", "-m", "server"]

# What installs and builds, mounted where it is needed and in no image.
FROM base AS tools
RUN --mount=type=bind,source=requirements/uv.lock,target=/uv.lock \
    python3 -m venv /opt/tools && \
    PIP_INDEX_URL="${PYPI_INDEX:-}" /opt/tools/bin/pip install --no-cache-dir --require-hashes --no-deps -r /uv.lock

FROM base AS environment
ENV VIRTUAL_ENV=/opt/voltserve UV_LINK_MODE=copy UV_HTTP_TIMEOUT=180
RUN python3 -m venv /opt/voltserve

# torch, then vLLM's Python and the rest. The two environments differ in torch alone.
FROM environment AS cpu-environment
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/cache/uv \
    --mount=type=bind,source=requirements,target=/src/requirements \
    --mount=type=bind,source=scripts/install_torch_cpu.sh,target=/src/scripts/install_torch_cpu.sh \
    --mount=type=bind,source=scripts/install_engine.sh,target=/src/scripts/install_engine.sh \
    export UV_CACHE_DIR=/cache/uv ${PYPI_INDEX:+UV_DEFAULT_INDEX=$PYPI_INDEX} && \
    /src/scripts/install_torch_cpu.sh /opt/tools/bin/uv && \
    /src/scripts/install_engine.sh /opt/tools/bin/uv

FROM cpu-environment AS cpu-build
RUN apt-get update && apt-get install -y --no-install-recommends g++
WORKDIR /src
COPY kernels kernels
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./kernels
COPY . .
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# Triton has C compiled at run time where it can. Here it cannot: engine/triton_driver.py does without.
FROM environment AS gpu-environment
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/cache/uv \
    --mount=type=bind,source=requirements,target=/src/requirements \
    --mount=type=bind,source=scripts/install_engine.sh,target=/src/scripts/install_engine.sh \
    --mount=type=bind,source=scripts/docker_prune.sh,target=/src/scripts/docker_prune.sh \
    export UV_CACHE_DIR=/cache/uv ${PYPI_INDEX:+UV_DEFAULT_INDEX=$PYPI_INDEX} && \
    /opt/tools/bin/uv pip install --no-deps --require-hashes --compile-bytecode -r /src/requirements/torch.lock && \
    /src/scripts/install_engine.sh /opt/tools/bin/uv && \
    /src/scripts/docker_prune.sh /opt/voltserve

FROM gpu-environment AS gpu-build
RUN apt-get update && apt-get install -y --no-install-recommends g++
WORKDIR /src
COPY scripts/fetch_nvcc.sh scripts/build_cuda.sh scripts/cuda_wheel.sh scripts/
RUN PIP_INDEX_URL="${PYPI_INDEX:-}" XDG_CACHE_HOME=/cache scripts/fetch_nvcc.sh
COPY kernels kernels
RUN mkdir /wheels && XDG_CACHE_HOME=/cache scripts/cuda_wheel.sh /opt/voltserve/bin/python /wheels
COPY . .
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM cpu-environment AS cpu
RUN --mount=type=bind,from=cpu-build,source=/wheels,target=/wheels \
    python -m pip install --no-deps --no-index --no-cache-dir --compile /wheels/*.whl
USER 10001
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="voltserve" \
      org.opencontainers.image.description="4-bit NVFP4 models behind an OpenAI-compatible API, on a CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      voltserve.vllm="0.28.0" voltserve.torch="2.10.0"

FROM gpu-environment AS gpu
RUN --mount=type=bind,from=gpu-build,source=/wheels,target=/wheels \
    python -m pip install --no-deps --no-index --no-cache-dir --compile /wheels/*.whl
# What the NVIDIA Container Toolkit gives to this container.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="voltserve" \
      org.opencontainers.image.description="4-bit NVFP4 models on Tesla V100s behind an OpenAI-compatible API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      voltserve.vllm="0.28.0" voltserve.torch="2.10.0" voltserve.cuda="12.8"

# Either image with Ray, for several machines (docker-compose.ray.yml). One Ray and one Python on all of them.
FROM ${RAY_ON} AS ray
USER 0
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools --mount=type=cache,target=/cache/uv \
    --mount=type=bind,source=requirements/ray.lock,target=/src/requirements/ray.lock \
    export UV_CACHE_DIR=/cache/uv ${PYPI_INDEX:+UV_DEFAULT_INDEX=$PYPI_INDEX} && \
    /opt/tools/bin/uv pip install --no-deps --require-hashes --compile-bytecode -r /src/requirements/ray.lock
USER 10001

# What a build without a target makes.
FROM gpu

# verl-tool with everything that a training needs, or only what serves tools. `make image` builds it with podman or docker; see
# assets/docs/clusters.md.
#
# BASE     a Debian or Ubuntu with Python 3.10-3.12 among its packages. The default's CUDA toolkit is for what compiles CUDA code at run
#          time; torch and vLLM bring their own libraries, and the driver comes from the machine.
# PROFILE  gpu, cpu, or tools: only what serves tools
# EXTRAS   further extras of scripts/env.sh: dev mcp retrieval web
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

# gcc and the headers of Python are for Triton, bubblewrap and libseccomp for the sandbox, wget for the probes of KubeRay.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        bubblewrap ca-certificates gcc git iproute2 libc6-dev libseccomp2 procps python3 python3-dev python3-pip python3-venv wget \
    && rm -rf /var/lib/apt/lists/*

ARG PROFILE=gpu
ARG EXTRAS=""
# How this build reaches packages: a mirror, a folder of wheels (mounted), certificates (mounted). They are not in the image.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
ARG FLASH_ATTN_WHEEL

ENV VERL_TOOL_VENV=/opt/venv
WORKDIR /opt/verl-tool
# The packages depend on these files alone, so that this layer survives changes of the code. There is no GPU while an image is built.
COPY pyproject.toml ./
COPY scripts ./scripts
RUN --mount=type=cache,target=/root/.cache/uv \
    mkdir verl_tool eval_service && touch README.md LICENSE verl_tool/__init__.py eval_service/__init__.py \
    && VERL_TOOL_SKIP_CHECKS=1 VERL_TOOL_SKIP_SYSTEM=1 UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy \
        bash -c '[ -z "${SSL_CERT_FILE:-}" ] || export PIP_CERT="$SSL_CERT_FILE"; source scripts/env.sh ${PROFILE#tools} $EXTRAS' \
    && rm -rf .tools
COPY . .
RUN /opt/venv/bin/python -m compileall -q verl_tool eval_service && install -d -m 1777 data outputs /home/verl-tool

# Any user may run it (--user): its home and the folders of runs are writable for all, and a user without a name gets one.
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv VERL_TOOL_SKIP_INSTALL=1 \
    HOME=/home/verl-tool USER=verl-tool LOGNAME=verl-tool \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["bash"]

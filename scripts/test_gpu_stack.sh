#!/usr/bin/env bash
# Check the GPU stack on a machine without a GPU: install what scripts/constraints/gpu.txt locks (about 9 GB, without flash-attn)
# into an environment of its own, import everything of ours and the engine's GPU worker with the plug-ins on, compose and
# validate all recipes for several counts of GPUs, and run the tests of what touches torch, verl and vLLM.
#
# `bash scripts/test_gpu_stack.sh [ARGUMENTS OF PYTEST...]`; the default is those tests. VERL_TOOL_PYTHON=python3.12 takes another
# Python, and VERL_TOOL_VERL=0.9.1 another verl, each with an environment of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -n "${VERL_TOOL_PYTHON:-}${VERL_TOOL_VERL:-}" ]; then
    other="${VERL_TOOL_PYTHON:+-$("$VERL_TOOL_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}${VERL_TOOL_VERL:+-verl-$VERL_TOOL_VERL}"
    export VERL_TOOL_VENV="${VERL_TOOL_VENV:-$PWD/.venv-gpu$other}"
fi
source scripts/env.sh dev gpu
# A GPU of this machine is not used, so that every machine checks the same.
# Where torch finds no device, verl needs to be told that it shall take the CPU.
export CUDA_VISIBLE_DEVICES=-1 VERL_PLATFORM=cpu
[ $# -gt 0 ] || { python -m pytest tests/platforms/test_gpu_stack.py; set -- tests/{platforms,trainer,agent_workers,agent_loop,examples/train}; }
exec python -m pytest -m "not alone and not e2e" -n 2 --dist loadfile "$@"

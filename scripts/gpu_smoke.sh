#!/usr/bin/env bash
# Does this machine's GPU work with this project? Half an hour, offline, with tiny random models:
#
#     bash scripts/gpu_smoke.sh [--parts grpo,engine] [--list] [--output FILE] [--device cpu] [--minutes 20]
#
# VERL_TOOL_SKIP_INSTALL=1 installs nothing and takes the environment that is there (VERL_TOOL_VENV, else .venv-gpu with
# a GPU and .venv without), or without one the Python on PATH; parts whose packages are missing are skipped.
# See assets/docs/gpu_smoke.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh train
python=python
command -v python >/dev/null || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m verl_tool.doctor.gpu_smoke "$@"

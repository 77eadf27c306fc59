#!/usr/bin/env bash
# The project's checks: format, lint, types, tests. Arguments go to pytest: `bash scripts/test.sh -m "not slow"`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# On a machine with GPUs too, whose own checks are scripts/test_gpu_stack.sh and scripts/gpu_smoke.sh.
PROFILE="${PROFILE:-cpu}"
source scripts/env.sh dev train
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"

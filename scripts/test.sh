#!/usr/bin/env bash
# The project's checks: format, lint, types, tests. Arguments go to pytest: `bash scripts/test.sh -m "not slow" -n 2`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# On a machine with GPUs too, whose own checks are scripts/test_gpu_stack.sh and scripts/gpu_smoke.sh.
PROFILE="${PROFILE:-cpu}"
source scripts/env.sh dev train
ruff check .
ruff format --check .
mypy
[ $# -eq 0 ] || exec python -m pytest "$@"
# Two at a time, but for those that load the machine, or would find each other's Ray.
code=0
python -m pytest -m "not slow and not e2e" -n 2 --dist loadfile --durations=20 || code=$?
python -m pytest -m "slow or e2e" --durations=20 || code=$?
exit $code

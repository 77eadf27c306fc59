#!/usr/bin/env bash
# The project's checks: format, lint, types, tests. `bash scripts/test.sh quick` leaves out the tests that are marked slow;
# other arguments go to pytest: `bash scripts/test.sh tests/formats -x`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# On a machine with GPUs too, whose own checks are scripts/test_gpu_stack.sh and scripts/gpu_smoke.sh.
PROFILE="${PROFILE:-cpu}"
source scripts/env.sh dev train
ruff check .
ruff format --check .
[ $# -eq 0 ] || mypy
# Four for two cores: tests wait for servers, and for what they start.
several=(python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=20)
[ "$*" != quick ] || exec "${several[@]}" -m "not slow and not e2e"
[ $# -eq 0 ] || exec python -m pytest "$@"
code=0
# Types beside the first tests, which wait for servers.
types="$(mktemp)"
mypy >"$types" 2>&1 &
checks=$!
trap 'kill "$checks" 2>/dev/null || true; rm -f "$types"' EXIT
"${several[@]}" -m "not alone and not e2e" || code=$?
wait "$checks" || code=$?
cat "$types"
# One at a time: those that load the machine, or would find each other's Ray. Only their files are imported.
marks='mark\.alone|TRAINS_ON_CPU'
[ -z "${VERL_TOOL_E2E:-}" ] || marks="$marks|mark\.e2e"
mapfile -t files < <(grep -rlE "$marks" tests --include='test_*.py' | sort)
python -m pytest -m "alone or e2e" --durations=20 "${files[@]}" || code=$?
exit $code

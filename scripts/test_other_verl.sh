#!/usr/bin/env bash
# The trainer's tests with another version of verl than the pinned one, in an environment of its own that is made on the
# first call: `bash scripts/test_other_verl.sh [VERSION] [ARGUMENTS OF PYTEST...]`. The default is 0.9.1 and all tests of
# what touches verl; VERL_TOOL_E2E=1 adds the whole trainings with other algorithms and with faults.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=0.9.1
case "${1:-}" in [0-9]*) version="$1" && shift ;; esac
export VERL_TOOL_VERL="$version" VERL_TOOL_VENV="${VERL_TOOL_VENV:-$PWD/.venv-verl-$version}"
source scripts/env.sh dev train
found="$(python -c 'from importlib.metadata import version; print(version("verl"))')"
[ "$found" = "$version" ] || { echo "error: $VERL_TOOL_VENV has verl $found, not $version; remove it" >&2; exit 1; }
[ $# -gt 0 ] || set -- tests/trainer tests/platforms tests/agent_workers tests/agent_loop/verl tests/agent_loop/generators
exec python -m pytest "$@"

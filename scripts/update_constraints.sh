#!/usr/bin/env bash
# Resolve anew what scripts/constraints/ pins. Run it, run the tests, commit the difference.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh dev
uv="$(verl_tool_find_uv)"
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
plain=(--quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links)
resolve() { # FILE TITLE ARGUMENTS...
    local file="scripts/constraints/$1" title="$2" made
    made="$("$uv" pip compile pyproject.toml --extra dev --constraint scripts/constraints/verl.txt "${plain[@]}" "${@:3}")"
    printf '# %s Made by scripts/update_constraints.sh.\n%s\n' "$title" "$made" >"$file"
}
resolve server.txt "What the tool server and its tests were last checked with." --universal --python-version 3.10
resolve cpu.txt "What training on CPU was last checked with (Python 3.11)." --extra cpu --python-version 3.11 \
    --override scripts/constraints/overrides_cpu.txt

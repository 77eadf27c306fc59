#!/usr/bin/env bash
# Resolve anew what scripts/constraints/ pins. Run it, run the tests and scripts/test_gpu_stack.sh, commit the difference.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh dev
uv="$(verl_tool_find_uv)"
plain=(--quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links)
resolve() { # FILE TITLE ARGUMENTS...
    local file="scripts/constraints/$1" title="$2" made folder folders=()
    for folder in $(verl_tool_wheel_folders "$(basename "$1" .txt)"); do folders+=(--find-links "$folder"); done
    made="$(env -u UV_FIND_LINKS "$uv" pip compile pyproject.toml --extra dev --constraint scripts/constraints/verl.txt "${plain[@]}" "${folders[@]}" "${@:3}")"
    printf '# %s Made by scripts/update_constraints.sh.\n%s\n' "$title" "$made" >"$file"
}
resolve server.txt "What the tool server and its tests were last checked with." --universal --python-version 3.10
resolve cpu.txt "What training on CPU was last checked with (Python 3.11)." --extra cpu --python-version 3.11 \
    --override scripts/constraints/overrides_cpu.txt
resolve gpu.txt "What training on GPUs was last checked with (Python 3.10 to 3.12)." --extra gpu --universal --python-version 3.10

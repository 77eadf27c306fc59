# Source this: `source scripts/env.sh [EXTRA...]`. Makes the environment on a fresh machine, activates it, and is a no-op in under
# a second when all is there. It is .venv, or .venv-gpu with the extra gpu, so that a file system of both kinds of machine has both.
#
# EXTRA: dev (tests, linters, the documentation site), mcp (Model Context Protocol), retrieval (search), web (reading pages), browser (the
# browser), swe (swebench), docs (the documentation site), modal, e2b, daytona (workspaces in sandboxes of these services), cpu (training without an
# accelerator), gpu (training on GPUs), train (what PROFILE says, else cpu or gpu by what this machine has). Without any, only what serves
# tools is installed. Extras add up over calls, in the environment that is active.
#
# PROFILE                cpu or gpu: what `train` means (a cluster's head without a GPU needs PROFILE=gpu)
# VERL_TOOL_VENV         where the environment lives (default: .venv or .venv-gpu in the project)
# VERL_TOOL_PYTHON       the Python that it is made with (default: python3, if it is 3.10-3.12, else another one here, else uv fetches 3.12)
# VERL_TOOL_VERL         version of verl (default: the one that scripts/constraints/verl.txt pins)
# VERL_TOOL_SKIP_INSTALL 1: take what is there as it is: VERL_TOOL_VENV, or in an image without one the Python on PATH
# VERL_TOOL_SKIP_SYSTEM  1: do not try to install the system packages that the sandbox needs, with dev and browser chromium,
#                        and with gpu the compiler that Triton needs
# VERL_TOOL_SKIP_CHECKS  1: with gpu, install although a check of the machine failed
# FLASH_ATTN_WHEEL       with gpu: a wheel of flash-attn, path or URL (default: one that fits in the folders of UV_FIND_LINKS, if any)
# FLASH_ATTN_BUILD       1: with gpu, build flash-attn here; needs nvcc of CUDA 13, and takes an hour on few cores

verl_tool_say() { printf '\033[2m[env]\033[0m %s\n' "$*" >&2; }
verl_tool_fail() { printf '[env] error: %s\n' "$*" >&2; return 1; }

verl_tool_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# A system Python of a version we support, else the version that uv shall fetch.
verl_tool_python() {
    local candidate candidates=(python3 python3.11 python3.12 python3.10)
    [ -z "${VERL_TOOL_PYTHON:-}" ] || candidates=("$VERL_TOOL_PYTHON")
    for candidate in "${candidates[@]}"; do
        "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12)); ' 2>/dev/null || continue
        "$candidate" -c 'import sys; print(sys.executable)' && return 0
    done
    [ -z "${VERL_TOOL_PYTHON:-}" ] || { verl_tool_fail "VERL_TOOL_PYTHON=$VERL_TOOL_PYTHON is not a Python 3.10-3.12"; return 1; }
    echo 3.12
}

# The first python3 on PATH that has pip: the one of an active environment may have none.
verl_tool_python_with_pip() {
    local python
    while IFS= read -r python; do
        if "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --user >/dev/null 2>&1; then echo "$python"; return 0; fi
    done < <(type -ap python3)
    return 1
}

verl_tool_find_uv() {
    local tools="$verl_tool_root/.tools" python
    if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then command -v uv; return 0; fi
    if [ ! -x "$tools/bin/uv" ]; then
        python="$(verl_tool_python_with_pip)" ||
            { verl_tool_fail "neither uv nor a python3 with pip is here; install one of them (for example: apt-get install python3-pip)"; return 1; }
        verl_tool_say "installing uv into .tools"
        "$python" -m pip install --quiet --disable-pip-version-check --target "$tools" uv >&2 ||
            { verl_tool_fail "pip could not install uv"; return 1; }
    fi
    echo "$tools/bin/uv"
}

verl_tool_has_gpu() { command -v nvidia-smi >/dev/null && [[ "$(nvidia-smi -L 2>/dev/null)" == *GPU* ]]; }

# Names of extras, one a line, with `train` resolved.
verl_tool_resolve_extras() {
    local extra
    for extra in "$@"; do
        [ "$extra" != train ] || extra="${PROFILE:-$(if verl_tool_has_gpu; then echo gpu; else echo cpu; fi)}"
        case "$extra" in megatron*) extra=gpu ;; esac
        case "$extra" in
            dev | mcp | retrieval | web | browser | swe | modal | e2b | daytona | docs | cpu | gpu) echo "$extra" ;;
            *) verl_tool_fail "extra '$extra' is unknown; known: dev, mcp, retrieval, web, browser, swe, modal, e2b, daytona, docs, cpu, gpu, train"; return 1 ;;
        esac
    done
}

# The sandbox needs bubblewrap and libseccomp. Without the right to install them, say so and go on: the server itself
# refuses to start without isolation, and tells what is missing.
verl_tool_system_packages() {
    [ "${VERL_TOOL_SKIP_SYSTEM:-0}" = 1 ] && return 0
    local missing=()
    command -v bwrap >/dev/null || missing+=(bubblewrap)
    ldconfig -p 2>/dev/null | grep -q libseccomp.so.2 || [ -n "$(ls /usr/lib*/libseccomp.so.2 /usr/lib/*/libseccomp.so.2 2>/dev/null)" ] ||
        missing+=(libseccomp2)
    [ ${#missing[@]} -eq 0 ] && return 0
    verl_tool_may_install ||
        { verl_tool_say "the sandbox needs: ${missing[*]} (no right to install system packages here; ask an administrator)"; return 0; }
    verl_tool_say "installing ${missing[*]}"
    if command -v apt-get >/dev/null; then
        verl_tool_apt "${missing[@]}"
    elif command -v dnf >/dev/null; then
        verl_tool_as_root dnf install -y -q bubblewrap libseccomp >/dev/null 2>&1
    elif command -v apk >/dev/null; then
        verl_tool_as_root apk add --quiet bubblewrap libseccomp >/dev/null 2>&1
    fi || verl_tool_say "could not install ${missing[*]}; install them by hand"
}

# The browser tool, and the tests of the viewer's pages, drive a real browser, Debian's; without one those tests are skipped.
verl_tool_browser() {
    [ "${VERL_TOOL_SKIP_SYSTEM:-0}" = 1 ] && return 0
    command -v chromedriver >/dev/null || ! command -v apt-get >/dev/null && return 0
    verl_tool_may_install || return 0
    verl_tool_say "installing chromium and chromium-driver"
    verl_tool_apt --no-install-recommends chromium chromium-driver || verl_tool_say "could not install chromium; the tool browser needs it, and the tests that need it are skipped"
}

# The tests of containers run podman, which needs no daemon; without it they are skipped. A docker client may be here without an engine.
verl_tool_podman() {
    [ "${VERL_TOOL_SKIP_SYSTEM:-0}" = 1 ] && return 0
    command -v podman >/dev/null || ! command -v apt-get >/dev/null && return 0
    verl_tool_may_install || return 0
    verl_tool_say "installing podman and runc"
    verl_tool_apt podman runc || verl_tool_say "could not install podman; the tests that need it are skipped"
}

verl_tool_may_install() { [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }; }
verl_tool_as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
verl_tool_apt() {
    { verl_tool_as_root apt-get install -y -qq "$@" || { verl_tool_as_root apt-get update -qq && verl_tool_as_root apt-get install -y -qq "$@"; }; } >/dev/null 2>&1
}

# Versions for EXTRAS (one a line) on Python PYTHON (3.11), one a line: those last tested, and the verl that is asked for.
verl_tool_pins() {
    local pins="$verl_tool_root/scripts/constraints" files=(verl.txt) verl
    if grep -qx gpu <<<"$1"; then
        files+=(gpu.txt)
    elif ! grep -qx cpu <<<"$1"; then
        files+=(server.txt)
    elif [ "$2" = 3.11 ]; then
        files+=(cpu.txt) # resolved for 3.11; other versions take what pyproject.toml allows
    fi
    verl="${VERL_TOOL_VERL:-$(sed -n 's/^verl==//p' "$pins/verl.txt")}"
    (cd "$pins" && cat "${files[@]}") | sed "s/^verl==.*/verl==$verl/"
}

# Folders of local wheels for EXTRAS. uv does not read pip's own setting, and a CPU build of torch there would win over CUDA's.
verl_tool_wheel_folders() {
    local folder
    for folder in $(tr , ' ' <<<"${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"); do
        if grep -qx gpu <<<"$1" && ls "$folder"/torch-*+cpu-*.whl >/dev/null 2>&1; then continue; fi
        echo "$folder"
    done
}

verl_tool_install() {
    local uv extras="$1" names args=() backend=() python
    names="$(echo "$extras" | paste -sd, -)"
    if grep -qx cpu <<<"$extras" && grep -qx gpu <<<"$extras"; then
        verl_tool_fail "extras cpu and gpu exclude each other in one environment; remove $verl_tool_venv or set VERL_TOOL_VENV"
        return 1
    fi
    python="$verl_tool_venv/bin/python"
    [ -x "$python" ] || python="$(verl_tool_python)" || return 1
    if grep -qx gpu <<<"$extras"; then
        source "$verl_tool_root/scripts/gpu_machine.sh"
        verl_tool_check_gpu_machine "$python" || return 1
    fi
    uv="$(verl_tool_find_uv)" || return 1
    local -x UV_FIND_LINKS
    UV_FIND_LINKS="$(verl_tool_wheel_folders "$extras" | paste -sd, -)"
    [ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
    if [ ! -x "$verl_tool_venv/bin/python" ]; then
        verl_tool_say "making $verl_tool_venv"
        "$uv" venv --quiet --python "$python" "$verl_tool_venv" || return 1
    fi
    if grep -qx cpu <<<"$extras"; then
        args=(--override "$verl_tool_root/scripts/constraints/overrides_cpu.txt")
        # A CPU build of torch: a local wheel where there is one, else PyTorch's own CPU builds.
        [ -n "$(ls $(verl_tool_wheel_folders cpu | sed 's|$|/torch-*+cpu-*.whl|') /nonexistent 2>/dev/null)" ] || backend=(--torch-backend cpu)
    fi
    python="$("$verl_tool_venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" || return 1
    verl_tool_pins "$extras" "$python" >"$verl_tool_venv/.constraints.txt" || return 1
    args+=(--constraint "$verl_tool_venv/.constraints.txt")
    verl_tool_say "installing verl-tool${names:+[$names]}"
    "$uv" pip install --quiet --python "$verl_tool_venv/bin/python" "${args[@]}" "${backend[@]}" \
        --editable "$verl_tool_root${names:+[$names]}" || return 1
    if grep -qx cpu <<<"$extras"; then verl_tool_site_packages || return 1; fi
    if grep -qx gpu <<<"$extras"; then verl_tool_flash_attention "$uv" || return 1; fi
    verl_tool_system_packages
    if grep -qxE 'dev|browser' <<<"$extras"; then verl_tool_browser; fi
    if grep -qx dev <<<"$extras"; then verl_tool_podman; fi
    echo "$extras" >"$verl_tool_venv/.extras"
}

# What Python imports whenever it starts, of scripts/site.
verl_tool_site_packages() {
    local site file
    site="$("$verl_tool_venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || return 1
    for file in "$verl_tool_root"/scripts/site/*.py; do
        cp "$file" "$site/" && echo "import $(basename "$file" .py)" >"$site/$(basename "$file" .py).pth" || return 1
    done
}

verl_tool_env() {
    local extras
    extras="$(verl_tool_resolve_extras "$@")" || return 1
    verl_tool_venv="$verl_tool_root/.venv"
    # Further extras for the GPU stack go where it is.
    if grep -qx gpu <<<"$extras" || { [ "${VIRTUAL_ENV:-}" = "$verl_tool_venv-gpu" ] && ! grep -qx cpu <<<"$extras"; }; then
        verl_tool_venv+=-gpu
    fi
    verl_tool_venv="${VERL_TOOL_VENV:-$verl_tool_venv}"
    extras="$(printf '%s\n' "$extras" "$(cat "$verl_tool_venv/.extras" 2>/dev/null)" | sed '/^$/d' | sort -u)"
    if [ "${VERL_TOOL_SKIP_INSTALL:-0}" != 1 ]; then verl_tool_bring_up_to_date "$extras" || return 1; fi
    # Imports are slow without cached bytecode, and there are many processes.
    unset PYTHONDONTWRITEBYTECODE
    [ -d "$verl_tool_venv" ] || return 0
    export VIRTUAL_ENV="$verl_tool_venv"
    # First on the path, even if another environment has come there since.
    PATH=":$PATH:"
    PATH="${PATH//:"$verl_tool_venv/bin":/:}"
    PATH="${PATH#:}"
    export PATH="$verl_tool_venv/bin:${PATH%:}"
    # uv, by which packages are added: the environment has no pip.
    case ":$PATH:" in *":$verl_tool_root/.tools/bin:"*) ;; *) PATH+=":$verl_tool_root/.tools/bin" ;; esac
}

# Install what EXTRAS ask for, unless that was done before and nothing has changed since.
verl_tool_bring_up_to_date() {
    local extras="$1" stamp
    stamp="$(cat "$verl_tool_root/pyproject.toml" "$verl_tool_root"/scripts/constraints/*.txt "$verl_tool_root"/scripts/site/*.py "$verl_tool_root"/scripts/{env,gpu_machine}.sh \
        <(echo "$extras" "${VERL_TOOL_VERL:-}" "${FLASH_ATTN_WHEEL:-}" "${FLASH_ATTN_BUILD:-}") | cksum)"
    if [ "$(cat "$verl_tool_venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
        verl_tool_install "$extras" || { verl_tool_fail "setting up $verl_tool_venv failed; the lines above say why"; return 1; }
        echo "$stamp" >"$verl_tool_venv/.stamp"
    fi
}

verl_tool_env "$@"

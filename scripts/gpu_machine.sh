# Sourced by env.sh for the extra gpu: what its packages need of the machine, checked before they are downloaded, and
# flash-attn, which has no wheel for this torch.

VERL_TOOL_MIN_DRIVER=580     # of CUDA 13, by NVIDIA's compatibility table
VERL_TOOL_MIN_CAPABILITY=7.5 # CUDA 13 has no code for older cards
VERL_TOOL_GPU_DISK_GIB=12    # the environment takes 9

# Check this machine, for an environment of PYTHON (a path, or a version that uv fetches). Fails, naming all that is wrong.
verl_tool_check_gpu_machine() {
    local problems=() warnings=() problem gpus=0
    if verl_tool_has_gpu; then
        gpus="$(nvidia-smi -L | grep -c GPU)"
        verl_tool_check_driver
    elif command -v nvidia-smi >/dev/null; then
        verl_tool_warning "nvidia-smi finds no GPU: $(nvidia-smi 2>&1 | head -1)"
    else
        verl_tool_warning "no GPU here; the machines that have them need an NVIDIA driver $VERL_TOOL_MIN_DRIVER or later"
    fi
    verl_tool_check_compiler "$1"
    verl_tool_check_disk
    verl_tool_check_resources "$gpus"
    for problem in "${warnings[@]}"; do verl_tool_say "warning: $problem"; done
    for problem in "${problems[@]}"; do verl_tool_fail "$problem" || true; done
    [ ${#problems[@]} -eq 0 ] || [ "${VERL_TOOL_SKIP_CHECKS:-0}" = 1 ] ||
        verl_tool_fail "nothing was installed; VERL_TOOL_SKIP_CHECKS=1 installs all the same"
}

verl_tool_problem() { problems+=("$*"); }
verl_tool_warning() { warnings+=("$*"); }

verl_tool_check_driver() {
    local driver capability
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)"
    capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -V | head -1)"
    [ "${driver%%.*}" -ge "$VERL_TOOL_MIN_DRIVER" ] 2>/dev/null ||
        verl_tool_problem "the NVIDIA driver is $driver, and these packages are built for CUDA 13, which needs $VERL_TOOL_MIN_DRIVER or later: update the" \
            "driver, or on data-centre cards install NVIDIA's package cuda-compat-13-0 and set VERL_TOOL_SKIP_CHECKS=1"
    # Drivers that do not tell it are too old anyway.
    ! grep -qE '^[0-9.]+$' <<<"$capability" || verl_tool_at_least "$capability" "$VERL_TOOL_MIN_CAPABILITY" ||
        verl_tool_problem "a GPU here has compute capability $capability, and CUDA 13 supports $VERL_TOOL_MIN_CAPABILITY and later (Turing): take another machine"
}

verl_tool_at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -1)" = "$2" ]; }

# Triton compiles a launcher for each kernel when it first runs.
verl_tool_check_compiler() {
    local python="$1" version header missing=()
    command -v gcc >/dev/null || command -v cc >/dev/null || missing+=(gcc)
    if [ -x "$python" ]; then # else uv fetches one, which has its headers
        read -r version header < <("$python" -c 'import sys, sysconfig; print("%d.%d" % sys.version_info[:2], sysconfig.get_path("include") + "/Python.h")')
        [ -f "$header" ] || missing+=("python$version-dev")
    fi
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "${VERL_TOOL_SKIP_SYSTEM:-0}" != 1 ] && command -v apt-get >/dev/null && verl_tool_may_install; then
        verl_tool_say "installing ${missing[*]}, with which Triton compiles"
        verl_tool_apt "${missing[@]}" && return 0
    fi
    verl_tool_problem "Triton compiles kernels when they first run, and here is no ${missing[*]}: install it (for example: apt-get install ${missing[*]})"
}

# The environment, and uv's cache, from which it takes its files by links if both are on one file system.
verl_tool_check_disk() {
    local folder free
    for folder in "$(verl_tool_existing_folder "$(dirname "$verl_tool_venv")")" "$(verl_tool_existing_folder "${UV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/uv}")"; do
        free="$(df -Pk "$folder" | awk 'NR == 2 {print int($4 / 1048576)}')"
        [ "${free:-0}" -ge "$VERL_TOOL_GPU_DISK_GIB" ] ||
            verl_tool_problem "$folder has $free GiB free, and the packages need $VERL_TOOL_GPU_DISK_GIB: free some, or set VERL_TOOL_VENV and UV_CACHE_DIR to folders of a larger disk"
    done
}

verl_tool_existing_folder() {
    local folder="$1"
    until [ -d "$folder" ]; do folder="$(dirname "$folder")"; done
    echo "$folder"
}

# What a training on GPUS of this node needs besides. None of it keeps the packages from being installed.
verl_tool_check_resources() {
    local shm cpus
    cpus="$(nproc)"
    [ "$1" -eq 0 ] || [ "$cpus" -ge $((4 * $1)) ] ||
        verl_tool_warning "$cpus CPUs for $1 GPUs: workers, engines, tools and rewards will wait for each other; 8 or more for each GPU are usual"
    shm="$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 {print int($2 / 1048576)}')"
    [ "${shm:-0}" -ge 8 ] ||
        verl_tool_warning "/dev/shm has ${shm:-0} GiB; Ray and NCCL need some (8 at least): start the container with --shm-size=64g, or mount -o remount,size=64g /dev/shm"
    verl_tool_can_isolate ||
        verl_tool_warning "no namespaces can be made here, so tools that run code (python_code, bash_terminal, …) will refuse to start: give the container" \
            "--security-opt seccomp=unconfined --security-opt unmask=ALL (podman; with docker systempaths=unconfined) or --privileged, run the tool server" \
            "elsewhere (TOOL_SERVER_URL)," \
            "or accept the risk with ISOLATION=none"
}

verl_tool_can_isolate() {
    unshare --pid --net --mount --mount-proc --fork true 2>/dev/null ||
        unshare --user --map-root-user --pid --net --mount --mount-proc --fork true 2>/dev/null
}

# flash-attn from FLASH_ATTN_WHEEL, from a folder of wheels, or built here if FLASH_ATTN_BUILD=1. Else it is left out.
verl_tool_flash_attention() {
    local uv="$1" python="$verl_tool_venv/bin/python" folder
    local install=("$uv" pip install --quiet --python "$python" --no-deps)
    if [ -n "${FLASH_ATTN_WHEEL:-}" ]; then
        verl_tool_say "installing $FLASH_ATTN_WHEEL"
        "${install[@]}" --reinstall-package flash-attn "$FLASH_ATTN_WHEEL" ||
            { verl_tool_fail "FLASH_ATTN_WHEEL=$FLASH_ATTN_WHEEL could not be installed"; return 1; }
    elif [ "${FLASH_ATTN_BUILD:-0}" = 1 ]; then
        command -v nvcc >/dev/null ||
            { verl_tool_fail "FLASH_ATTN_BUILD=1 needs nvcc of CUDA 13, which is not on PATH; install CUDA's toolkit, or take a wheel (FLASH_ATTN_WHEEL)"; return 1; }
        verl_tool_say "building flash-attn; each of MAX_JOBS=${MAX_JOBS:-4} jobs takes some GB of memory"
        "$uv" pip install --quiet --python "$python" setuptools wheel ninja packaging psutil &&
            MAX_JOBS="${MAX_JOBS:-4}" "${install[@]}" --no-build-isolation 'flash-attn>=2.8,<3' ||
            { verl_tool_fail "flash-attn could not be built"; return 1; }
    else
        for folder in $(verl_tool_wheel_folders gpu); do install+=(--find-links "$folder"); done
        "${install[@]}" --offline --no-index --only-binary flash-attn 'flash-attn>=2.8,<3' 2>/dev/null || true
    fi
    if "$python" -c 'import flash_attn.bert_padding' 2>/dev/null; then return 0; fi
    # A wheel for another torch would fail in the middle of a training.
    "$uv" pip uninstall --quiet --python "$python" flash-attn 2>/dev/null
    if [ -n "${FLASH_ATTN_WHEEL:-}" ] || [ "${FLASH_ATTN_BUILD:-0}" = 1 ]; then
        verl_tool_fail "flash-attn cannot be imported, so it was removed again: it must be built for this Python, torch 2.13 and CUDA 13"
        return 1
    fi
    verl_tool_say "without flash-attn: torch's own attention takes its place (FLASH_ATTN_WHEEL=PATH or FLASH_ATTN_BUILD=1 adds it)"
}

#!/usr/bin/env bash
# A training over the nodes of a Slurm job. Submit it from the project's folder, which all nodes see at the same path:
#
#     sbatch --nodes=4 examples/cluster/slurm.sh bash examples/train/acecoder/train.sh trainer.test_freq=20
#
# What you give to sbatch (partition, account, time, …) wins over the lines below. The command runs on the first node when all have
# joined its Ray cluster. Five minutes before the time limit it is stopped, and the job is queued again and resumes.
#
# JOIN_SECONDS   how long to wait until all nodes have joined              (default: 600)
# MAX_REQUEUES   how often the job is queued again at its time limit       (default: 20)
# CONTAINER      words before a command that run it in a container on a node, such as
#                "apptainer exec --nv --bind /data image.sif"              (default: none)
# SRUN_OPTIONS   further options of srun, such as "--container-image=… --container-mounts=…" of Pyxis
#
#SBATCH --job-name=verl-tool
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=verl-tool-%j.log
#SBATCH --signal=B:USR1@300
set -euo pipefail
# shellcheck disable=SC1091 # env.sh is sourced

fail() { printf '[slurm] error: %s\n' "$*" >&2; exit 2; }

# Of the first address that a host's name has in the cluster's network; loopback addresses are of no use to other nodes.
address_of() { getent ahostsv4 "$1" | awk '$1 !~ /^127\./ { print $1; exit }'; }

# What srun runs, once on each node.
run_on_node() {
    export NODE_RANK="$SLURM_NODEID" N_CPUS="${N_CPUS:-$SLURM_CPUS_PER_TASK}" NODE_ADDRESS
    NODE_ADDRESS="$(address_of "$SLURMD_NODENAME")"
    # The job has brought the environment up to date, and all nodes share it.
    source scripts/env.sh "$PROFILE"
    exec bash examples/cluster/run_node.sh "$@"
}

run_job() {
    local srun code=0 names
    names="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
    state="$(mktemp -d "$PWD/.slurm-$SLURM_JOB_ID-XXXXXX")" # for this user alone, and on the file system that the nodes share
    trap 'rm -rf "$state"' EXIT
    (umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$state/token")
    export RAY_AUTH_TOKEN_PATH="$state/token" STOP_FILE="$state/stop"
    export NNODES="$SLURM_JOB_NUM_NODES" N_GPUS="${SLURM_GPUS_ON_NODE:-0}" NODES="${names//$'\n'/,}"
    export PROFILE="${PROFILE:-$([ "$N_GPUS" = 0 ] && echo cpu || echo gpu)}" RAY_PORT="${RAY_PORT:-$((6400 + SLURM_JOB_ID % 1000))}"
    HEAD="$(address_of "${names%%$'\n'*}")"
    export HEAD
    [ -n "$HEAD" ] || fail "the name ${names%%$'\n'*} has no address that other nodes can reach"
    [ -n "${CONTAINER:-}${SRUN_OPTIONS:-}" ] || source scripts/env.sh "$PROFILE"
    export VERL_TOOL_SKIP_INSTALL=1

    # One step for all nodes; when one of its tasks fails, Slurm ends the others.
    # shellcheck disable=SC2086 # words
    srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
        --label ${SRUN_OPTIONS:-} ${CONTAINER:-} bash examples/cluster/slurm.sh --on-node "$@" &
    srun=$!
    trap 'requeue=1; touch "$STOP_FILE"' USR1
    trap 'touch "$STOP_FILE"' TERM INT
    while kill -0 "$srun" 2>/dev/null; do wait "$srun" || true; done
    wait "$srun" || code=$?
    if [ -n "${requeue:-}" ] && [ "$code" != 0 ]; then
        [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-20}" ] || fail "the job was queued again ${SLURM_RESTART_COUNT} times (MAX_REQUEUES)"
        echo "[slurm] the time limit is near; queueing the job again" >&2
        rm -rf "$state"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}

[ -f examples/cluster/slurm.sh ] || fail "$PWD is not the project's folder; submit the job from there"
[ -n "${SLURM_JOB_ID:-}" ] || fail "this runs in a Slurm job; start it with sbatch"
if [ "${1:-}" = --on-node ]; then
    shift
    run_on_node "$@"
fi
[ $# -gt 0 ] || fail "no command; sbatch examples/cluster/slurm.sh bash examples/train/acecoder/train.sh"
run_job "$@"

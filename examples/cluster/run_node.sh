#!/usr/bin/env bash
# One node of a training over several: `bash run_node.sh COMMAND...`, on every node at about the same time and with the same arguments.
# The first node starts Ray's head, waits until all nodes have joined with their GPUs, and runs COMMAND. The others join, and leave when
# the head is gone. Each ends only the Ray that it started. slurm.sh and sky.yaml run it.
#
# NODE_RANK     0 on the first node, 1, 2, … on the others
# HEAD          host name or address of the first node
# NNODES        number of nodes
# N_GPUS        GPUs of each node
# N_CPUS        CPUs of each node that Ray may use            (default: all)
# NODES         names or addresses of all nodes, by commas, so that an error can name those that are missing
# NODE_ADDRESS  this node's own address in the cluster's network (default: Ray's choice)
# RAY_PORT      port of the head                              (default: 6379)
# JOIN_SECONDS  how long to wait for the head, and for all nodes (default: 600)
# STOP_FILE     when this file appears, COMMAND gets SIGTERM
#
# Ray asks for the token of RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN or ~/.ray/auth_token, which must be the same on all nodes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

port="${RAY_PORT:-6379}" deadline="${JOIN_SECONDS:-600}" ray="" command=""
say() { printf '[node %s] %s\n' "${NODE_RANK:-?}" "$*" >&2; }
fail() { say "error: $*"; exit 1; }
# shellcheck disable=SC2016 # the inner shell expands them
head_answers() { timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$HEAD" "$port" 2>/dev/null; }

ray_lives() { kill -0 "$ray" 2>/dev/null; }

start_ray() {
    # Short, for Unix sockets, and of this start alone: other users' jobs have theirs beside it.
    folder="$(mktemp -d /tmp/ray-XXXXXX)"
    # A session of its own, so that all of it can be killed.
    # Slots, of which verl reserves some for each GPU, and the tool server one for each replica; no limit of cores.
    local slots="${N_CPUS:-$(nproc)}"
    [ "$slots" -ge $((14 + 3 * N_GPUS)) ] || slots=$((14 + 3 * N_GPUS))
    setsid ray start "$@" --block --num-cpus "$slots" --num-gpus "$N_GPUS" --temp-dir "$folder" \
        ${NODE_ADDRESS:+--node-ip-address "$NODE_ADDRESS"} >"$folder/start.log" 2>&1 &
    ray=$!
}

# SIGTERM, then SIGKILL after SECONDS.
end() {
    local process="$1" second
    kill -TERM "$process" 2>/dev/null || return 0
    for ((second = 0; second < $2; second++)); do
        kill -0 "$process" 2>/dev/null || return 0
        sleep 1
    done
    say "process $process has not ended within $2 s of SIGTERM; killing it"
    kill -KILL -- "-$process" 2>/dev/null || kill -KILL "$process" 2>/dev/null || true
}

clean_up() {
    local code=$?
    trap '' TERM INT
    [ -z "$command" ] || end "$command" 90
    [ -z "$ray" ] || end "$ray" 20
    [ -z "${folder:-}" ] || rm -rf "$folder"
    exit "$code"
}

# Runs a command, and returns its exit code; fails when Ray ends meanwhile. It is stopped when STOP_FILE appears.
run_beside_ray() {
    local code=0
    "$@" &
    command=$!
    while kill -0 "$command" 2>/dev/null; do
        [ ! -e "${STOP_FILE:-/nonexistent}" ] || { say "asked to stop"; end "$command" 90; break; }
        ray_lives || fail "Ray ended on this node: $(tail -n 5 "$folder/start.log")"
        sleep 1
    done
    wait "$command" || code=$?
    command=""
    return "$code"
}

# Whether Ray has started here within what is left of the deadline.
ray_started() {
    for (( ; SECONDS < deadline; )); do
        ! grep -q "Ray runtime started" "$folder/start.log" || return 0
        ray_lives || return 1
        sleep 1
    done
    return 1
}

run_head() {
    local code=0
    start_ray --head --port "$port" --include-dashboard false
    ray_started || fail "Ray did not start: $(tail -n 5 "$folder/start.log")"
    export RAY_ADDRESS="$HEAD:$port"
    run_beside_ray python examples/cluster/wait_for_nodes.py --nodes "$NNODES" --gpus "$N_GPUS" --timeout "$deadline" \
        ${NODES:+--names "$NODES"} || exit 1
    say "running: $*"
    # A recipe would take NODES for a misspelt NNODES.
    run_beside_ray env -u NODES "$@" || code=$?
    say "the command ended with exit code $code"
    exit "$code"
}

run_worker() {
    local unanswered=0
    while true; do
        until head_answers; do
            ((SECONDS < deadline)) || fail "the first node's Ray does not answer at $HEAD:$port after $deadline s"
            sleep 1
        done
        start_ray --address "$HEAD:$port"
        ! ray_started || break
        # Ray gives a node 30 s to start, which a busy one may need longer for.
        ((SECONDS < deadline)) || fail "Ray has not started here within $deadline s: $(tail -n 5 "$folder/start.log")"
        say "Ray did not start, trying again: $(tail -n 1 "$folder/start.log")"
        end "$ray" 20
        rm -rf "$folder"
    done
    while ((unanswered < 3)); do
        sleep 3
        if head_answers; then unanswered=0; else unanswered=$((unanswered + 1)); fi
        ray_lives || ((unanswered > 0)) || fail "Ray ended on this node: $(tail -n 5 "$folder/start.log")"
    done
    say "the first node's Ray is gone; leaving"
}

for name in NODE_RANK HEAD NNODES N_GPUS; do
    [ -n "${!name:-}" ] || fail "$name is not set; see the top of $0"
done
[ $# -gt 0 ] || fail "no command to run, such as: bash examples/train/acecoder/train.sh"
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
trap clean_up EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
if [ "$NODE_RANK" = 0 ]; then run_head "$@"; else run_worker; fi

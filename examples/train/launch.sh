#!/usr/bin/env bash
# Launches a recipe: `exec bash PATH/launch.sh "$0" "$@"` in its train.sh, beside which gpu.yaml and cpu.yaml lie (of
# train_mini.sh: gpu_mini.yaml and cpu_mini.yaml). A variable of the environment wins over them, and arguments, which are
# verl's own options, win over both.
#
# PROFILE    gpu, or cpu: a tiny model and tiny data on two cores        (default: what this machine has);
#            megatron: GPUs and verl's Megatron engine, where the recipe has megatron.yaml
# DRY_RUN    1: check the whole config with verl's validator, print it, start nothing; command: print the command line only
# RUN        folder of the run                                           (default: outputs/RECIPE/PROFILE)
# DATA       folder of train.parquet and test.parquet, made if missing   (default: data/RECIPE; cpu: RUN/data)
# MODEL      name on the hub or path; tiny: one made on the spot         (default: the recipe's)
# USE_TOOL   false: one turn without tools, both folders with -no_tool   (default: the recipe's)
# STEPS      training steps                                              (default: the recipe's; null: all epochs)
# SEED       of data, model and sampling                                 (default: 0)
# NNODES     nodes of the Ray cluster that RAY_ADDRESS names             (default: 1, and a Ray of our own)
# N_GPUS     GPUs of each node; on a CPU, training processes             (default: all here, else 8; cpu: the recipe's)
# ASYNC      colocate: sample ahead on the GPUs that train; separate: on GPUs of their own, ROLLOUT_NNODES nodes with
#            ROLLOUT_GPUS each                                           (default: sample, then train)
# STALENESS  updates by which ASYNC may train behind what sampled        (default: 4)
# TOOL_SERVER_URL  a tool server that runs already                       (default: one is started for the run)
#
# RECIPE_EXTRAS      set in train.sh: what it needs of scripts/env.sh besides `train`
# IGNORED_VARIABLES  of other programs, whose names are nearly those of variables here: else they end the start
#
# The other variables, and the option that each sets; a recipe reads names of data sets (DATASET, TEST_SIZE, …) itself:
variables="
    ALGORITHM            algorithm.adv_estimator
    BATCH_SIZE           data.train_batch_size
    CLIP_HIGH            actor_rollout_ref.actor.clip_ratio_high
    DATA                 recipe.data
    DYNAMIC_BATCH        actor_rollout_ref.actor.use_dynamic_bsz
    ENFORCE_EAGER        actor_rollout_ref.rollout.enforce_eager
    ENTROPY_COEFF        actor_rollout_ref.actor.entropy_coeff
    EPOCHS               trainer.total_epochs
    FUSED_KERNELS        actor_rollout_ref.model.use_fused_kernels
    GPU_MEMORY           actor_rollout_ref.rollout.gpu_memory_utilization
    GPU_MEMORY_GB        gpu_memory_gb
    ISOLATION            tool_server.isolation
    KEEP_CHECKPOINTS     trainer.max_actor_ckpt_to_keep
    KL_LOSS_COEF         actor_rollout_ref.actor.kl_loss_coef
    LEARNING_RATE        actor_rollout_ref.actor.optim.lr
    LOGGER               trainer.logger
    LORA_ALPHA           actor_rollout_ref.model.lora_alpha
    LORA_RANK            actor_rollout_ref.model.lora_rank
    LOSS_AGG             actor_rollout_ref.actor.loss_agg_mode
    LR_WARMUP_RATIO      actor_rollout_ref.actor.optim.lr_warmup_steps_ratio
    LR_WARMUP_STEPS      actor_rollout_ref.actor.optim.lr_warmup_steps
    MASK_OBSERVATIONS    actor_rollout_ref.agent.mask_observations
    MAX_ACTION_LENGTH    actor_rollout_ref.agent.max_action_length
    MAX_OBS_LENGTH       actor_rollout_ref.agent.max_obs_length
    MAX_PROMPT_LENGTH    data.max_prompt_length
    MAX_RESPONSE_LENGTH  data.max_response_length
    MAX_TOKENS_PER_GPU   actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    MAX_TURNS            actor_rollout_ref.agent.max_turns
    MICRO_BATCH_SIZE     actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    MINI_BATCH_SIZE      actor_rollout_ref.actor.ppo_mini_batch_size
    MIN_TURNS            actor_rollout_ref.agent.min_turns
    MODEL                recipe.model
    MTRL                 actor_rollout_ref.agent.enable_mtrl
    N                    actor_rollout_ref.rollout.n
    NNODES               trainer.nnodes
    N_GPUS               trainer.n_gpus_per_node
    OFFLOAD              recipe.offload
    REWARD               reward.reward_manager.name
    ROLLOUT_GPUS         actor_rollout_ref.rollout.n_gpus_per_node
    ROLLOUT_NNODES       actor_rollout_ref.rollout.nnodes
    SAVE_FREQ            trainer.save_freq
    SEED                 recipe.seed
    STALENESS            max_staleness
    STEPS                trainer.total_training_steps
    STOPS                actor_rollout_ref.agent.action_stop_tokens
    TEMPERATURE          actor_rollout_ref.rollout.temperature
    TENSOR_PARALLEL      actor_rollout_ref.rollout.tensor_model_parallel_size
    TEST_FREQ            trainer.test_freq
    TOOLS                tool_server.start
    TOOL_REPLICAS        recipe.tool_replicas
    TOP_P                actor_rollout_ref.rollout.top_p
    TRAIN_FILES          data.train_files
    ULYSSES              actor_rollout_ref.actor.ulysses_sequence_parallel_size
    USE_TOOL             actor_rollout_ref.agent.enable_agent
    VAL_FILES            data.val_files
    VAL_TEMPERATURE      actor_rollout_ref.rollout.val_kwargs.temperature
    WARM_UP              recipe.warm_up
    WEIGHT_DECAY         actor_rollout_ref.actor.optim.weight_decay
"

set -euo pipefail
folder="$(cd "$(dirname "$1")" && pwd)"
script="$(basename "$1" .sh)"
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { printf '[%s] error: %s\n' "$folder" "$*" >&2; exit 2; }
has_gpu() { command -v nvidia-smi >/dev/null && [[ "$(nvidia-smi -L 2>/dev/null)" == *GPU* ]]; }

count_gpus() { if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .; else nvidia-smi -L | grep -c GPU; fi; }

check_variables() {
    case "$PROFILE" in gpu | cpu | megatron*) ;; *) fail "PROFILE is '$PROFILE'; it must be gpu, cpu or megatron" ;; esac
    [ -f "$folder/$PROFILE${script#train}.yaml" ] || fail "PROFILE is $PROFILE, and there is no $PROFILE${script#train}.yaml"
    case "${DRY_RUN:-0}" in 0 | 1 | command) ;; *) fail "DRY_RUN is '$DRY_RUN'; it must be 1 or command" ;; esac
    case "${USE_TOOL:-true}" in true | false) ;; *) fail "USE_TOOL is '$USE_TOOL'; it must be true or false" ;; esac
    case "${ASYNC:-colocate}" in colocate | separate) ;; *) fail "ASYNC is '$ASYNC'; it must be colocate or separate" ;; esac
    [ "${NNODES:-1}" = 1 ] || [ -n "${RAY_ADDRESS:-}" ] || [ "${DRY_RUN:-0}" != 0 ] ||
        fail "NNODES is $NNODES, but RAY_ADDRESS names no cluster; on the first node: ray start --head, on the others:" \
            "ray start --address=FIRST_NODE:6379, then RAY_ADDRESS=auto NNODES=$NNODES bash $folder/$script.sh"
}

# Every variable that is read here, so that one which is nearly the name of another is not passed over in silence.
export_names() {
    local name _
    VERL_TOOL_LAUNCH_VARIABLES="PROFILE DRY_RUN RUN ASYNC TOOL_SERVER_URL"
    while read -r name _; do VERL_TOOL_LAUNCH_VARIABLES+=" $name"; done <<<"$variables"
    export VERL_TOOL_LAUNCH_VARIABLES
}

# The command line of the variables that are set, an argument a line of the array `options`.
collect_options() {
    local name option
    options=(--config-dir "$folder" --config-name "$PROFILE${script#train}" "recipe.folder=$folder")
    while read -r name option; do
        [ -z "$name" ] || [ -z "${!name:-}" ] || options+=("$option=${!name}")
    done <<<"$variables"
    # On a machine with GPUs a recipe takes them all, unless it names a number; those of a cluster are not known here.
    [ "$PROFILE" = cpu ] || [ -n "${N_GPUS:-}${RAY_ADDRESS:-}" ] || ! has_gpu || export VERL_TOOL_GPUS_HERE="$(count_gpus)"
    [ -z "${ASYNC:-}" ] || options+=("trainer.v1.trainer_mode=${ASYNC}_async")
    [ -n "${TOOLS-some}" ] || options+=(tool_server.start=null)
    [ -z "${RUN:-}" ] || options+=("run_dir=$RUN" "trainer.experiment_name=$(basename "$RUN")")
    # Prompts that ask for tools are no use to a run without, nor is its checkpoint.
    [ "${USE_TOOL:-true}" = true ] || options+=(recipe.variant=-no_tool actor_rollout_ref.agent.min_turns=0
        actor_rollout_ref.agent.max_action_length=null)
    [ -z "${TOOL_SERVER_URL:-}" ] ||
        options+=("actor_rollout_ref.agent.tool_server_url=$TOOL_SERVER_URL" tool_server.start=null)
}

use_environment() {
    [ "$PROFILE" != cpu ] || export VERL_PLATFORM=cpu OMP_NUM_THREADS=1
    source scripts/env.sh train ${RECIPE_EXTRAS:-}
    # What verl and its libraries say while they are imported, and bars that a pipe would fill with carriage returns.
    export VERL_LOGGING_LEVEL="${VERL_LOGGING_LEVEL:-WARN}" PYTHONWARNINGS="${PYTHONWARNINGS:-ignore:torchtitan engine,ignore:veomni engine,ignore:automodel engine,ignore:mindspeed engine,ignore:megatron engine,ignore:NPU not support}"
    [ -t 2 ] || export HF_DATASETS_DISABLE_PROGRESS_BARS="${HF_DATASETS_DISABLE_PROGRESS_BARS:-1}"
    # Ray's first node asks for a token where it finds one, and the others and we must be told to bring it.
    [ -z "${RAY_ADDRESS:-}" ] || [ ! -f "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ] ||
        export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
    # Without a key W&B would ask for one and wait; offline, `wandb sync RUN/wandb/...` uploads later.
    export WANDB_MODE="${WANDB_MODE:-$([ -n "${WANDB_API_KEY:-}" ] && echo online || echo offline)}"
}

PROFILE="${PROFILE:-$(has_gpu && echo gpu || echo cpu)}"
check_variables
export_names
collect_options
case "${DRY_RUN:-0}" in
    command) printf '%s\n' "${options[@]}" "$@"; exit ;;
    # Writes nothing into the run's folder.
    1) set -- "$@" dry_run=true hydra.run.dir=. hydra.output_subdir=null hydra/job_logging=disabled hydra/hydra_logging=disabled ;;
esac
use_environment
exec python -m verl_tool.trainer.main_ppo "${options[@]}" "$@"

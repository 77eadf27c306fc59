# The launcher of all recipes; source it: `source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" RECIPE`.
#
# A recipe names its settings with `knob NAME GPU_VALUE [CPU_VALUE]`, defines `make_data`, and ends in `launch "$@"`, whose
# arguments are options of verl's that win over all others. A variable of the environment wins over a knob.
#
# PROFILE    gpu, or cpu: a tiny model and tiny data on two cores        (default: what this machine has)
# DRY_RUN    1: check the whole config with verl's validator, print it, start nothing; command: print the command line only
# NNODES     nodes of the Ray cluster that RAY_ADDRESS names             (default: 1, and a Ray of our own)
# N_GPUS     GPUs of each node; on a CPU, training processes             (default: the recipe's)
# RUN        folder of the run                                           (default: outputs/RECIPE/PROFILE)
# DATA       folder of train.parquet and test.parquet, made if missing   (default: data/RECIPE; cpu: RUN/data)
# USE_TOOL   false: one turn without tools, both folders with -no_tool   (default: the recipe's)
# STEPS      training steps                                              (default: the recipe's; null: all epochs)
# SEED       of data, model and sampling                                 (default: 0)
# TOOL_SERVER_URL  a tool server that runs already                       (default: one is started for the run)

set -euo pipefail
RECIPE="$1"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { printf '[%s] error: %s\n' "$RECIPE" "$*" >&2; exit 2; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

PROFILE="${PROFILE:-$(has_gpu && echo gpu || echo cpu)}"
case "$PROFILE" in gpu | cpu) ;; *) fail "PROFILE is '$PROFILE'; it must be gpu or cpu" ;; esac

knobs=()
presets=" "
# knob NAME GPU_VALUE [CPU_VALUE]: set NAME by the profile, unless the environment sets it.
knob() {
    local value="$2"
    [ "$PROFILE" = cpu ] && value="${3-$2}"
    case "$presets" in *" $1 "*) unset "$1"; presets="${presets/ $1 / }" ;; esac
    printf -v "$1" '%s' "${!1-$value}"
    knobs+=("$1")
    case "$1:$presets" in RUN:*" DATA "*) preset_data ;; esac
}

# As knob; a recipe's own knob takes its place.
preset() {
    local given="${!1+by the environment}"
    knob "$@"
    [ -n "$given" ] || presets+="$1 "
}
preset_data() { unset DATA; presets="${presets/ DATA / }"; preset DATA "data/$RECIPE$variant" "$RUN/data"; }

# Prompts that ask for tools are no use to a run without, nor is its checkpoint.
variant="$([ "${USE_TOOL:-true}" = true ] || echo -no_tool)"
preset RUN "outputs/$RECIPE/gpu$variant" "outputs/$RECIPE/cpu$variant"
[ -n "${DATA+x}" ] && knob DATA "$DATA" || preset_data
preset NNODES 1
preset SEED 0
preset TOOL_SERVER_URL ""

# What verl's own defaults leave open, and what every recipe shares; a recipe may name any of them again, before `launch`.
default_knobs() {
    knob ALGORITHM grpo
    knob N_GPUS 8 1
    knob TOP_P 1.0
    knob ENTROPY_COEFF 0
    knob KL_LOSS_COEF 0
    knob CLIP_HIGH 0.2
    knob WEIGHT_DECAY 0.01
    knob LR_WARMUP_STEPS -1
    knob LR_WARMUP_RATIO 0.0
    knob LOSS_AGG token-mean
    knob MICRO_BATCH_SIZE 1 "$((MINI_BATCH_SIZE * N / (N_GPUS * NNODES)))"
    knob DYNAMIC_BATCH true false
    knob OFFLOAD true false
    knob TENSOR_PARALLEL 1
    knob GPU_MEMORY 0.6
    knob LORA_RANK 0
    knob LORA_ALPHA 16
    knob USE_TOOL true
    knob TOOLS python_code
    knob TOOL_REPLICAS "$NNODES"
    knob STOPS "['\`\`\`output']"
    knob MIN_TURNS 0
    knob MTRL false
    knob MAX_ACTION_LENGTH null
    knob MASK_OBSERVATIONS true
    knob VAL_TEMPERATURE 0
    knob LOGGER "[console,file,tensorboard,wandb]" "[console,file,tensorboard]"
    knob SAVE_FREQ 10 -1
    knob TEST_FREQ 10 5
    knob KEEP_CHECKPOINTS 2
    knob EPOCHS 10 1000
    knob STEPS null
    knob TRAIN_FILES "[$DATA/train.parquet]"
    knob VAL_FILES "[$DATA/test.parquet]"
    knob WARM_UP 0.3
}

# The options of verl's that the knobs stand for, one a line of the array `options`.
collect_options() {
    local model=actor_rollout_ref.model actor=actor_rollout_ref.actor ref=actor_rollout_ref.ref
    local rollout=actor_rollout_ref.rollout agent=actor_rollout_ref.agent tokens=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
    options=(
        "platform=$PROFILE" "run_dir=$RUN" trainer.use_v1=false
        "algorithm.adv_estimator=$ALGORITHM" algorithm.use_kl_in_reward=false
        "data.train_files=$TRAIN_FILES" "data.val_files=$VAL_FILES" "data.seed=$SEED"
        "data.train_batch_size=$BATCH_SIZE" data.filter_overlong_prompts=true
        "data.max_prompt_length=$MAX_PROMPT_LENGTH" "data.max_response_length=$MAX_RESPONSE_LENGTH"
        "$model.path=$MODEL_PATH" "$model.lora_rank=$LORA_RANK" "$model.lora_alpha=$LORA_ALPHA"
        "$actor.optim.lr=$LEARNING_RATE" "$actor.optim.weight_decay=$WEIGHT_DECAY"
        "$actor.optim.lr_warmup_steps=$LR_WARMUP_STEPS" "$actor.optim.lr_warmup_steps_ratio=$LR_WARMUP_RATIO"
        "$actor.ppo_mini_batch_size=$MINI_BATCH_SIZE" "$actor.ppo_micro_batch_size_per_gpu=$MICRO_BATCH_SIZE"
        "$actor.use_dynamic_bsz=$DYNAMIC_BATCH" "$actor.ppo_max_token_len_per_gpu=$((2 * tokens))"
        "$actor.use_kl_loss=$([ "$KL_LOSS_COEF" = 0 ] && echo false || echo true)" "$actor.kl_loss_coef=$KL_LOSS_COEF"
        "$actor.entropy_coeff=$ENTROPY_COEFF" "$actor.clip_ratio_high=$CLIP_HIGH" "$actor.loss_agg_mode=$LOSS_AGG"
        "$actor.fsdp_config.param_offload=$OFFLOAD" "$actor.fsdp_config.optimizer_offload=$OFFLOAD"
        "$ref.fsdp_config.param_offload=$OFFLOAD" "$ref.log_prob_micro_batch_size_per_gpu=$MICRO_BATCH_SIZE"
        "$rollout.name=vllm" "$rollout.n=$N" "$rollout.temperature=$TEMPERATURE" "$rollout.top_p=$TOP_P"
        "$rollout.seed=$SEED" "$rollout.tensor_model_parallel_size=$TENSOR_PARALLEL"
        "$rollout.gpu_memory_utilization=$GPU_MEMORY" "$rollout.max_model_len=$tokens"
        "$rollout.max_num_batched_tokens=$((tokens > 8192 ? tokens : 8192))"
        "$rollout.log_prob_micro_batch_size_per_gpu=$MICRO_BATCH_SIZE"
        "$rollout.val_kwargs.temperature=$VAL_TEMPERATURE"
        "$rollout.val_kwargs.do_sample=$([ "$VAL_TEMPERATURE" = 0 ] && echo false || echo true)"
        "$agent.enable_agent=$USE_TOOL"
        "reward.reward_manager.name=$REWARD"
        "trainer.nnodes=$NNODES" "trainer.n_gpus_per_node=$N_GPUS" "trainer.project_name=$RECIPE"
        "trainer.experiment_name=$(basename "$RUN")" "trainer.logger=$LOGGER" "trainer.save_freq=$SAVE_FREQ"
        "trainer.test_freq=$TEST_FREQ" "trainer.max_actor_ckpt_to_keep=$KEEP_CHECKPOINTS" trainer.resume_mode=auto
        "trainer.total_epochs=$EPOCHS" "trainer.total_training_steps=$STEPS"
    )
    collect_tool_options
    [ "$ALGORITHM" != gae ] || options+=(
        "critic.model.path=$MODEL_PATH" critic.optim.lr=1e-5 "critic.ppo_micro_batch_size_per_gpu=$MICRO_BATCH_SIZE")
    # vLLM takes the base weights from disk where only the adapter is sent to it; on a CPU they are sent first.
    [ "$LORA_RANK" = 0 ] || [ "$PROFILE" = cpu ] || options+=("$rollout.load_format=safetensors")
    # A cluster that runs already says itself what it has.
    [ -z "${RAY_ADDRESS:-}" ] || [ "$PROFILE" = gpu ] || options+=(
        ray_kwargs.ray_init.num_cpus=null ray_kwargs.ray_init.num_gpus=null ray_kwargs.ray_init.object_store_memory=null)
}

collect_tool_options() {
    local agent=actor_rollout_ref.agent
    if [ "$USE_TOOL" = true ]; then
        options+=("$agent.action_stop_tokens=$STOPS" "$agent.max_turns=$MAX_TURNS" "$agent.min_turns=$MIN_TURNS"
            "$agent.max_obs_length=$MAX_OBS_LENGTH" "$agent.max_action_length=$MAX_ACTION_LENGTH"
            "$agent.enable_mtrl=$MTRL" "$agent.mask_observations=$MASK_OBSERVATIONS")
    fi
    # A reward may run code too, so that there is a server even where the model uses none.
    if [ -n "$TOOL_SERVER_URL" ]; then
        options+=("$agent.tool_server_url=$TOOL_SERVER_URL")
    elif [ -n "$TOOLS" ]; then
        options+=("tool_server.start=$TOOLS" "tool_server.args=[--num_replicas,'$TOOL_REPLICAS']")
    fi
}

check_knobs() {
    [ "$NNODES" = 1 ] || [ -n "${RAY_ADDRESS:-}" ] || [ -n "${DRY_RUN:-}" ] ||
        fail "NNODES is $NNODES, but RAY_ADDRESS names no cluster; on the first node: ray start --head, on the others:" \
            "ray start --address=FIRST_NODE:6379, then RAY_ADDRESS=auto NNODES=$NNODES bash $0"
    [ "$USE_TOOL" = true ] || [ "$USE_TOOL" = false ] || fail "USE_TOOL is '$USE_TOOL'; it must be true or false"
}

# Ray's first node asks for a token where it finds one, and the others and we must be told to bring it.
use_cluster_s_token() {
    [ -z "${RAY_ADDRESS:-}" ] || [ ! -f "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ] ||
        export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
}

# The environment to run in. A machine with a GPU gets one of its own for the cpu profile: their packages differ.
use_environment() {
    if [ "$PROFILE" = cpu ] && has_gpu; then
        export VERL_TOOL_VENV="${VERL_TOOL_VENV:-$PWD/.venv-cpu}"
        source scripts/env.sh cpu
    else
        source scripts/env.sh train
    fi
    if [ "$PROFILE" = cpu ]; then
        export VERL_PLATFORM=cpu OMP_NUM_THREADS=1
    fi
    # What verl and its libraries say while they are imported, and bars that a pipe would fill with carriage returns.
    export VERL_LOGGING_LEVEL="${VERL_LOGGING_LEVEL:-WARN}" PYTHONWARNINGS="${PYTHONWARNINGS:-ignore:torchtitan engine,ignore:veomni engine}"
    [ -t 2 ] || export HF_DATASETS_DISABLE_PROGRESS_BARS="${HF_DATASETS_DISABLE_PROGRESS_BARS:-1}"
    use_cluster_s_token
    # Without a key W&B would ask for one and wait; offline, `wandb sync RUN/wandb/...` uploads later.
    export WANDB_DIR="$RUN" WANDB_MODE="${WANDB_MODE:-$([ -n "${WANDB_API_KEY:-}" ] && echo online || echo offline)}"
}

# Check the config as the trainer would, print it, write and start nothing.
dry_run() {
    python -m verl_tool.trainer.main_ppo "${options[@]}" dry_run=true \
        hydra.run.dir=. hydra.output_subdir=null hydra/job_logging=disabled hydra/hydra_logging=disabled
}

# For a recipe's preprocessing: whether prompts tell of the tools.
tool_flag() { [ "$USE_TOOL" = true ] && echo --tool || echo --no-tool; }

# The settings that a text of bash depends on, one a line.
settings_in() {
    local name
    for name in PROFILE "${knobs[@]}"; do
        case "$name" in RUN | DATA) continue ;; esac
        grep -Eq "\\$\\{?$name([^A-Z_]|\$)" <<<"$1" || continue
        printf '%s=%s\n' "$name" "${!name}"
    done | sort -u
}

# made_with FOLDER TEXT: refuse what lies in FOLDER if the bash of TEXT made it with other settings than now.
made_with() {
    local other
    [ ! -f "$1/made_with" ] || {
        other="$(comm -13 "$1/made_with" <(settings_in "$2") | paste -sd ' ')"
        [ -z "$other" ] || fail "$1 was made with other settings ($(paste -sd ' ' "$1/made_with")), and now $other;" \
            "take another RUN or DATA, or delete that folder"
    }
}

make_model() {
    python examples/train/tiny_model.py --data "$TRAIN_FILES" --output "$MODEL_PATH" --target "$WARM_UP" --seed "$SEED"
}

# make FOLDER FILE FUNCTION: what FUNCTION makes there, unless it is there.
make() {
    local text
    # Where a recipe's data does not say whether there is a tool, its preprocessing asks `tool_flag`.
    text="$(declare -f "$3" tool_flag)"
    made_with "$1" "$text"
    [ ! -f "$1/$2" ] || return 0
    "$3"
    settings_in "$text" >"$1/made_with"
}

launch() {
    default_knobs
    check_knobs
    MODEL_PATH="$MODEL"
    [ "$MODEL" != tiny ] || MODEL_PATH="$RUN/model"
    collect_options
    options+=(${extra_options[@]+"${extra_options[@]}"} "$@")
    case "${DRY_RUN:-}" in
        "" | 0) ;;
        command) printf '%s\n' "${options[@]}"; return ;;
        1) use_environment; dry_run; return ;;
        *) fail "DRY_RUN is '$DRY_RUN'; it must be 1 or command" ;;
    esac
    use_environment
    local name
    for name in "${knobs[@]}"; do printf '[%s] %s=%s\n' "$RECIPE" "$name" "${!name}"; done
    mkdir -p "$RUN"
    make "$DATA" train.parquet make_data
    [ "$MODEL" != tiny ] || make "$MODEL_PATH" model.safetensors make_model
    python -m verl_tool.trainer.main_ppo "${options[@]}"
    python examples/train/report.py "$RUN"
}

# A recipe may add options of verl's for which there is no knob.
extra_options=()

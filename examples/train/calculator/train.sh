#!/usr/bin/env bash
# Teaches a model to use a calculator: `bash examples/train/calculator/train.sh [verl options]`.
#
# Without an accelerator a tiny model is made from scratch, warmed up and trained. On a GPU, take a real one:
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct bash examples/train/calculator/train.sh
#
# RUN        folder of the run                       (default: outputs/calculator/$ALGORITHM)
# ALGORITHM  grpo or gae (PPO with a critic)         (default: grpo)
# SEED       of model, data and training             (default: 0)
# STEPS      training steps                          (default: 15)
# MODEL      a model to start from instead of the tiny one; its prompts show two solved problems
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
# shellcheck source=/dev/null
source scripts/env.sh train

ALGORITHM="${ALGORITHM:-grpo}" SEED="${SEED:-0}" STEPS="${STEPS:-15}"
RUN="${RUN:-outputs/calculator/$ALGORITHM}"
recipe=examples/train/calculator
platform=gpu
command -v nvidia-smi >/dev/null || platform=cpu
[ "$platform" = cpu ] && export OMP_NUM_THREADS=1

python examples/data_preprocess/calculator.py --local_dir "$RUN/data/source" --seed "$SEED"
if [ -n "${MODEL:-}" ]; then
    python $recipe/rows_for_run.py --data "$RUN/data/source" --out "$RUN/data" --few-shot
    prompt=256 learning_rate=1e-6
else
    MODEL="$RUN/warm_model"
    [ -f "$MODEL/model.safetensors" ] || python $recipe/warmup.py --output "$MODEL" --seed "$SEED"
    python $recipe/rows_for_run.py --data "$RUN/data/source" --out "$RUN/data"
    prompt=32 learning_rate=1e-4
fi

python -m verl_tool.trainer.main_ppo "platform=$platform" "run_dir=$RUN" tool_server.start=calculator,finish \
    trainer.use_v1=false "algorithm.adv_estimator=$ALGORITHM" algorithm.use_kl_in_reward=false \
    "data.train_files=$RUN/data/train.parquet" \
    "data.val_files=[$RUN/data/test.parquet,$RUN/data/without_tool.parquet]" \
    data.train_batch_size=32 "data.max_prompt_length=$prompt" data.max_response_length=48 "data.seed=$SEED" \
    "actor_rollout_ref.model.path=$MODEL" \
    "actor_rollout_ref.agent.action_stop_tokens=['<call>','<submit>']" actor_rollout_ref.agent.max_turns=4 \
    actor_rollout_ref.agent.tool_call_timeout=180 actor_rollout_ref.agent.tool_call_max_retries=10 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.actor.clip_ratio_high=0.28 \
    "actor_rollout_ref.actor.optim.lr=$learning_rate" "actor_rollout_ref.actor.optim.betas=[0.9,0.99]" \
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
    actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true actor_rollout_ref.rollout.val_kwargs.temperature=0.7 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    "actor_rollout_ref.rollout.max_model_len=$((prompt + 48 + 16))" actor_rollout_ref.rollout.max_num_seqs=256 \
    actor_rollout_ref.rollout.max_num_batched_tokens=4096 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=256 "actor_rollout_ref.rollout.seed=$SEED" \
    critic.optim.lr=1e-3 "critic.model.path=$MODEL" critic.ppo_micro_batch_size_per_gpu=64 \
    reward.reward_manager.name=calculator \
    "trainer.total_training_steps=$STEPS" trainer.total_epochs=1000 trainer.test_freq=5 "trainer.save_freq=$STEPS" \
    trainer.resume_mode=auto stall_timeout=600 "$@"

python $recipe/report.py "$RUN"

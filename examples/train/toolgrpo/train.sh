#!/usr/bin/env bash
# A half-billion-weight model and a LoRA adapter of rank 128 learn to call Python on AIME's problems, as in ToolGRPO.
#   bash examples/train/toolgrpo/train.sh [verl options]                  one GPU
#   PROFILE=cpu bash examples/train/toolgrpo/train.sh                     two cores, a tiny model, three problems
# Settings that all recipes share: examples/train/launch.sh. What to expect: README.md.
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" toolgrpo

#    variable             GPUs                        CPU
knob MODEL                Qwen/Qwen2.5-0.5B-Instruct  tiny
knob TRAIN_DATASET        gneubig/aime-1983-2024      examples/data_preprocess/samples/aime.jsonl
knob TEST_DATASET         Maxwell-Jia/AIME_2024       examples/data_preprocess/samples/aime.jsonl
knob N_GPUS               1
knob LORA_RANK            128
knob LORA_ALPHA           128
knob BATCH_SIZE           4                           2
knob MINI_BATCH_SIZE      4                           2
knob N                    2                           8
knob TEMPERATURE          1.0
knob LEARNING_RATE        2e-5                        1e-3
knob LR_WARMUP_RATIO      0.1                         0.0
knob MAX_PROMPT_LENGTH    1024                        512
knob MAX_RESPONSE_LENGTH  1024                        128
knob MAX_OBS_LENGTH       256                         32
knob MAX_TURNS            1                           2
knob OFFLOAD              false
knob GPU_MEMORY           0.5
knob REWARD               torl
knob LOGGER               "[console,file,tensorboard,wandb]"
knob SAVE_FREQ            50                          -1
knob TEST_FREQ            50                          5
knob EPOCHS               2                           1000
knob STEPS                null                        10
# 3 for the answer, and up to 1.1 for a call that works.
extra_options=(
    +reward.reward_kwargs.right=3 +reward.reward_kwargs.wrong=0
    +reward.reward_kwargs.shaping.tool_used.weight=1.1 +reward.reward_kwargs.shaping.tool_error.weight=-0.5
)

make_data() {
    python examples/data_preprocess/aime.py --train_path "$TRAIN_DATASET" --dataset_path "$TEST_DATASET" \
        --local_dir "$DATA" "$(tool_flag)"
}

launch "$@"

#!/usr/bin/env bash
# School mathematics with a Python interpreter.
#   bash examples/train/gsm8k/train.sh [verl options]                     eight GPUs
#   USE_TOOL=false bash examples/train/gsm8k/train.sh                     one turn, without tools: verl's own baseline
#   PROFILE=cpu bash examples/train/gsm8k/train.sh                        two cores, a tiny model, five problems
# Settings that all recipes share: examples/train/launch.sh. What to expect: README.md.
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" gsm8k

#    variable             GPUs                        CPU
knob MODEL                Qwen/Qwen2.5-0.5B-Instruct  tiny
knob DATASET              openai/gsm8k                examples/data_preprocess/samples/gsm8k.jsonl
knob TEST_SIZE            500                         1
knob USE_TOOL             true
knob BATCH_SIZE           1024                        4
knob MINI_BATCH_SIZE      256                         4
knob N                    5                           8
knob TEMPERATURE          1.0
knob LEARNING_RATE        1e-6                        1e-4
knob KL_LOSS_COEF         0.001                       0
knob MAX_PROMPT_LENGTH    512
knob MAX_RESPONSE_LENGTH  1024                        128
knob MAX_OBS_LENGTH       256                         32
knob MAX_TURNS            3                           2
knob OFFLOAD              false
knob REWARD               gsm8k
knob TEST_FREQ            5
knob EPOCHS               15                          1000
knob STEPS                null                        10
extra_options=(+reward.reward_kwargs.flexible=true)

make_data() {
    python examples/data_preprocess/gsm8k.py --dataset_path "$DATASET" --local_dir "$DATA" --test_size "$TEST_SIZE" \
        "$(tool_flag)"
}

launch "$@"

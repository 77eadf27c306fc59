#!/usr/bin/env bash
# A base model finds out by itself when to compute: mathematics with a Python interpreter, as in ToRL.
#   bash examples/train/math_tir/train.sh [verl options]                  eight GPUs
#   PROFILE=cpu bash examples/train/math_tir/train.sh                     two cores, a tiny model, five problems
# Settings that all recipes share: examples/train/launch.sh. What to expect: README.md.
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" math_tir

#    variable             GPUs                        CPU
knob MODEL                Qwen/Qwen2.5-Math-1.5B      tiny
knob DATASET              zwhe99/DeepMath-103K        examples/data_preprocess/samples/deepmath.jsonl
knob AIME                 Maxwell-Jia/AIME_2024       examples/data_preprocess/samples/aime.jsonl
knob TEST_SIZE            500                         1
knob BATCH_SIZE           128                         4
knob MINI_BATCH_SIZE      128                         4
knob N                    16                          8
knob TEMPERATURE          1.0
knob LEARNING_RATE        1e-6                        1e-4
knob LR_WARMUP_STEPS      10                          -1
knob MAX_PROMPT_LENGTH    1024                        512
knob MAX_RESPONSE_LENGTH  3072                        128
knob MAX_OBS_LENGTH       512                         32
knob MAX_ACTION_LENGTH    2048                        null
knob MAX_TURNS            10                          2
knob GPU_MEMORY           0.8                         0.5
knob REWARD               torl
knob STEPS                null                        10
knob VAL_FILES            "[$DATA/test.parquet,$DATA/aime/test.parquet]"

make_data() {
    python examples/data_preprocess/deepmath.py --dataset_path "$DATASET" --local_dir "$DATA" --test_size "$TEST_SIZE" \
        "$(tool_flag)"
    python examples/data_preprocess/aime.py --dataset_path "$AIME" --local_dir "$DATA/aime" "$(tool_flag)"
}

launch "$@"

#!/usr/bin/env bash
# Mathematics and programming in one training, with one interpreter for both.
#   bash examples/train/mathcoder/train.sh [verl options]                 eight GPUs
#   PROFILE=cpu bash examples/train/mathcoder/train.sh                    two cores, a tiny model
# Settings that all recipes share: examples/train/launch.sh. What to expect: README.md.
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" mathcoder

#    variable             GPUs                                  CPU
knob MODEL                Qwen/Qwen2.5-Coder-7B-Instruct        tiny
knob CODE_DATASET         CodeDPO/AceCoderV2-mini-processed     "$RUN/one_liners.jsonl"
knob MATH_DATASET         zwhe99/DeepMath-103K                  examples/data_preprocess/samples/deepmath.jsonl
knob TEST_SIZE            500                                   1
knob BATCH_SIZE           128                                   4
knob MINI_BATCH_SIZE      128                                   4
knob N                    8                                     8
knob TEMPERATURE          1.0
knob LEARNING_RATE        1e-6                                  1e-4
knob LR_WARMUP_STEPS      10                                    -1
knob MAX_PROMPT_LENGTH    4096                                  512
knob MAX_RESPONSE_LENGTH  8192                                  128
knob MAX_OBS_LENGTH       2048                                  32
knob MAX_TURNS            10                                    2
knob GPU_MEMORY           0.5
knob REWARD               mathcoder
knob STEPS                200                                   10
knob TRAIN_FILES          "[$DATA/train.parquet,$DATA/math/train.parquet]"
knob VAL_FILES            "[$DATA/test.parquet,$DATA/math/test.parquet]"

make_data() {
    local prompt=(--add_execution_prompt)
    [ "$USE_TOOL" = true ] || prompt=()
    [ "$PROFILE" = gpu ] || python examples/train/acecoder/one_liners.py --output "$CODE_DATASET" --count 50
    python examples/data_preprocess/deepmath.py --dataset_path "$MATH_DATASET" --local_dir "$DATA/math" \
        --test_size "$TEST_SIZE" "$(tool_flag)"
    python examples/data_preprocess/acecoder.py --dataset_path "$CODE_DATASET" --local_dir "$DATA" \
        --test_size "$TEST_SIZE" ${prompt[@]+"${prompt[@]}"}
}

launch "$@"

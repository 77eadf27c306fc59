#!/usr/bin/env bash
# AceCoder without a tool: the model answers in one turn, and the tool server runs the hidden tests only.
#   bash examples/train/acecoder/train_no_tool.sh [verl options]
# Settings that all recipes share: examples/train/launch.sh. What to expect: README.md.
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" acecoder_no_tool
source examples/train/acecoder/data.sh

#    variable             GPUs                                  CPU
knob MODEL                Qwen/Qwen2.5-Coder-7B                 tiny
knob DATASET              TIGER-Lab/AceCode-87K                 "$RUN/one_liners.jsonl"
knob TEST_SIZE            500                                   128
knob USE_TOOL             false
knob BATCH_SIZE           128                                   32
knob MINI_BATCH_SIZE      128                                   16
knob N                    16                                    8
knob TEMPERATURE          1.0
knob LEARNING_RATE        1e-6                                  2.5e-4
knob LR_WARMUP_STEPS      10                                    4
knob MAX_PROMPT_LENGTH    1536                                  64
knob MAX_RESPONSE_LENGTH  2560                                  64
knob REWARD               acecoder
knob SAVE_FREQ            10                                    -1
knob TEST_FREQ            10                                    11
knob STEPS                null                                  22
knob VAL_TEMPERATURE      0
knob WARM_UP              0.9

launch "$@"

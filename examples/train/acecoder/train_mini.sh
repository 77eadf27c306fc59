#!/usr/bin/env bash
# AceCoder with an interpreter, for a small model.
#   bash examples/train/acecoder/train_mini.sh [verl options]
# Settings that all recipes share: examples/train/launch.sh. What to expect: README.md.
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" acecoder_mini
source examples/train/acecoder/data.sh

#    variable             GPUs                                  CPU
knob MODEL                Qwen/Qwen2.5-Coder-1.5B-Instruct      tiny
knob DATASET              CodeDPO/AceCoderV2-mini-processed     "$RUN/one_liners.jsonl"
knob TEST_SIZE            500                                   128
knob BATCH_SIZE           128                                   16
knob MINI_BATCH_SIZE      128                                   4
knob N                    16                                    8
knob TEMPERATURE          1.0
knob LEARNING_RATE        1e-6                                  1.5e-4
knob LR_WARMUP_STEPS      -1                                    6
knob MAX_PROMPT_LENGTH    1536                                  64
knob MAX_RESPONSE_LENGTH  3072                                  96
knob MAX_OBS_LENGTH       1024                                  16
knob MAX_ACTION_LENGTH    1536                                  null
knob MAX_TURNS            3                                     2
knob MIN_TURNS            1                                     0
knob GPU_MEMORY           0.5
knob REWARD               acecoder
knob EPOCHS               1                                     1000
knob STEPS                null                                  25
knob VAL_TEMPERATURE      0                                     1.0
knob WARM_UP              0.9

launch "$@"

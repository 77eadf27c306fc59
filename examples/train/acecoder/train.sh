#!/usr/bin/env bash
# A model learns to program with an interpreter at hand: AceCoder's problems, judged by tests that it does not see.
#   bash examples/train/acecoder/train.sh [verl options]                  eight GPUs
#   PROFILE=cpu bash examples/train/acecoder/train.sh                     two cores, a tiny model, one-line functions
# Settings that all recipes share: examples/train/launch.sh. What to expect: README.md.
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" acecoder
source examples/train/acecoder/data.sh

#    variable             GPUs                                  CPU
knob MODEL                Qwen/Qwen2.5-7B-Instruct              tiny
knob DATASET              CodeDPO/AceCoderV2-mini-processed     "$RUN/one_liners.jsonl"
knob TEST_SIZE            500                                   128
knob BATCH_SIZE           512                                   32
knob MINI_BATCH_SIZE      64                                    16
knob N                    8                                     8
knob TEMPERATURE          0.9                                   1.0
knob LEARNING_RATE        1e-6                                  2.5e-4
knob LR_WARMUP_STEPS      -1                                    4
knob MAX_PROMPT_LENGTH    3072                                  64
knob MAX_RESPONSE_LENGTH  2048                                  96
knob MAX_OBS_LENGTH       512                                   16
knob MAX_TURNS            5                                     2
knob GPU_MEMORY           0.4
knob REWARD               acecoder
knob SAVE_FREQ            40                                    -1
knob TEST_FREQ            10                                    11
knob EPOCHS               5                                     1000
knob STEPS                null                                  22
knob VAL_TEMPERATURE      0
knob VAL_FILES            "[$DATA/test.parquet]"                "[$DATA/test.parquet,$DATA/without_tool.parquet]"
knob WARM_UP              0.9

launch "$@"

#!/bin/bash
set -e
readlink -f "$(command -v report)" > answer.txt
report >> answer.txt

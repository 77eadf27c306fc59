#!/bin/bash
set -e
git clone -q project.bundle project
commit=$(git -C project log -1 --format=%H --diff-filter=D -- data/bounds.csv)
git -C project show "$commit^:data/bounds.csv" > limits.csv

#!/bin/bash
set -e
mkdir restored
for n in 0 1 2; do tar -C restored --listed-incremental=/dev/null -xf "backups/$n.tar"; done

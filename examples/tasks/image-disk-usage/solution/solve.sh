#!/bin/bash
set -e
cd storage
find . -name archive -prune -o -type f -name '*.log' -printf '%P %s\n' |
    awk '{ split($1, part, "/"); bytes[part[1] "/" part[2]] += $2 } END { for (name in bytes) print bytes[name], name }' |
    sort -rn | head -n 3 > ../answer.txt

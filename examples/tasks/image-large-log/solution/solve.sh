#!/bin/bash
set -e
awk '{ key = substr($1, 1, 2) " " $4; n[key]++; if ($2 == 503) bad[key]++ }
     END { for (key in bad) print bad[key] / n[key], key, bad[key], n[key] }' requests.log | sort -rg | head -n 1 |
while read -r _ hour path failed requests; do
    printf '{"hour": %d, "path": "%s", "failed": %d, "requests": %d}' "$((10#$hour))" "$path" "$failed" "$requests" > answer.json
done

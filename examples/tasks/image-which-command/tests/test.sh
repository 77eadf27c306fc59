#!/bin/bash
reward=0
expected=$(printf '%s\n' /opt/vendor/v2/report "$(/opt/vendor/v2/report)")
[ -f answer.txt ] && [ "$(head -c 300 answer.txt)" = "$expected" ] && reward=1
echo "$reward" > /logs/verifier/reward.txt

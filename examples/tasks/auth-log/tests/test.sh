#!/bin/bash
reward=0
[ -f answer.txt ] && [ "$(head -c 100 answer.txt | tr -d '[:space:]')" = 203.0.113.145 ] && reward=1
echo "$reward" > /logs/verifier/reward.txt

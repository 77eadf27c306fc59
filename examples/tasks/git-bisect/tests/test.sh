#!/bin/bash
reward=0
[ -f answer.txt ] && [ "$(head -c 200 answer.txt | tr -d '[:space:]')" = 605318ad73e35ade1892e0c55471d9c6b02c3eb4 ] && reward=1
echo "$reward" > /logs/verifier/reward.txt

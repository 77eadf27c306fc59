#!/bin/bash
set -e
cd project
commit=$(git log --format=%H -S "limit = 120" -- settings.ini | head -n 1)
git log -1 --format="%an %s" "$commit" > ../answer.txt

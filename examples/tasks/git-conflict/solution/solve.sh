#!/bin/bash
set -e
git clone -q project.bundle project
cd project
git config user.name Solver
git config user.email solver@example.org
git merge -q origin/faster > /dev/null 2>&1 || true
cat > settings.ini <<'INI'
[server]
host = localhost
port = 8080
timeout = 45
workers = 8

[log]
level = warning
format = short
INI
git add settings.ini
git commit -q -m "Merge the branch faster"

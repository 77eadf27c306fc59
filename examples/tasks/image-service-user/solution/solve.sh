#!/bin/bash
set -e
chmod 2770 spool
chmod 700 secrets
chmod 400 secrets/token
chmod 755 run.sh
ln -sfn "releases/$(ls releases | sort -V | tail -n 1)" current

#!/usr/bin/env bash
exec bash "$(dirname "$0")/../launch.sh" "$0" "$@"

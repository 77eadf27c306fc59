#!/usr/bin/env bash
RECIPE_EXTRAS=browser exec bash "$(dirname "$0")/../launch.sh" "$0" "$@"

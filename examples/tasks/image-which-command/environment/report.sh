#!/bin/bash
echo "$(basename "$(dirname "$(readlink -f "$0")")")-$(cksum < "$(readlink -f "$0")" | cut -d ' ' -f 1)"

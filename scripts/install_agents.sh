#!/usr/bin/env bash
# Install the agents that verl_tool/gateway/presets.py starts: bash scripts/install_agents.sh [FOLDER] (default: .agents).
# Needs npm for those of npm; without it only mini-swe-agent is installed.
set -euo pipefail
folder="${1:-.agents}"
mkdir -p "$folder"
if command -v npm >/dev/null; then
    (cd "$folder" && npm install --silent --no-fund --no-audit @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 \
        @mariozechner/pi-coding-agent@0.73.1 opencode-ai@1.18.33)
else
    echo "npm is not installed: Claude Code, Codex, opencode and pi are left out" >&2
fi
[ -x "$folder/mini/bin/mini" ] || { python3 -m venv "$folder/mini" && "$folder/mini/bin/pip" install --quiet mini-swe-agent==2.4.6; }
chmod -R o+rX "$folder"
echo "agents in $(cd "$folder" && pwd)"

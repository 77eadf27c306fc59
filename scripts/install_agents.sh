#!/usr/bin/env bash
# Install the agents that verl_tool/gateway/presets.py starts: bash scripts/install_agents.sh [FOLDER] (default: .agents).
# Needs npm for those of npm; without it only those in Python are installed.
set -euo pipefail
folder="${1:-.agents}"
mkdir -p "$folder"
if command -v npm >/dev/null; then
    (cd "$folder" && npm install --silent --no-fund --no-audit @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 \
        @mariozechner/pi-coding-agent@0.73.1 opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10)
else
    echo "npm is not installed: Claude Code, Codex, opencode, pi and Qwen Code are left out" >&2
fi
install_python() { # FOLDER PACKAGE...
    [ -x "$folder/$1/bin/pip" ] || python3 -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet "${@:2}"
}
install_python mini mini-swe-agent==2.4.6
install_python openai_agents openai-agents==0.24.0
install_python inspect inspect-ai==0.3.285 openai==3.57.0
install_python verifiers verifiers==0.4.0
install_python smolagents "smolagents[openai]==1.26.0"
chmod -R o+rX "$folder"
echo "agents in $(cd "$folder" && pwd)"

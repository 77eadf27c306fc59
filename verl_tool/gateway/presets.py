"""Agents that other people wrote, with the settings that make them work behind the gateway.

Each is installed into a folder of its own by ``bash scripts/install_agents.sh FOLDER``, and runs from there in the
sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Preset:
    """How an agent is started; placeholders as of `AgentProgram`."""

    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    readable: tuple[str, ...] = ()


_QUIET = {"TERM": "dumb", "TASK": "{task}"}
_CONTEXT = 200_000


def _npm(install: Path, script: str, **env: str) -> Preset:
    """A program of npm; `script` is for ``sh -c``, with the agents' folder as $AGENTS."""
    return Preset(("sh", "-c", script), {**_QUIET, "AGENTS": str(install), **env}, (str(install),))


def _claude_code(install: Path) -> Preset:
    script = (
        'exec "$AGENTS/node_modules/.bin/claude" -p "$TASK" --output-format json '
        '--allowedTools "Bash Read Edit Write${MCP_URL:+ mcp__tools}" ${MCP_URL:+--mcp-config "$MCP_SETTINGS"}'
    )
    mcp = {"mcpServers": {"tools": {"type": "http", "url": "{mcp_url}"}}}
    return _npm(
        install,
        script,
        ANTHROPIC_MODEL="model",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_ATTRIBUTION_HEADER="0",
        DISABLE_TELEMETRY="1",
        MCP_SETTINGS=json.dumps(mcp),
    )


def _codex(install: Path) -> Preset:
    settings = """model = "model"
model_provider = "gateway"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.gateway]
name = "gateway"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    script = (
        'mkdir -p "$HOME/.codex"; printf %s "$SETTINGS${MCP_URL:+$MCP_SETTINGS}" > "$HOME/.codex/config.toml"; '
        'exec "$AGENTS/node_modules/.bin/codex" exec --json --skip-git-repo-check "$TASK"'
    )
    mcp = '[mcp_servers.tools]\nurl = "{mcp_url}"\n'
    return _npm(install, script, SETTINGS=settings, MCP_SETTINGS=mcp)


def _pi(install: Path) -> Preset:
    cost = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    model = {"id": "model", "name": "model", "reasoning": True, "input": ["text"], "cost": cost}
    model |= {"contextWindow": _CONTEXT, "maxTokens": 8000}
    provider = {"baseUrl": "{base_url}", "apiKey": "{key}", "api": "openai-completions", "models": [model]}
    script = (
        'mkdir -p "$HOME/.pi/agent"; printf %s "$SETTINGS" > "$HOME/.pi/agent/models.json"; '
        'exec "$AGENTS/node_modules/.bin/pi" -p --mode json --provider gateway --model model "$TASK"'
    )
    settings = json.dumps({"providers": {"gateway": provider}})
    return _npm(install, script, SETTINGS=settings, PI_OFFLINE="1")


def _opencode(install: Path) -> Preset:
    model = {"name": "model", "limit": {"context": _CONTEXT, "output": 8000}, "tool_call": True}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "gateway",
        "options": {"baseURL": "{base_url}", "apiKey": "{key}"},
        "models": {"model": model},
    }
    settings = {"autoupdate": False, "share": "disabled", "model": "gateway/model", "provider": {"gateway": provider}}
    script = (
        'mkdir -p "$HOME/.config/opencode"; printf %s "$SETTINGS" > "$HOME/.config/opencode/opencode.json"; '
        'export OPENCODE_CONFIG_CONTENT="${MCP_URL:+$MCP_SETTINGS}"; '
        'exec "$AGENTS/node_modules/.bin/opencode" run --format json "$TASK"'
    )
    mcp = {"mcp": {"tools": {"type": "remote", "url": "{mcp_url}", "enabled": True}}}
    disabled = ("OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_LSP_DOWNLOAD")
    written = {"SETTINGS": json.dumps(settings), "MCP_SETTINGS": json.dumps(mcp)}
    return _npm(install, script, **written, **dict.fromkeys(disabled, "1"))


def _mini_swe_agent(install: Path) -> Preset:
    venv = install / "mini"
    python = (venv / "bin" / "python").resolve().parents[1]
    env = {
        **_QUIET,
        "OPENAI_API_BASE": "{base_url}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    options = ("-y", "--exit-immediately", "-m", "openai/model", "-t", "{task}", "-o", "trajectory.json")
    return Preset((str(venv / "bin" / "mini"), *options), env, (str(venv), str(python)))


PRESETS: dict[str, Callable[[Path], Preset]] = {
    "claude_code": _claude_code,
    "codex": _codex,
    "mini_swe_agent": _mini_swe_agent,
    "opencode": _opencode,
    "pi": _pi,
}
"""By name, each made for the folder that the agents are installed in."""
MCP_PRESETS = frozenset({"claude_code", "codex", "opencode"})
"""Those that speak MCP: they use the tool server's tools if ``MCP_URL`` is in their environment."""

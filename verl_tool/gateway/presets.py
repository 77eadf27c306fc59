"""Agents that other people wrote, with the settings that make them work behind the gateway.

Each is installed into a folder of its own by ``bash scripts/install_agents.sh FOLDER``, and runs from there in the
sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Preset:
    """How an agent is started; placeholders as of `AgentProgram`."""

    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    readable: tuple[str, ...] = ()
    judges: bool = False


_QUIET = {"TERM": "dumb", "TASK": "{prompt}"}
_MAX_TOKENS = 8000


def _json(settings: object) -> str:
    """As JSON in which the placeholder ``{context}`` is a number."""
    return json.dumps(settings).replace('"{context}"', "{context}")


def _npm(install: Path, script: str, **env: str) -> Preset:
    """A program of npm; `script` is for ``sh -c``, with the agents' folder as $AGENTS."""
    return Preset(("sh", "-c", script), {**_QUIET, "AGENTS": str(install), **env}, (str(install),))


def _claude_code(install: Path) -> Preset:
    script = (
        'exec "$AGENTS/node_modules/.bin/claude" -p "$TASK" --output-format json --permission-mode bypassPermissions '
        '${MCP_URL:+--mcp-config "$MCP_SETTINGS"}'
    )
    mcp = {"mcpServers": {"tools": {"type": "http", "url": "{mcp_url}"}}}
    return _npm(
        install,
        script,
        ANTHROPIC_MODEL="model",
        IS_SANDBOX="1",  # else it refuses to run as root, which an image's user may be
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_ATTRIBUTION_HEADER="0",
        CLAUDE_CODE_AUTO_COMPACT_WINDOW="{context}",
        DISABLE_TELEMETRY="1",
        MCP_SETTINGS=json.dumps(mcp),
    )


def _codex(install: Path) -> Preset:
    settings = """model = "model"
model_provider = "gateway"
model_context_window = {context}
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
    model |= {"contextWindow": "{context}", "maxTokens": _MAX_TOKENS}
    provider = {"baseUrl": "{base_url}", "apiKey": "{key}", "api": "openai-completions", "models": [model]}
    script = (
        'mkdir -p "$HOME/.pi/agent"; printf %s "$SETTINGS" > "$HOME/.pi/agent/models.json"; '
        'exec "$AGENTS/node_modules/.bin/pi" -p --mode json --provider gateway --model model "$TASK"'
    )
    settings = _json({"providers": {"gateway": provider}})
    return _npm(install, script, SETTINGS=settings, PI_OFFLINE="1")


def _opencode(install: Path) -> Preset:
    model = {"name": "model", "limit": {"context": "{context}", "output": _MAX_TOKENS}, "tool_call": True}
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
    written = {"SETTINGS": _json(settings), "MCP_SETTINGS": _json(mcp)}
    return _npm(install, script, **written, **dict.fromkeys(disabled, "1"))


def _qwen_code(install: Path) -> Preset:
    settings = {
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "model": {"generationConfig": {"contextWindowSize": "{context}"}},
        "tools": {"shell": {"enableInteractiveShell": False}},  # the sandbox has no pseudo-terminals
    }
    script = (
        'mkdir -p "$HOME/.qwen"; printf %s "$SETTINGS" > "$HOME/.qwen/settings.json"; '
        'exec "$AGENTS/node_modules/.bin/qwen" --auth-type openai -y -o json -p "$TASK"'
    )
    return _npm(install, script, SETTINGS=_json(settings), OPENAI_MODEL="model")


def _python(venv: Path, command: tuple[str, ...], readable: tuple[str, ...] = (), **env: str) -> Preset:
    """A program in a virtual environment of its own."""
    python = (venv / "bin" / "python").resolve().parents[1]
    return Preset(command, {**_QUIET, **env}, (str(venv), str(python), *readable))


def _library(name: str) -> Callable[[Path], Preset]:
    """An agent of a Python library (`inside.library_agent`)."""

    def make(install: Path) -> Preset:
        program = str(Path(__file__).parent / "inside" / "library_agent.py")
        command = (str(install / name / "bin" / "python"), program, name, "{prompt}")
        return _python(install / name, command, (program,))

    return make


def _environment_of(package: str) -> Callable[[Path], Preset]:
    """An environment of a package with a loop of its own (`inside.environment_program`)."""

    def make(install: Path) -> Preset:
        program = str(Path(__file__).parent / "inside" / "environment_program.py")
        command = (str(install / package / "bin" / "python"), program, package)
        preset = _python(install / package, command, (program,), ENVIRONMENT="{environment}")
        return replace(preset, judges=True)

    return make


def _mini_swe_agent(install: Path) -> Preset:
    venv = install / "mini"
    options = ("-y", "--exit-immediately", "-m", "openai/model", "-t", "{prompt}", "-o", "trajectory.json")
    return _python(
        venv,
        (str(venv / "bin" / "mini"), *options),
        OPENAI_API_BASE="{base_url}",
        MSWEA_CONFIGURED="true",
        MSWEA_COST_TRACKING="ignore_errors",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )


PRESETS: dict[str, Callable[[Path], Preset]] = {
    "claude_code": _claude_code,
    "codex": _codex,
    "inspect": _environment_of("inspect"),
    "mini_swe_agent": _mini_swe_agent,
    "openai_agents": _library("openai_agents"),
    "opencode": _opencode,
    "pi": _pi,
    "qwen_code": _qwen_code,
    "smolagents": _library("smolagents"),
    "verifiers": _environment_of("verifiers"),
}
"""By name, each made for the folder that the agents are installed in."""
MCP_PRESETS = frozenset({"claude_code", "codex", "opencode"})
"""Those that speak MCP: they use the tool server's tools if ``MCP_URL`` is in their environment."""

"""A short text that changes with everything that changes answers: weights, loop, sampling."""

from __future__ import annotations

import hashlib
from pathlib import Path

from eval_service.episode_flags import TRAINING_ONLY
from eval_service.settings import ServiceSettings
from verl_tool.agent_loop.prompt.prompt_renderer import schema_of
from verl_tool.util.json_text import encode_json

_CHANGES_NO_ANSWER = frozenset({*TRAINING_ONLY, "tool_server_url", "max_concurrent_trajectories", "generation_timeout"})
_OF_THE_ENGINE = {"kind", "model", "dtype", "max_model_len", "engine_kwargs"}
_DIGITS = 16


def fingerprint(settings: ServiceSettings) -> str:
    """Of the answers of a service with these settings: the same after a restart, another for other weights.

    Files of weights count by name, size and time of their last change. Tools count by the loop's options, and by what a
    run's prompts told of them: another tool server with the same options gives the same fingerprint.
    """
    options = settings.options.model_dump(mode="json")
    content = {
        "weights": _weights(settings.model),
        "engine": settings.engine.model_dump(mode="json", include=_OF_THE_ENGINE),
        "options": {
            name: value
            for name, value in options.items()
            if name not in _CHANGES_NO_ANSWER and not name.startswith("tool_call_")
        },
        "sampling": settings.sampling.model_dump(),
        "tokenizer": settings.tokenizer,
        "chat_template_kwargs": settings.chat_template_kwargs,
        "chat_template": settings.chat_template,
    }
    if settings.tool_descriptions is not None:
        content["tools"] = [schema_of(tool) for tool in settings.tool_descriptions]
    return hashlib.sha256(encode_json(content)).hexdigest()[:_DIGITS]


def _weights(model: str) -> list[object]:
    """A hub's name stands for itself."""
    folder = Path(model)
    if not folder.is_dir():
        return [model]
    files = sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    return [str(folder.resolve()), *([path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files)]

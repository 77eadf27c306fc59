"""Load a reward manager by name or file, and grade single trajectories: the child's side of `manager_process`."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.protocol import DataProto
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.import_utils import load_extern_object

from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory
from verl_tool.agent_workers.reward_manager import registry
from verl_tool.agent_workers.reward_manager.grading.manager_process import (
    CRASHES,
    GradedCase,
    GradingCase,
    UnusableError,
    hangs,
)
from verl_tool.errors import VerlToolError


class CodePoints:
    """A tokenizer whose token ids are code points."""

    pad_token_id, eos_token_id = 0, 0

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(int(i)) for i in token_ids if i or not skip_special_tokens)


def manager_of(name: str, options: Mapping[str, Any]) -> Any:
    """Make a manager by its registered name in verl-tool or verl, or the only one in a file. Raises UnusableError.

    verl's managers store the event loop in which they are made.
    """
    registry.register_all()
    source: dict[str, Any] = {"source": "register", "name": name}
    if name.endswith(".py"):
        source = {"source": "importlib", "name": manager_in(Path(name)), "module": {"path": name}}
    elif name not in REWARD_MANAGER:
        known = ", ".join(sorted(REWARD_MANAGER))
        raise UnusableError(f"{name!r} is not a reward manager; known: {known}, or the path of a .py file")
    reward = {"reward_manager": source, "reward_kwargs": dict(options), "num_workers": 1}
    config = OmegaConf.create({"reward": reward, "trainer": {"experiment_name": "grading"}})
    try:
        return load_reward_manager(config, CodePoints())
    except VerlToolError as error:
        raise UnusableError(str(error)) from error
    except Exception as error:  # the constructor is users' code
        raise UnusableError(f"{name} cannot be made: {type(error).__name__}: {error}") from error


def manager_in(path: Path) -> str:
    """Return the name of the only reward manager class in a file. Raises UnusableError."""
    if not path.is_file():
        raise UnusableError(f"file {path} does not exist")
    try:
        named = [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
        classes = {name: load_extern_object(str(path), name) for name in named}
    except Exception as error:  # the file is users' code
        raise UnusableError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    found = [name for name, kind in classes.items() if hasattr(kind, "run_single") and not inspect.isabstract(kind)]
    if len(found) != 1:
        raise UnusableError(f"{path} must have one class with run_single; it has {', '.join(found) or 'none'}")
    return found[0]


def batch_of(case: GradingCase) -> DataProto:
    """Make the batch of one row that verl's agent loop would send to a reward worker."""
    segments = tuple(Segment(Author(author), tuple(map(ord, text))) for author, text in case.answer.segments)
    trajectory = Trajectory("given", (Segment(Author.PROMPT, (1,)), *segments), StopReason.ANSWERED)
    ids = trajectory.response_ids or [0]
    tensors = {
        "prompts": torch.tensor([[1]]),
        "responses": torch.tensor([ids]),
        "attention_mask": torch.ones(1, 1 + len(ids), dtype=torch.long),
        "response_mask": torch.tensor([trajectory.response_mask or [0]]),
    }
    extra = case.row.get("extra_info")
    columns = {
        "data_source": "given",
        "ability": "code" if "answer" in case.row else "math",
        **{k: v for k, v in case.row.items() if k not in ("ground_truth", "answer")},
        "extra_info": dict(extra) if isinstance(extra, Mapping) else {},  # pandas makes NaN of null
        "reward_model": {"style": "rule", "ground_truth": case.row["ground_truth"]},
        "tool_extra_fields": {"trajectory": trajectory},
        "__num_turns__": max(2, trajectory.num_turns),
    }
    arrays = {name: np.empty(1, dtype=object) for name in columns}
    for name, value in columns.items():
        arrays[name][0] = value
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays)


async def grade(manager: Any, case: GradingCase, seconds: float) -> GradedCase:
    """Grade one case within `seconds`, provided that the manager yields to the event loop."""
    try:
        result = manager.run_single(batch_of(case))
        if inspect.isawaitable(result):
            result = await asyncio.wait_for(result, seconds)
        extra = result.get("reward_extra_info") or {}
        score = float(result["reward_score"])
        numbers = {name: float(value) for name, value in extra.items() if isinstance(value, (int, float, np.number))}
        right, partial = numbers.get("acc", float(score > 0)), bool(getattr(manager, "partial_credit", False))
        return GradedCase(score, right, str(extra.get("reward_fault") or ""), partial, numbers)
    except asyncio.TimeoutError:
        return GradedCase(failure=hangs(seconds))
    except Exception as error:  # noqa: BLE001  the manager is users' code; in a training, this would end it
        return GradedCase(failure=f"{CRASHES}: {type(error).__name__}: {error}")


async def grade_each(name: str, options: Mapping[str, Any], seconds: float, pipe: Connection) -> None:
    """Send an empty text, or the reason why there is no manager, and then a `GradedCase` for each case that comes."""
    try:
        manager = manager_of(name, options)
    except UnusableError as error:
        pipe.send(str(error))
        return
    pipe.send("")
    while True:
        try:
            case = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            return
        pipe.send(await grade(manager, case, seconds))

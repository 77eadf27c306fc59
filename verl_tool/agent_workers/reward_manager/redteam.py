"""Attacks a reward manager with answers that are wrong, and tells which of them it takes for right.

    python -m verl_tool.agent_workers.reward_manager.redteam gsm8k
    python -m verl_tool.agent_workers.reward_manager.redteam mine.py --data rows.parquet
    python -m verl_tool.agent_workers.reward_manager.redteam acecoder --option server_url=http://127.0.0.1:5000

A false positive is a wrong answer with `acc` 1, with a score above that of "I do not know.", or with a fault, which
excuses it. Exit code 0: none; 1: some; 2: the manager or its data cannot be used.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track
from rich.table import Table
from verl.protocol import DataProto
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.import_utils import load_extern_object

from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory
from verl_tool.agent_workers.reward_manager import registry
from verl_tool.agent_workers.reward_manager.attacks import Attack, attacks_on
from verl_tool.errors import VerlToolError

SECONDS = 120.0
"""For one attack; a manager's own deadlines are shorter."""
ADD = "def add(a, b):\n    return a + b"
ADD_TESTS = json.dumps({"tests": ["assert add(731, 92) == 823", "assert add(-4, 1) == -3"]})
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"ground_truth": "72"}, {"ground_truth": "0.5"}],
    "calculator": [{"ground_truth": "72"}],
    "search_r1_qa_em": [{"ground_truth": '["Danube"]'}, {"ground_truth": '["The A"]'}, {"ground_truth": '["72"]'}],
    "reasoning_gym": [
        {"ground_truth": "72"},
        {"ground_truth": "yes"},
        {"ground_truth": '{"numbers": [6, 61, 94, 4], "target": 309}', "data_source": "reasoning_gym/countdown"},
    ],
    "torl": [{"ground_truth": "72"}, {"ground_truth": r"\frac{1}{2}"}],
    "acecoder": [{"ground_truth": ADD_TESTS, "answer": ADD}],
    "mathcoder": [{"ground_truth": "72", "ability": "math"}, {"ground_truth": ADD_TESTS, "answer": ADD}],
}
"""Rows for the managers of this folder: the golden answer as a solver would write it is `answer`, if it is another."""
DEFAULT = [{"ground_truth": "72"}, {"ground_truth": "Danube"}]


class UnusableError(VerlToolError):
    """The manager, its options or its data cannot be used."""


@dataclass(frozen=True)
class Finding:
    """An attack that succeeded."""

    attack: Attack
    ground_truth: str
    score: float


class _CodePoints:
    """A tokenizer whose ids are code points."""

    pad_token_id, eos_token_id = 0, 0

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(int(i)) for i in token_ids if i or not skip_special_tokens)


def manager_of(name: str, options: Mapping[str, Any]) -> Any:
    """A manager by its registered name, or the only one in a file. Raises UnusableError."""
    source: dict[str, Any] = {"source": "register", "name": name}
    if name.endswith(".py"):
        source = {"source": "importlib", "name": _class_in(Path(name)), "module": {"path": name}}
    elif name not in registry.NAMES:
        raise UnusableError(f"{name!r} is no reward manager; known: {', '.join(registry.NAMES)}, or the path of a file")
    config = OmegaConf.create({"reward": {"reward_manager": source, "reward_kwargs": dict(options)}})
    try:
        return load_reward_manager(config, _CodePoints())
    except VerlToolError as error:
        raise UnusableError(str(error)) from error


def _class_in(path: Path) -> str:
    if not path.is_file():
        raise UnusableError(f"there is no file {path}")
    try:
        named = [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    except SyntaxError as error:
        raise UnusableError(f"{path} is no Python: {error}") from error
    found = [n for n in named if hasattr(load_extern_object(str(path), n), "run_single")]
    if len(found) != 1:
        raise UnusableError(f"{path} must have one class with run_single; it has {', '.join(found) or 'none'}")
    return found[0]


def rows_of(name: str, data: Path | None, limit: int) -> list[dict[str, Any]]:
    """Rows to attack with. Raises UnusableError."""
    if data is None:
        return SAMPLES.get(name, DEFAULT)
    if not data.is_file():
        raise UnusableError(f"there is no file {data}")
    import pandas as pd

    try:
        table = pd.read_parquet(data) if data.suffix == ".parquet" else pd.read_json(data, lines=True)
    except ValueError as error:
        raise UnusableError(f"{data} cannot be read as {data.suffix}: {error}") from error
    if "reward_model" not in table.columns:
        raise UnusableError(f"{data} has no column 'reward_model'; it has: {', '.join(table.columns)}")
    rows = [dict(row) for row in table.head(limit).to_dict("records")]
    for row in rows:
        row["ground_truth"] = row.pop("reward_model")["ground_truth"]
    return rows


def batch_of(row: Mapping[str, Any], attack: Attack) -> DataProto:
    """One row as verl's agent loop sends it to a reward worker."""
    segments = tuple(Segment(Author(author), tuple(map(ord, text))) for author, text in attack.segments)
    trajectory = Trajectory("redteam", (Segment(Author.PROMPT, (1,)), *segments), StopReason.ANSWERED)
    ids = trajectory.response_ids or [0]
    tensors = {
        "prompts": torch.tensor([[1]]),
        "responses": torch.tensor([ids]),
        "attention_mask": torch.ones(1, 1 + len(ids), dtype=torch.long),
        "response_mask": torch.tensor([trajectory.response_mask or [0]]),
    }
    ability = "code" if "answer" in row else "math"
    columns = {
        "data_source": "redteam",
        "ability": ability,
        "extra_info": {},
        **{k: v for k, v in row.items() if k not in ("ground_truth", "answer")},
        "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
        "tool_extra_fields": {"trajectory": trajectory.to_json()},
        "__num_turns__": max(2, trajectory.num_turns),
    }
    arrays = {name: np.empty(1, dtype=object) for name in columns}
    for name, value in columns.items():
        arrays[name][0] = value
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays)


async def graded(manager: Any, row: Mapping[str, Any], attack: Attack) -> tuple[float, float, str]:
    """Score, `acc` and fault. Managers of verl's own give a score alone. Raises UnusableError if there is no end."""
    try:
        result = manager.run_single(batch_of(row, attack))
        if inspect.isawaitable(result):
            result = await asyncio.wait_for(result, SECONDS)
    except asyncio.TimeoutError:
        raise UnusableError(f"no end within {SECONDS:g} s on the attack {attack.name!r}") from None
    except KeyError as error:
        raise UnusableError(
            f"the manager needs {error}, which the rows lack; give rows that have it: --data"
        ) from error
    extra = result.get("reward_extra_info") or {}
    score = float(result["reward_score"])
    return score, float(extra.get("acc", score > 0)), str(extra.get("reward_fault") or "")


async def findings_in(manager: Any, rows: list[dict[str, Any]], console: Console) -> list[Finding]:
    """All attacks on all rows. Raises UnusableError if the manager cannot grade a plainly wrong answer."""
    found = []
    for row in rows:
        least, _, fault = await graded(manager, row, Attack("nothing", (("model", "I do not know."),)))
        if fault:
            raise UnusableError(f"a plain wrong answer is not graded: {fault}")
        attacks = attacks_on(row["ground_truth"], row.get("answer"), code="answer" in row or _is_code(row))
        for attack in track(attacks, description=str(row["ground_truth"])[:30], console=console, transient=True):
            score, acc, fault = await graded(manager, row, attack)
            if fault or acc > 0.5 or score > least:
                told = attack if not fault else Attack(f"{attack.name} (a fault: {fault[:60]})", attack.segments)
                found.append(Finding(told, str(row["ground_truth"]), score))
    return found


def _is_code(row: Mapping[str, Any]) -> bool:
    return row.get("ability") == "code"


def table_of(found: list[Finding]) -> Table:
    """The false positives, with the input that made each."""
    table = Table("attack", "ground truth", "score", "input", title=f"{len(found)} false positives")
    for finding in found:
        text = " ".join(f"[{author}] {text}" for author, text in finding.attack.segments)
        table.add_row(finding.attack.name, repr(finding.ground_truth[:40]), f"{finding.score:g}", repr(text[:160]))
    return table


def _options(given: list[str]) -> Iterator[tuple[str, Any]]:
    for option in given:
        name, sign, value = option.partition("=")
        if not sign:
            raise UnusableError(f"--option {option}: write name=value")
        try:
            yield name, json.loads(value)
        except ValueError:
            yield name, value


def main(
    manager: Annotated[str, typer.Argument(help="A name, or the path of a file with one reward manager.")],
    data: Annotated[Path | None, typer.Option(help="Rows with a reward_model, .parquet or .jsonl.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows of it.")] = 3,
    option: Annotated[list[str] | None, typer.Option(help="An option of the manager, name=value.")] = None,
) -> None:
    """Attack a reward manager with wrong answers."""
    console = Console(soft_wrap=False)
    try:
        attacked = manager_of(manager, dict(_options(option or [])))
        rows = rows_of(manager, data, limit)
        found = asyncio.run(findings_in(attacked, rows, console))
    except UnusableError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    if found:
        console.print(table_of(found), markup=False)
        raise typer.Exit(1)
    console.print(f"{manager}: no false positive on {len(rows)} rows")


if __name__ == "__main__":
    typer.run(main)

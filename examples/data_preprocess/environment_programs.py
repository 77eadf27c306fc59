"""Examples of an environment of verifiers, or samples of a task of inspect, for the gateway's preset of that name.

    python examples/data_preprocess/environment_programs.py --package verifiers --name gsm8k --local_dir data/gsm8k_vf

The package lists them, in its own environment (`<install>/<package>/bin/python`). A row has an example's place and id
in `extra_info.tools_kwargs.environment`; the right answer stays with the package, which judges.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rows import LocalDir, Row, Seed, TestSize, convert, divide, row, run, save

from verl_tool.gateway.inside import environment_program
from verl_tool.protocol import ENVIRONMENT_FIELD
from verl_tool.verification import ENVIRONMENT_STYLE

_SECONDS = 1800
"""For the list, which may need a download."""
_MAX_MESSAGE_CHARACTERS = 2000


def list_examples(package: str, install: Path, name: str, arguments: str, limit: int) -> list[dict[str, Any]]:
    """The first examples, each with its ``index``. Raises ValueError with what the package says."""
    python = install / package / "bin" / "python"
    if not python.exists():
        raise ValueError(f"{python} is not there; run bash scripts/install_agents.sh {install}")
    command = [str(python), environment_program.__file__, package, name, arguments, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise ValueError(f"{package} does not list {name}: {done.stderr[-_MAX_MESSAGE_CHARACTERS:].strip()}")
    examples = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [{**each, "index": i, "text": json.dumps(each["messages"])} for i, each in enumerate(examples)]


def as_row(
    example: Mapping[str, Any], split: str, index: int, package: str, name: str, arguments: str, score: str | None
) -> Row:
    """One row of an example."""
    environment = {"name": name, "index": example["index"], "id": example["id"], "arguments": json.loads(arguments)}
    environment |= {} if score is None else {"score": score}
    sent = {"tools_kwargs": {ENVIRONMENT_FIELD: json.dumps(environment)}}
    made = row(f"{package}/{name.rpartition('/')[2]}", example["messages"], package, "", split, index, sent)
    return {**made, "reward_model": {**made["reward_model"], "style": ENVIRONMENT_STYLE}}


def main(
    package: Annotated[Literal["verifiers", "inspect"], typer.Option("--package")],
    name: Annotated[
        str, typer.Option("--name", help="A taskset of verifiers; FILE.py@task or package/task of inspect.")
    ],
    install: Annotated[Path, typer.Option("--install", help="The folder of scripts/install_agents.sh.")] = Path(
        ".agents"
    ),
    arguments: Annotated[
        str, typer.Option("--arguments", help="JSON: the environment's config, or the task's arguments.")
    ] = "{}",
    score: Annotated[str | None, typer.Option("--score", help="Which of several scores is the reward.")] = None,
    local_dir: LocalDir = Path("data/environment"),
    test_size: TestSize = 0,
    seed: Seed = 0,
    limit: Annotated[int, typer.Option("--limit", min=1, help="The first N examples.")] = 100_000,
) -> None:
    """Write train.parquet, and test.parquet with `test_size` examples that are held out."""
    examples = list_examples(package, install, name, arguments, limit)
    make = partial(as_row, package=package, name=name, arguments=arguments, score=score)
    save(convert(divide(examples, "text", test_size, seed), make), local_dir)


if __name__ == "__main__":
    run(main)

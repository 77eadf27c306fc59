"""Issues of repositories with hidden tests, for the reward manager `terminal`.

    python examples/data_preprocess/swe.py --source swebench --dataset_path SWE-bench/SWE-bench_Verified --split test \\
        --held_out --local_dir data/swe_verified
    python examples/data_preprocess/swe.py --source swegym --dataset_path SWE-Gym/SWE-Gym --check --engine podman
    python examples/data_preprocess/swe.py --source swesmith --dataset_path SWE-bench/SWE-smith-py --engine docker
    python examples/data_preprocess/swe.py --source r2e_gym --dataset_path R2E-Gym/R2E-Gym-Subset --engine podman
    python examples/data_preprocess/swe.py --source nemotron --dataset_path swe.jsonl --image 'registry:5000/{image}'

`swe_sources.py` says which columns are read, and `swe_verifier.py` how a repository is judged. A row has the image, its
folder and commit, and the verifier with the hidden tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rows import (
    DatasetPath,
    Limit,
    LocalDir,
    Row,
    RowError,
    Seed,
    TestSize,
    convert,
    divide,
    load,
    messages,
    read_all,
    row,
    run,
    save,
)
from swe_images import Engine
from swe_sources import READERS, Problem, Source, paths_of

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ConfigError
from verl_tool.protocol import WORKSPACE_IMAGE_FIELD
from verl_tool.verification import STYLE, Verification

SYSTEM = (
    "You are a software engineer. You work in a shell and an editor on a Linux machine without a network. Resolve the "
    "issue by changing the repository; hidden tests are run when you are done."
)
INSTRUCTION = """\
The repository {repository} is in {workdir}. Resolve this issue:

<issue>
{statement}
</issue>

Find the cause, reproduce it if you can, and change the source with as little as is needed. Do not change tests: \
hidden ones take their place. Dependencies are installed."""
VERIFIER = Path(__file__).with_name("swe_verifier.py")
TEST = """\
#!/bin/bash
# The last command replaces the shell: nothing that the tests change is run.
folder=$(cd "$(dirname "$0")" && pwd)
exec python3 -I "$folder/verify.py" "$folder/spec.json" "${VERIFIER_REWARD:-/logs/verifier/reward.json}"
"""
MARGIN_SECONDS = 60.0
"""Of a verifier, beside the time of its tests."""


@dataclass(frozen=True)
class Settings:
    """How rows are made."""

    image: str
    """Name of an image, with ``{image}``, its published name, and ``{id}``, the problem's."""
    seconds: float
    max_prompt_chars: int
    max_tests: int
    system: str
    engine: Engine | None = None
    check: bool = False


def verifier_files(problem: Problem, seconds: float) -> dict[str, bytes]:
    """Return the files of a problem's verifier by their paths in ``/tests``."""
    guard = {"commit": problem.base_commit, "exempt": paths_of(problem.solution)} if problem.base_commit else None
    spec = {
        **{"workdir": problem.workdir, "before": list(problem.before), "test": problem.test, "parser": problem.parser},
        **{"fail_to_pass": list(problem.fail_to_pass), "pass_to_pass": list(problem.pass_to_pass)},
        **{"restore": list(problem.restore), "guard": guard, "expected": problem.expected, "seconds": seconds},
        "env": dict(problem.env),
    }
    texts = {
        **{"test.sh": TEST, "verify.py": VERIFIER.read_text("utf-8"), "spec.json": json.dumps(spec)},
        **{f"hidden/{path}": text for path, text in problem.hidden.items()},
        **problem.programs,
    }
    return {path: text.encode("utf-8", "surrogatepass") for path, text in texts.items()}


def make_verification(problem: Problem, seconds: float) -> Verification:
    """Return the verifier of a problem. Raises ConfigError if its files are too large."""
    files = {path: PackedFile(content) for path, content in verifier_files(problem, seconds).items()}
    return Verification(files=pack_files(files), timeout_seconds=seconds + MARGIN_SECONDS)


def prepare(source: Mapping[str, Any], index: int, kind: Source, settings: Settings) -> Mapping[str, Any]:
    """Read a published row, build its image and check it, as far as that is wanted. Raises RowError."""
    problem = READERS[kind](source, index)
    where = f"row {index} ({problem.name})"
    image = settings.image.format(image=problem.image, id=problem.name.lower())
    text = INSTRUCTION.format(
        repository=problem.repository, workdir=problem.workdir, statement=problem.statement.strip()
    )
    if len(settings.system + text) > settings.max_prompt_chars:
        raise RowError(f"{where}: the prompt is longer than --max_prompt_chars {settings.max_prompt_chars}")
    if len(problem.fail_to_pass) + len(problem.pass_to_pass) > settings.max_tests:
        raise RowError(f"{where}: there are more tests than --max_tests {settings.max_tests}")
    if problem.setup and settings.engine is None:
        what = "the bug put into it" if problem.hide else "its hidden tests removed"
        raise ValueError(f"{where}: its image must have {what}; name an --engine that builds it (docker, podman)")
    if settings.engine is not None:
        problem, image = settings.engine.prepare(problem, image)
    try:
        verification = make_verification(problem, settings.seconds)
    except ConfigError as error:
        raise RowError(f"{where}: {error}") from None
    if settings.check and settings.engine is not None:
        _check(problem, image, settings, where)
    return {"name": problem.name, "problem": problem, "image": image, "text": text, "verification": verification}


def _check(problem: Problem, image: str, settings: Settings, where: str) -> None:
    assert settings.engine is not None
    tests = verifier_files(problem, settings.seconds)
    for way, reward in settings.engine.check(problem, image, tests, settings.seconds + 2 * MARGIN_SECONDS).items():
        numbers = json.loads(reward) if reward else {}
        if numbers.get("reward") != float(way == "solution") or not numbers.get("tests"):
            got = f"the reward {numbers['reward']}, {numbers['tests']} tests" if numbers else "no reward"
            raise RowError(f"{where}: in {image} {way} gets {got}")


def as_row(source: Mapping[str, Any], split: str, index: int, kind: Source, system: str) -> Row:
    """One row of a problem that `prepare` has read."""
    problem: Problem = source["problem"]
    extra = {
        **{"instance_id": problem.name, "repository": problem.repository, "workdir": problem.workdir},
        **{"base_commit": problem.base_commit, "tools_kwargs": {WORKSPACE_IMAGE_FIELD: source["image"]}},
    }
    truth = source["verification"].model_dump_json()
    made = row(kind.value, messages(system or None, source["text"]), "swe", truth, split, index, extra)
    return {**made, "reward_model": {**made["reward_model"], "style": STYLE}}


def main(
    source: Annotated[Source, typer.Option("--source", help="The form of the rows.")],
    dataset_path: DatasetPath,
    local_dir: LocalDir = Path("data/swe"),
    split: Annotated[
        str, typer.Option("--split", help="Of the data set, or the beginning of its files' names.")
    ] = "train",
    name: Annotated[str | None, typer.Option("--name", help="Configuration of a data set on the hub.")] = None,
    image: Annotated[
        str,
        typer.Option("--image", help="Image of a problem: {image} is its published name, {id} the problem's."),
    ] = "{image}",
    engine: Annotated[
        str | None, typer.Option("--engine", help="docker or podman: builds images of r2e_gym and swesmith.")
    ] = None,
    built_image: Annotated[
        str, typer.Option("--built_image", help="Name of an image that is built, with {name} in it.")
    ] = "localhost/swe:{name}",
    pull: Annotated[
        bool, typer.Option("--pull", help="Fetch images that are not built, before a training. Needs --engine.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run each verifier without a change, and with the solution. Needs --engine.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=1, max=3500, help="For the tests of a problem.")] = 1800,
    max_prompt_chars: Annotated[int, typer.Option("--max_prompt_chars", min=1)] = 32_000,
    max_tests: Annotated[int, typer.Option("--max_tests", min=1, help="Of a problem.")] = 5000,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip_unreadable", help="Leave out what cannot be used, and count it.")
    ] = False,
    held_out: Annotated[
        bool, typer.Option("--held_out", help="Write all rows to test.parquet, and no others.")
    ] = False,
    system: Annotated[str, typer.Option("--system", help="The system message; empty: none.")] = SYSTEM,
    test_size: TestSize = 0,
    seed: Seed = 42,
    limit: Limit = None,
) -> None:
    """Make a data set of repositories with issues."""
    if check and engine is None:
        raise ValueError("--check runs containers; name an --engine (docker, podman)")
    if pull and engine is None:
        raise ValueError("--pull fetches images; name an --engine (docker, podman)")
    builder = Engine(engine, built_image, pull) if engine else None
    settings = Settings(image, seconds, max_prompt_chars, max_tests, system, builder, check)
    read = partial(prepare, kind=source, settings=settings)
    problems = read_all(load(dataset_path, split, name, limit), read, skip_unreadable)
    splits = {"test": problems} if held_out else divide(problems, "name", test_size, seed)
    save(convert(splits, partial(as_row, kind=source, system=system)), local_dir)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    run(main)

"""Files of trajectories in any of the forms: which form it is, and one document after another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import ConfigError
from verl_tool.trajectories import atif, openai_messages, training_trace
from verl_tool.trajectories.turns import Converted


class FileForm(str, Enum):
    """How a trajectory is written."""

    verl_tool = "verl_tool"
    """A line of a run's ``trajectories/*.jsonl``, or of an evaluation's ``records.jsonl``."""
    atif = "atif"
    openenv = "openenv"
    openai = "openai"


_READERS = {FileForm.atif: atif.read, FileForm.openenv: training_trace.read, FileForm.openai: openai_messages.read}
_KEYS = {"steps": FileForm.atif, "turns": FileForm.openenv, "messages": FileForm.openai, "segments": FileForm.verl_tool}


def documents(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each document stands, and the document: of a ``.jsonl`` or ``.json`` file, or of those of a folder. Raises
    ConfigError if there is none, or one is no JSON."""
    if path.is_dir():
        folder = path / "trajectories" if (path / "trajectories").is_dir() else path
        answers = folder / "records.jsonl"  # other files in an evaluation's folder are no records
        files = [answers] if answers.is_file() else sorted([*folder.glob("*.jsonl"), *folder.glob("*.json")])
    else:
        files = [path]
    if not files or not files[0].is_file():
        raise ConfigError(f"{path} is no file of trajectories and no folder with .jsonl or .json files")
    for file in files:
        yield from _of_file(file)


def trajectories_in(document: Any, form: FileForm | None) -> Converted | None:
    """The trajectory of a document; `form` as its keys tell if None. None: an evaluation's answer without trajectory.
    Raises ConfigError."""
    form = form or form_of(document)
    if form is not FileForm.verl_tool:
        return _READERS[form](document)
    if isinstance(document, dict) and "segments" not in document and "trajectory" in document:
        document = document["trajectory"]
    if document is None:
        return None
    try:
        return Converted(Trajectory.from_json(json.dumps(document)))
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"this is no trajectory: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def form_of(document: Any) -> FileForm:
    """The form that a document has by its keys. Raises ConfigError."""
    keys = document.keys() if isinstance(document, dict) else ()
    if "trajectory" in keys and "digest" in keys:
        return FileForm.verl_tool
    found = next((form for key, form in _KEYS.items() if key in keys), None)
    if found is None:
        raise ConfigError(f"this is in none of the forms {', '.join(FileForm)}; it has: {', '.join(keys) or 'no keys'}")
    return found


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as file:
        texts = enumerate(file, start=1) if path.suffix == ".jsonl" else [(1, file.read())]
        for number, text in texts:
            if not text.strip():
                continue
            where = f"{path.name}:{number}"
            try:
                yield where, json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{where} is no JSON: {error}") from None

"""The text of each token of a record, by the tokenizer that its run names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_tool.errors import ConfigError
from verl_tool.viewer.run_files import Run

_LONGEST_CHARACTER = 8
"""Tokens that one character may be spread over."""
_BROKEN = "\ufffd"
NO_LIBRARY = "the package tokenizers is not installed; pip install tokenizers"
UNREADABLE = "the record has no lists of token ids"
NO_FILE = "no tokenizer.json is found; name its folder with --tokenizer"

Decode = Callable[[Sequence[int]], str]


class _Segment(msgspec.Struct):
    tokens: list[int] = []


class _Trajectory(msgspec.Struct):
    segments: list[_Segment] = []


class _Line(_Trajectory):
    trajectory: _Trajectory | None = None


class TokenTexts:
    """Tokenizers by the folders that hold them, each read once."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` holds the tokenizer of all runs; default: each run's own. Raises ConfigError if it holds none."""
        self._folder = folder
        self._known: dict[Path, Decode] = {}
        self._lock = threading.Lock()
        if folder is not None and not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"--tokenizer {folder} holds no tokenizer.json; name the folder of the model")

    def of_line(self, run: Run, line: bytes) -> dict[str, Any]:
        """``pieces``: the texts of each segment's tokens; or null, and ``reason``."""
        try:
            record = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {"pieces": None, "reason": UNREADABLE}
        segments = (record.trajectory or record).segments
        folder = self._folder or _folder_of(run)
        if folder is None:
            return {"pieces": None, "reason": NO_FILE}
        try:
            decode = self._decoder(folder)
            return {"pieces": [token_texts(decode, segment.tokens) for segment in segments]}
        except ImportError:
            return {"pieces": None, "reason": NO_LIBRARY}
        # The library raises plain exceptions for a file that is no tokenizer.
        except Exception as error:  # noqa: BLE001
            return {"pieces": None, "reason": f"the tokenizer in {folder} cannot read it: {str(error)[:200]}"}

    def _decoder(self, folder: Path) -> Decode:
        with self._lock:
            if folder not in self._known:
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
                self._known[folder] = lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
            return self._known[folder]


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text: nothing where it is but a part of a character, whose last token has it all."""
    texts: list[str] = []
    start, before = 0, ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith(_BROKEN) and end - start <= _LONGEST_CHARACTER and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        start, before = end - 1, decode(ids[end - 1 : end])
        if text.endswith(_BROKEN):
            before = ""
    return texts


def _folder_of(run: Run) -> Path | None:
    config = run.config()
    named = [config.get(f"actor_rollout_ref.model.{name}", "None") for name in ("tokenizer_path", "path")]
    places = [run.folder / "model", *(Path(name) for name in named if name != "None")]
    return next((place for place in places if (place / "tokenizer.json").is_file()), None)

"""Read the instructions of a Dockerfile, and replace the images that it begins with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

_HEREDOC = re.compile(r"<<-?(['\"]?)([A-Za-z_]\w*)\1")
_HAS_HEREDOC = ("RUN", "COPY", "ADD")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile."""

    line: int
    """Number of its first line, from 1."""
    last_line: int
    """Number of its last line, without the lines of a here-document."""
    name: str
    """In upper case."""
    rest: str
    """Its arguments, on one line."""


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile. Comments, line continuations and here-documents are resolved."""
    start, parts, delimiters = 0, [""], list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if delimiters:
            if line.strip() == delimiters[0]:
                delimiters.pop(0)
            continue
        if line.lstrip().startswith("#"):
            continue
        start = start or number
        parts.append(line.strip())
        if parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            continue
        name, _, rest = " ".join(parts).strip().partition(" ")
        if name:
            yield Instruction(start, number, name.upper(), rest.strip())
        if name.upper() in _HAS_HEREDOC:
            delimiters = [match[2] for match in _HEREDOC.finditer(rest)]
        start, parts = 0, [""]


def replace_base_images(text: str, images: Mapping[str, str]) -> str:
    """Return the Dockerfile with other images in its ``FROM`` lines.

    images: the new image by the old one, which may be a pattern such as ``python:3.*``. The first that matches holds.
    Stages of the Dockerfile itself are not replaced.
    """
    lines = text.splitlines()
    stages, defaults = set[str](), dict[str, str]()
    for instruction in read_instructions(text):
        if instruction.name == "ARG" and not stages:
            name, _, value = instruction.rest.partition("=")
            defaults[name] = value.strip("\"'")
        if instruction.name != "FROM":
            continue
        words = [word for word in instruction.rest.split() if not word.startswith("--")]
        image = words[0] if words else ""
        resolved = re.sub(r"\$\{?(\w+)\}?", lambda match: defaults.get(match[1], match[0]), image)
        new = next((new for old, new in images.items() if fnmatchcase(resolved, old)), None)
        if new is not None and image.lower() not in stages:
            for at in range(instruction.line - 1, instruction.last_line):
                lines[at] = " ".join(new if word == image else word for word in lines[at].split(" "))
        stages.add(words[2].lower() if len(words) > 2 and words[1].lower() == "as" else "")
    return "\n".join(lines) + "\n"

"""Which files a task's ``environment/`` puts into the workspace.

The sandbox runs the host's own programs and builds no image. Of a Dockerfile it takes what names files: ``WORKDIR`` is
the workspace, ``COPY`` puts files of ``environment/`` there. ``FROM`` is not used. Without a Dockerfile all of
``environment/`` is put into the workspace.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from verl_tool.content.packed_files import PackedFile
from verl_tool.errors import ConfigError

DOCKERFILE = "Dockerfile"
_WITHOUT_EFFECT = ("FROM", "CMD", "LABEL", "MAINTAINER", "STOPSIGNAL", "EXPOSE", "SHELL")
"""Instructions that change nothing of what a workspace holds."""
_BUILD_STEPS = ("RUN", "ENV", "ARG", "USER", "ENTRYPOINT", "HEALTHCHECK", "VOLUME", "ADD", "ONBUILD")
"""Instructions that only the building or running of an image can do."""
_FLAGS = re.compile(r"^(--\S+\s+)+")


def workspace_files(context: Mapping[str, PackedFile], *, ignore_build: bool) -> dict[str, PackedFile]:
    """What of `context`, the files of ``environment/``, is in the workspace at the beginning.

    `ignore_build`: leave out the Dockerfile's instructions that build an image, such as ``RUN``. Raises ConfigError
    that names the line that cannot be followed.
    """
    composed = [path for path in context if re.fullmatch(r"(docker-)?compose\.ya?ml", path)]
    if composed:
        raise ConfigError(f"environment/{composed[0]} describes containers, and tasks run in one sandbox here")
    if DOCKERFILE not in context:
        return dict(context)
    folder = "/"
    files: dict[str, PackedFile] = {}
    for number, name, rest in _instructions(context[DOCKERFILE].content.decode("utf-8", "replace")):
        where = f"environment/{DOCKERFILE}, line {number}"
        if name == "WORKDIR":
            if files:
                raise ConfigError(f"{where}: WORKDIR behind COPY; the workspace is one folder, name it first")
            folder = posixpath.normpath(posixpath.join(folder, rest.strip("\"'")))
        elif name == "COPY":
            files.update(_copied(rest, folder, context, where))
        elif name in _BUILD_STEPS and not ignore_build:
            raise ConfigError(
                f"{where}: {name} needs an image to be built, and the sandbox has the host's programs; ignore such "
                "lines with --ignore_build if what they install is on the host, or is not needed"
            )
        elif name not in (*_WITHOUT_EFFECT, *_BUILD_STEPS):
            raise ConfigError(f"{where}: the instruction {name!r} is unknown")
    return files


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, name and the rest of each instruction, with the lines that it goes on over put together."""
    started, parts = 0, [""]
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("#"):
            continue
        started = started or number
        parts.append(line.strip())
        if parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            continue
        name, _, rest = " ".join(parts).strip().partition(" ")
        if name:
            yield started, name.upper(), rest.strip()
        started, parts = 0, []


def _copied(rest: str, folder: str, context: Mapping[str, PackedFile], where: str) -> dict[str, PackedFile]:
    """The files of one ``COPY``, by their paths in the workspace."""
    plain = _FLAGS.sub("", rest)
    other = re.search(r"--(from|exclude|parents)\S*", rest[: len(rest) - len(plain)])
    if other:
        raise ConfigError(f"{where}: {other[0]} is not supported; copy files of environment/ by their names")
    words = json.loads(plain) if plain.startswith("[") else plain.split()
    if len(words) < 2:
        raise ConfigError(f"{where}: COPY names no target")
    *sources, target = words
    whole = posixpath.normpath(posixpath.join(folder, target))
    if folder == "/" or not f"{whole}/".startswith(f"{folder}/"):
        raise ConfigError(
            f"{where}: {target!r} is not in the workspace {folder!r}; a workspace is one folder: name it by WORKDIR "
            "first, and copy all files below it"
        )
    at = posixpath.relpath(whole, folder)
    is_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
    found: dict[str, PackedFile] = {}
    for source in sources:
        found.update(_of_source(posixpath.normpath(source).lstrip("/") or ".", at, is_folder, context))
    if not found:
        raise ConfigError(f"{where}: environment/ holds nothing of {' '.join(sources)!r}")
    return found


def _of_source(source: str, at: str, is_folder: bool, context: Mapping[str, PackedFile]) -> dict[str, PackedFile]:
    """As Docker has it: of a folder its content is copied, of a pattern each match."""
    found = {}
    for path, file in context.items():
        head = "/".join(path.split("/")[: source.count("/") + 1])
        if source == ".":
            found[posixpath.normpath(posixpath.join(at, path))] = file
        elif path == source or (path == head and fnmatchcase(path, source)):
            name = posixpath.join(at, posixpath.basename(path)) if is_folder or at == "." else at
            found[posixpath.normpath(name)] = file
        elif fnmatchcase(head, source):
            found[posixpath.normpath(posixpath.join(at, path[len(head) + 1 :]))] = file
    return found

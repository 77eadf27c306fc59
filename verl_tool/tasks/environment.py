"""What a task's ``environment/`` is: files of a workspace in the sandbox, or the context of an image.

The sandbox runs the host's own programs. Of a Dockerfile it takes what names files: ``WORKDIR`` is the workspace,
``COPY`` puts files of ``environment/`` there. ``FROM`` is not used. Without a Dockerfile all of ``environment/`` is put
into the workspace. Everything else of a Dockerfile needs an image.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import yaml

from verl_tool.content.packed_files import PackedFile
from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends.dockerfile import read_instructions

DOCKERFILE = "Dockerfile"
_IGNORED = ".dockerignore"
_WITHOUT_EFFECT = ("FROM", "CMD", "LABEL", "MAINTAINER", "STOPSIGNAL", "EXPOSE", "SHELL")
"""Instructions that change nothing of what a workspace holds."""
_BUILD_STEPS = ("RUN", "ENV", "ARG", "USER", "HEALTHCHECK", "VOLUME", "ADD", "ONBUILD")
"""Instructions that only the building or running of an image can do."""
_FLAGS = re.compile(r"^(--\S+\s+)+")
_CONTEXTS = (".", "./", "${CONTEXT_DIR}")
_SLEEPS = (["sh", "-c", "sleep infinity"], ["sleep", "infinity"], "sleep infinity", ["tail", "-f", "/dev/null"])


class NeedsImageError(ConfigError):
    """The sandbox cannot follow a Dockerfile, and an image of it can."""


def workspace_files(context: Mapping[str, PackedFile], *, ignore_build: bool) -> dict[str, PackedFile]:
    """Return what of `context`, the files of ``environment/``, is in the workspace at the beginning.

    `ignore_build`: leave out the Dockerfile's instructions that build an image, such as ``RUN``. Raises
    NeedsImageError that names the line that the sandbox cannot follow, and ConfigError for one that is wrong.
    """
    if DOCKERFILE not in context:
        return {path: file for path, file in context.items() if not is_compose_file(path)}
    dockerfile = context[DOCKERFILE].content.decode("utf-8", "replace")
    if not ignore_build:
        reject_build_steps(dockerfile)
    if _IGNORED in context:
        raise NeedsImageError(
            f"environment/{_IGNORED} leaves out files of an image, and is not followed in the sandbox"
        )
    folder, stages = "/", 0
    files: dict[str, PackedFile] = {}
    for instruction in read_instructions(dockerfile):
        where = f"environment/{DOCKERFILE}, line {instruction.line}"
        stages += instruction.name == "FROM"
        if stages > 1:
            raise NeedsImageError(f"{where}: the Dockerfile has several stages")
        if instruction.name == "WORKDIR":
            if files:
                raise NeedsImageError(f"{where}: WORKDIR behind COPY; the workspace is one folder, name it first")
            folder = posixpath.normpath(posixpath.join(folder, instruction.rest.strip("\"'")))
        elif instruction.name == "COPY":
            files.update(_copied(instruction.rest, folder, context, where))
        elif instruction.name not in (*_WITHOUT_EFFECT, *_BUILD_STEPS, "ENTRYPOINT"):
            raise ConfigError(f"{where}: the instruction {instruction.name!r} is unknown")
    return files


def reject_build_steps(dockerfile: str) -> None:
    """Raise NeedsImageError for a Dockerfile that the sandbox cannot follow. Raise ConfigError for an ``ENTRYPOINT``,
    which is not run in a container either."""
    instructions = list(read_instructions(dockerfile))
    for instruction in sorted(instructions, key=lambda instruction: instruction.name != "ENTRYPOINT"):
        where = f"environment/{DOCKERFILE}, line {instruction.line}"
        if instruction.name == "ENTRYPOINT":
            raise ConfigError(f"{where}: ENTRYPOINT is not run here; start what the task needs in its instruction")
        if instruction.name in _BUILD_STEPS:
            raise NeedsImageError(
                f"{where}: {instruction.name} needs an image to be built, and the sandbox has the host's programs; "
                "ignore such lines with --ignore_build if what they install is on the host, or is not needed"
            )


def is_compose_file(path: str) -> bool:
    return path == "docker-compose.yaml"


def check_compose(path: str, text: str) -> None:
    """Raise ConfigError for a compose file that does more than build the Dockerfile as the one service ``main``."""
    where = f"environment/{path}"
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is no YAML: {error}") from None
    services = document.get("services") if isinstance(document, dict) else None
    if not isinstance(services, dict) or set(document) - {"services", "version"}:
        raise ConfigError(f"{where} must have services, and nothing else is supported")
    others = sorted(set(services) - {"main"})
    if others:
        raise ConfigError(f"{where}: the service {others[0]!r} is not supported; a task runs in one container")
    main = services.get("main") or {}
    build = main.get("build", ".") if isinstance(main, dict) else None
    build = {"context": build} if isinstance(build, str) else build
    if not isinstance(build, dict) or not isinstance(main, dict):
        raise ConfigError(f"{where}: the service main must be a table with the key build")
    unsupported = [f"main.{key}" for key in main if key not in ("build", "command")]
    unsupported += [f"main.build.{key}" for key in build if key not in ("context", "dockerfile")]
    unsupported += ["main.build.context"] if build.get("context", ".") not in _CONTEXTS else []
    unsupported += ["main.build.dockerfile"] if build.get("dockerfile", DOCKERFILE) != DOCKERFILE else []
    unsupported += ["main.command"] if main.get("command", _SLEEPS[0]) not in _SLEEPS else []
    if unsupported:
        raise ConfigError(f"{where}: services.{unsupported[0]} is not supported; main may only build the Dockerfile")


def _copied(rest: str, folder: str, context: Mapping[str, PackedFile], where: str) -> dict[str, PackedFile]:
    """The files of one ``COPY``, by their paths in the workspace."""
    plain = _FLAGS.sub("", rest)
    flags = rest[: len(rest) - len(plain)]
    other = re.search(r"--(from|exclude|parents|chown|chmod=(?!0?644\b))\S*", flags) or re.match(r"<<\S*", plain)
    if other:
        raise NeedsImageError(f"{where}: {other[0]} is not supported; copy files of environment/ by their names")
    words = json.loads(plain) if plain.startswith("[") else plain.split()
    if len(words) < 2:
        raise ConfigError(f"{where}: COPY names no target")
    *sources, target = words
    whole = posixpath.normpath(posixpath.join(folder, target))
    if folder == "/" or not f"{whole}/".startswith(f"{folder}/"):
        raise NeedsImageError(
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

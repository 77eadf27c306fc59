"""The image of a task: built from its ``environment/``, or named by ``environment.docker_image``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends.image_builder import ImageBuilder, ignore_progress
from verl_tool.tasks.environment import DOCKERFILE
from verl_tool.tasks.task import Task
from verl_tool.tasks.task_config import ROOT
from verl_tool.verification import Verification


@dataclass(frozen=True)
class TaskImage:
    """An image that the engine has."""

    name: str
    user: str
    """Who its programs run as."""
    verifier_user: Literal["", "root"] = ""
    """Who the verifier runs as: they, or root."""

    def verification_of(self, task: Task) -> Verification:
        """The task's verifier in this image."""
        return task.verification.model_copy(update={"user": self.verifier_user})

    @classmethod
    def from_published(cls, task: Task) -> TaskImage | None:
        """``environment.docker_image``, which is not looked at; None without one."""
        if task.image is None:
            return None
        return cls(task.image, "", "root" if task.verifier_user is not None and _is_root(task.verifier_user) else "")

    @property
    def warning(self) -> str:
        """What the verifier does not see because of its user; empty if it sees all."""
        if not _is_root(self.user):
            return ""
        return (
            "programs are root in its image, so that its verifier sees the work folder and /tmp on a fresh image, and "
            "no other change; give the image another USER if it checks more"
        )


async def prepare_image(
    task: Task, builder: ImageBuilder, progress: Callable[[str], None] = ignore_progress
) -> TaskImage:
    """Build or pull the image of a task.

    Variables, folder and user of ``task.toml`` become part of the image. As in Harbor, ``environment.docker_image`` is
    used in the place of the Dockerfile. Raises ConfigError that names the task, and SandboxError.
    """

    try:
        image = task.image if task.image and is_published(task) else await _build(task, builder, progress)
        settings = await builder.describe(image)
        own = task.verifier_user
        if own is None and task.user is not None:
            own = (await builder.describe(await _build(replace(task, user=None), builder, progress))).user
        own = own or settings.user
    except ConfigError as error:
        raise ConfigError(f"task {task.name}: {error}") from None
    if not settings.workdir.strip("/."):
        raise ConfigError(
            f"task {task.name}: the working folder of its image is {settings.workdir}, and the workspace would be the "
            "whole image; set WORKDIR in the Dockerfile, or environment.workdir"
        )
    if own not in (settings.user, task.user) and not _is_root(own):
        raise ConfigError(
            f"task {task.name}: agent.user is {task.user!r}, and the image's own user {own!r}; the verifier runs as "
            "the same user, or as root: set verifier.user"
        )
    return TaskImage(image, settings.user, "root" if _is_root(own) and not _is_root(settings.user) else "")


async def _build(task: Task, builder: ImageBuilder, progress: Callable[[str], None]) -> str:
    """Return the name of a task's image."""
    seconds, text = task.environment.build_timeout_sec, render_dockerfile(task)
    if task.image or task.context is None:
        with tempfile.TemporaryDirectory(prefix="verl-tool-build-") as empty:
            return await builder.build(Path(empty), text, seconds=seconds, progress=progress)
    return await builder.build(task.context, text, seconds=seconds, progress=progress)


def _is_root(user: str) -> bool:
    return user.partition(":")[0] in ROOT


def is_published(task: Task) -> bool:
    """Return whether ``environment.docker_image`` is the task's image, and nothing is to be built."""
    return task.image is not None and not _render_additions(task)


def render_dockerfile(task: Task) -> str:
    """Return the Dockerfile of a task's image. Raises ConfigError if there is nothing to build."""
    if task.image is not None:
        return "\n".join([f"FROM {task.image}", *_render_additions(task)]) + "\n"
    if task.context is None or not (task.context / DOCKERFILE).is_file():
        raise ConfigError(f"there is neither environment/{DOCKERFILE} nor environment.docker_image")
    return "\n".join([(task.context / DOCKERFILE).read_text(encoding="utf-8"), *_render_additions(task)]) + "\n"


def _render_additions(task: Task) -> list[str]:
    environment = task.environment
    lines = [f"WORKDIR {environment.workdir}"] if environment.workdir else []
    lines += [f"ENV {name}={_quote(value)}" for name, value in environment.env.items()]
    return lines + ([f"USER {task.user}"] if task.user is not None else [])


def open_builder(backend: str, network: str, base_images: Sequence[str]) -> ImageBuilder | None:
    """Return the builder that the options of a command line describe; None without a back end. Raises ConfigError."""
    if backend:
        return ImageBuilder(backend, network=network, base_images=parse_base_images(base_images))
    if base_images or network != "none":
        raise ConfigError("--base_image and --build_network are for building images; add --backend podman or docker")
    return None


def parse_base_images(replacements: Sequence[str]) -> dict[str, str]:
    """Parse ``OLD=NEW`` texts. Raises ConfigError."""
    pairs = [text.partition("=") for text in replacements]
    for text, (old, _, new) in zip(replacements, pairs, strict=True):
        if not old or not new:
            raise ConfigError(f"--base_image {text!r} must be OLD=NEW, such as python:3.12-slim=local/debian:1")
    return {old: new for old, _, new in pairs}


def _quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'

"""Images of tasks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends.image_builder import ImageBuilder
from verl_tool.sandbox.backends.settings import ImageSettings
from verl_tool.tasks.task import Task
from verl_tool.tasks.task_config import EnvironmentTable
from verl_tool.tasks.task_images import (
    TaskImage,
    is_published,
    open_builder,
    parse_base_images,
    prepare_image,
    render_dockerfile,
)
from verl_tool.verification import Verification


def make_task(
    context: Path | None = None, user: str | None = None, verifier_user: str | None = None, **environment: object
) -> Task:
    table = EnvironmentTable.model_validate(environment)
    users = {"user": user, "verifier_user": verifier_user}
    return Task("t", "", {}, Verification.model_construct(), {}, environment=table, context=context, **users)


def test_the_configuration_becomes_part_of_the_image(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN make")
    assert render_dockerfile(make_task(tmp_path)) == "FROM debian\nRUN make\n"
    task = make_task(tmp_path, "ada", env={"A": '1 "$b" \\n'}, workdir="/srv")
    assert render_dockerfile(task) == ('FROM debian\nRUN make\nWORKDIR /srv\nENV A="1 \\"\\$b\\" \\\\n"\nUSER ada\n')


def test_a_published_image_is_used_in_place_of_the_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian")
    assert is_published(make_task(tmp_path, docker_image="a:1"))
    task = make_task(tmp_path, docker_image="a:1", workdir="/srv")
    assert not is_published(task)
    assert render_dockerfile(task) == "FROM a:1\nWORKDIR /srv\n"


class RecordingBuilder(ImageBuilder):
    """Builds nothing."""

    def __init__(self, workdir: str) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._workdir = workdir

    async def build(self, context: Path, dockerfile: str | None = None, **options: object) -> str:
        self.calls.append(("build", sorted(os.listdir(context)), dockerfile, options["seconds"]))
        return "built:1"

    async def describe(self, image: str) -> ImageSettings:
        return ImageSettings("ada", self._workdir)


async def test_images_are_built_if_need_be(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\n")
    builder = RecordingBuilder("/app")
    assert await prepare_image(make_task(docker_image="a:1"), builder) == TaskImage("a:1", "ada")
    assert await prepare_image(make_task(tmp_path), builder) == TaskImage("built:1", "ada")
    await prepare_image(make_task(tmp_path, docker_image="a:1", env={"A": "b"}), builder)
    assert builder.calls == [
        ("build", ["Dockerfile"], "FROM debian\n\n", 600.0),
        ("build", [], 'FROM a:1\nENV A="b"\n', 600.0),
    ]


class TwoUsersBuilder(ImageBuilder):
    """Builds images of the user of the last line, else of `own`."""

    def __init__(self, own: str) -> None:
        self._own = own

    async def build(self, context: Path, dockerfile: str | None = None, **options: object) -> str:
        return (dockerfile or "").strip().split("\n")[-1]

    async def describe(self, image: str) -> ImageSettings:
        return ImageSettings(image.removeprefix("USER ") if image.startswith("USER ") else self._own, "/app")


@pytest.mark.parametrize(
    ("own", "user", "verifier_user", "found"),
    [
        ("0:0", None, None, ""),
        ("0:0", "ada", None, "root"),
        ("0:0", "ada", "ada", ""),
        ("0:0", "ada", "root", "root"),
        ("0:0", "ada", "0", "root"),
        ("0:0", None, "root", ""),
        ("bob", None, "root", "root"),
        ("bob", "bob", None, ""),
        ("bob", "root", None, None),
        ("bob", "ada", None, None),
    ],
)
async def test_who_the_verifier_is(
    tmp_path: Path, own: str, user: str | None, verifier_user: str | None, found: str | None
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian")
    for task in (
        make_task(tmp_path, user, verifier_user),
        make_task(None, user, verifier_user, docker_image="a:1"),
    ):
        if found is None:
            with pytest.raises(ConfigError, match=r"task t: agent\.user is .*, and the image's own user 'bob'"):
                await prepare_image(task, TwoUsersBuilder(own))
        else:
            assert (await prepare_image(task, TwoUsersBuilder(own))).verifier_user == found


async def test_what_has_no_image() -> None:
    with pytest.raises(ConfigError, match="task t: there is neither environment/Dockerfile nor"):
        await prepare_image(make_task(), RecordingBuilder("/app"))
    with pytest.raises(ConfigError, match="task t: the working folder of its image is /, and"):
        await prepare_image(make_task(docker_image="a:1"), RecordingBuilder("/"))


def test_a_user_who_can_replace_programs_is_warned_of() -> None:
    assert not TaskImage("a:1", "ada").warning
    for user in ("root", "0:0", "root:root"):
        assert "programs are root in its image" in TaskImage("a:1", user).warning


def test_options_of_a_builder_need_a_back_end() -> None:
    assert open_builder("", "none", []) is None
    for network, images in (("host", []), ("none", ["a=b"])):
        with pytest.raises(ConfigError, match="add --backend podman or docker"):
            open_builder("", network, images)


def test_base_images() -> None:
    assert parse_base_images(["python:3.*=a:1", "b=c=d"]) == {"python:3.*": "a:1", "b": "c=d"}
    with pytest.raises(ConfigError, match="--base_image 'a' must be OLD=NEW"):
        parse_base_images(["a"])

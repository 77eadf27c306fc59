"""Which files a Dockerfile puts into a workspace."""

from __future__ import annotations

import pytest

from verl_tool.content.packed_files import PackedFile
from verl_tool.errors import ConfigError
from verl_tool.tasks.environment import NeedsImageError, check_compose, workspace_files

CONTEXT = {path: PackedFile(path.encode()) for path in ("a.txt", "b.csv", "src/c.py", "src/lib/d.py")}


def laid_out(dockerfile: str, *, ignore_build: bool = False) -> dict[str, str]:
    """Where each file of the context is found in the workspace."""
    context = {**CONTEXT, "Dockerfile": PackedFile(dockerfile.encode())}
    return {path: file.content.decode() for path, file in workspace_files(context, ignore_build=ignore_build).items()}


def test_without_a_dockerfile_all_of_it_is_laid_out() -> None:
    assert workspace_files(CONTEXT, ignore_build=False) == CONTEXT


@pytest.mark.parametrize(
    ("copy", "wanted"),
    [
        ("COPY a.txt .", {"a.txt": "a.txt"}),
        ("COPY a.txt /app/", {"a.txt": "a.txt"}),
        ("COPY a.txt e/f.txt", {"e/f.txt": "a.txt"}),
        ("COPY a.txt b.csv data/", {"data/a.txt": "a.txt", "data/b.csv": "b.csv"}),
        ("COPY src .", {"c.py": "src/c.py", "lib/d.py": "src/lib/d.py"}),
        ("COPY src/ /app/src", {"src/c.py": "src/c.py", "src/lib/d.py": "src/lib/d.py"}),
        ("COPY src/lib /app", {"d.py": "src/lib/d.py"}),
        ('COPY --chmod=644 ["b.csv", "./"]', {"b.csv": "b.csv"}),
        ("copy *.txt \\\n  # a comment\n  *.csv ./", {"a.txt": "a.txt", "b.csv": "b.csv"}),
    ],
)
def test_copies(copy: str, wanted: dict[str, str]) -> None:
    assert laid_out(f"# made by hand\nFROM debian\nWORKDIR /app\n{copy}\nCMD bash") == wanted


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("WORKDIR /app\nRUN apt-get install cowsay", "line 3: RUN needs an image"),
        ("COPY a.txt /srv/", "line 2: '/srv/' is not in the workspace '/'"),
        ("WORKDIR /app\nCOPY a.txt /srv/", "'/srv/' is not in the workspace '/app'"),
        ("WORKDIR /app\nCOPY a.txt ../application/", "is not in the workspace '/app'"),
        ("WORKDIR /app\nCOPY a.txt .\nWORKDIR /srv", "line 4: WORKDIR behind COPY"),
        ("WORKDIR /app\nCOPY --from=build /x .", "--from=build is not supported"),
        ("WORKDIR /app\nCOPY absent.txt .", "holds nothing of 'absent.txt'"),
        ("WORKDIR /app\nCOPY", "names no target"),
        ("WORKDIR /app\nCOPY --chown=ada a.txt .", "--chown=ada is not supported"),
        ("WORKDIR /app\nCOPY --chmod=600 a.txt .", "--chmod=600 is not supported"),
        ("WORKDIR /app\nCOPY <<EOF a.txt\ntext\nEOF", "<<EOF is not supported"),
        ("WORKDIR /app\nFROM debian", "line 3: the Dockerfile has several stages"),
        ("ENTRYPOINT serve", "line 2: ENTRYPOINT is not run here"),
        ("NONSENSE", "the instruction 'NONSENSE' is unknown"),
    ],
)
def test_what_cannot_be_followed_is_told_with_its_line(lines: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        laid_out(f"FROM debian\n{lines}")


def test_build_steps_are_left_out_on_demand() -> None:
    dockerfile = "FROM debian\nRUN apt-get update \\\n && apt-get install cowsay\nENV A=b\nWORKDIR /app\nCOPY a.txt ."
    assert laid_out(dockerfile, ignore_build=True) == {"a.txt": "a.txt"}


def test_ignored_files_need_an_image() -> None:
    context = {"Dockerfile": PackedFile(b"FROM a"), ".dockerignore": PackedFile(b"b"), "b": PackedFile(b"")}
    with pytest.raises(NeedsImageError, match=r"environment/\.dockerignore leaves out files"):
        workspace_files(context, ignore_build=False)


@pytest.mark.parametrize(
    ("line", "needs_image"),
    [("RUN make", True), ("COPY a.txt /srv/", True), ("ENTRYPOINT serve", False), ("COPY absent.txt .", False)],
)
def test_an_image_can_follow_what_the_sandbox_cannot(line: str, needs_image: bool) -> None:
    with pytest.raises(ConfigError) as error:
        laid_out(f"FROM debian\nWORKDIR /app\n{line}")
    assert isinstance(error.value, NeedsImageError) == needs_image


@pytest.mark.parametrize(
    "text",
    [
        "services: {main: {build: .}}",
        "services: {main: }",
        "version: '3'\nservices:\n  main:\n    build: {context: '${CONTEXT_DIR}', dockerfile: Dockerfile}\n"
        "    command: [sh, -c, sleep infinity]",
    ],
)
def test_a_compose_file_that_only_builds_the_dockerfile(text: str) -> None:
    check_compose("docker-compose.yaml", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("services: {main: {build: .}, db: {image: postgres}}", "the service 'db' is not supported"),
        ("services: {main: {build: ., volumes: [a]}}", r"services\.main\.volumes is not supported"),
        ("services: {main: {build: ./other}}", r"services\.main\.build\.context is not supported"),
        ("services: {main: {build: {target: test}}}", r"services\.main\.build\.target is not supported"),
        ("services: {main: {build: ., command: serve}}", r"services\.main\.command is not supported"),
        ("services: {main: [1]}", "main must be a table"),
        ("networks: {a: }\nservices: {main: }", "nothing else is supported"),
        ("[", "is no YAML"),
    ],
)
def test_other_compose_files_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_compose("docker-compose.yaml", text)

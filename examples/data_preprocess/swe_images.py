"""Images of problems: built where the published one is not enough, and checked with the verifier. Used by `swe.py`."""

from __future__ import annotations

import io
import re
import secrets
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rows import RowError
from swe_sources import Problem

SECONDS = 600.0
"""To start a container, to pull its image, and to build one."""
PULL_SECONDS = 3600.0
_UNPACK = "mkdir -p /swe-setup && tar -xf - -C /swe-setup && cd {workdir}"
_END = "===== the end ====="


class ImageError(RowError):
    """An image cannot be pulled, built or used."""


@dataclass(frozen=True)
class Engine:
    """The command line of docker or podman."""

    command: str
    image: str
    """The name that an image gets, with ``{name}`` in it."""
    pull: bool = False
    """Whether images that are not built are fetched too."""

    def prepare(self, problem: Problem, image: str) -> tuple[Problem, str]:
        """Build the problem's image on `image`, if it needs one. Returns the problem with the commit and the hidden
        tests of its image, and the image's name. Raises ImageError."""
        if not problem.setup:
            if self.pull and not self._has(image):
                self._engine("pull", "--quiet", image, where=problem.name, seconds=PULL_SECONDS)
            return problem, image
        hidden = self._read(problem, image) if problem.hide else {}
        name = self.image.format(name=re.sub(r"[^a-z0-9_.-]+", "-", problem.name.lower().replace("__", "_s_")))
        with tempfile.TemporaryDirectory() as folder:
            files = {
                **problem.setup_files,
                "setup.sh": f"set -eu\ncd {shlex.quote(problem.workdir)}\n{problem.setup}\n",
            }
            (Path(folder) / "swe-setup").mkdir()
            for path, text in files.items():
                (Path(folder) / "swe-setup" / path).write_text(text, encoding="utf-8", newline="")
            run = "RUN bash /swe-setup/setup.sh && rm -rf /swe-setup"
            text = f"FROM {image}\nCOPY swe-setup /swe-setup\n{run}\n"
            (Path(folder) / "Dockerfile").write_text(text, encoding="utf-8")
            self._engine("build", "--network", "none", "--tag", name, folder, where=problem.name)
        head = self.run(name, f"cd {shlex.quote(problem.workdir)} && git rev-parse HEAD", {}).strip()
        restore = [{**entry, "commit": entry["commit"] or head} for entry in problem.restore]
        return replace(problem, base_commit=head, hidden={**problem.hidden, **hidden}, restore=restore), name

    def _has(self, image: str) -> bool:
        ask = [self.command, "image", "inspect", image]
        return subprocess.run(ask, capture_output=True, timeout=SECONDS, check=False).returncode == 0

    def check(self, problem: Problem, image: str, tests: Mapping[str, bytes], seconds: float) -> dict[str, str]:
        """Return what the verifier writes for the untouched repository and, if it is known, for the solution."""
        apply = f"git apply {problem.solution_flags} --whitespace=nowarn /swe-setup/solution.patch"
        ways = {"nothing": "true", **({"solution": apply} if problem.solution else {})}
        files = {**{f"tests/{path}": content for path, content in tests.items()}, "solution.patch": problem.solution}
        script = (
            "mkdir -p /logs/verifier && cp -r /swe-setup/tests /tests && {way} && rm -rf /swe-setup && "
            f"bash /tests/test.sh >&2; echo '{_END}'; cat /logs/verifier/reward.json"
        )
        encoded = {path: each if isinstance(each, bytes) else each.encode() for path, each in files.items()}
        return {
            name: self.run(image, script.replace("{way}", way), encoded, problem.workdir, seconds)
            .partition(_END)[2]
            .strip()
            for name, way in ways.items()
        }

    def run(
        self, image: str, script: str, files: Mapping[str, bytes], workdir: str = "/", seconds: float = SECONDS
    ) -> str:
        """Return what a script prints in a new container without a network. files: in ``/swe-setup``."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for path, content in files.items():
                entry = tarfile.TarInfo(path)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        command = _UNPACK.format(workdir=shlex.quote(workdir)) + f" && {script}"
        name = f"verl-tool-swe-{secrets.token_hex(8)}"
        options = ("--rm", "--interactive", "--network=none", "--entrypoint=", f"--name={name}")
        try:
            return self._engine(
                *("run", *options, image, "bash", "-c", command), where=image, stdin=buffer.getvalue(), seconds=seconds
            )
        except ImageError:
            subprocess.run([self.command, "rm", "--force", name], capture_output=True, timeout=SECONDS, check=False)
            raise

    def _read(self, problem: Problem, image: str) -> dict[str, str]:
        """The test files of a problem that its image must not have."""
        script = "git apply /swe-setup/bug.patch && for each in " + " ".join(map(shlex.quote, problem.hide))
        script += f"; do echo '{_END}'; cat -- \"$each\" || exit 1; done"
        files = {name: text.encode() for name, text in problem.setup_files.items()}
        contents = self.run(image, script, files, problem.workdir).split(f"{_END}\n")[1:]
        return dict(zip(problem.hide, contents, strict=True))

    def _engine(self, *arguments: str, where: str, stdin: bytes = b"", seconds: float = SECONDS) -> str:
        try:
            done = subprocess.run(
                [self.command, *arguments], input=stdin, capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise ImageError(f"{where}: {self.command} {arguments[0]} did not end within {seconds:g} s") from None
        if done.returncode != 0:
            why = done.stderr.decode(errors="replace").strip()[-500:]
            raise ImageError(f"{where}: {self.command} {arguments[0]} failed: {why}")
        return done.stdout.decode(errors="replace")

"""The project as a whole: one version of verl, a light default install, no address of a package host."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def setting(name: str) -> str:
    found = re.search(rf'^{name} = "([^"]+)"$', PYPROJECT, re.MULTILINE)
    assert found, f"pyproject.toml has no {name}"
    return found.group(1)


def git(*arguments: str) -> str:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_every_extra_pins_the_same_verl():
    pins = re.findall(r'"verl(?:\[[^\]]*\])?==([^"]+)"', PYPROJECT)
    assert len(pins) == 2, "one pin in the extra cpu, one in gpu"
    assert set(pins) == {setting("verl-version")}


def test_submodule_is_the_pinned_verl():
    mode, commit = git("ls-files", "--stage", "verl").split()[:2]
    assert mode == "160000", "verl/ is a submodule"
    assert commit == setting("verl-commit")
    assert "url = https://github.com/volcengine/verl" in (ROOT / ".gitmodules").read_text()


def test_checked_out_submodule_has_the_pinned_version():
    version_file = ROOT / "verl" / "verl" / "version" / "version"
    if not version_file.exists():
        pytest.skip("the submodule is not checked out")
    assert version_file.read_text().strip() == setting("verl-version")


LIGHT = ["protocol.py", "errors.py", "client.py", "formats", "sandbox", "servers"]
HEAVY = {"torch", "transformers", "verl", "vllm"}


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def light_sources() -> list[Path]:
    package = ROOT / "verl_tool"
    return [
        p for entry in LIGHT for p in ([package / entry] if entry.endswith(".py") else (package / entry).rglob("*.py"))
    ]


@pytest.mark.parametrize("path", light_sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_serving_tools_needs_no_torch(path: Path):
    assert not {name.split(".")[0] for name in imported_packages(path)} & HEAVY


FLOORS = [
    {"verl_tool.protocol", "verl_tool.errors", "verl_tool.plugin", "verl_tool.rendezvous"},
    {"verl_tool.formats", "verl_tool.sandbox"},
    {"verl_tool.servers.tools", "verl_tool.servers.tool_config", "verl_tool.client"},
    {"verl_tool.servers", "verl_tool.agent_loop", "verl_tool.text_environment"},
    {"verl_tool.agent_workers", "verl_tool.trainer", "verl_tool.platforms", "eval_service"},
]


def floor_of(module: str) -> int | None:
    """The highest-numbered floor whose longest entry is a prefix of `module`."""
    matches = [
        (len(entry), number)
        for number, entries in enumerate(FLOORS)
        for entry in entries
        if module == entry or module.startswith(entry + ".")
    ]
    return max(matches)[1] if matches else None


def all_sources() -> list[Path]:
    return sorted(p for top in ("verl_tool", "eval_service") for p in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("path", all_sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_imports_upward(path: Path):
    own = floor_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    upward = {name for name in imported_packages(path) if own is not None and (floor_of(name) or 0) > own}
    assert not upward


def test_agent_loop_reaches_tools_only_through_the_client():
    for path in (ROOT / "verl_tool" / "agent_loop").rglob("*.py"):
        assert not {n for n in imported_packages(path) if n.startswith(("verl_tool.servers", "verl_tool.sandbox"))}, (
            path
        )


def test_pinned_versions_name_no_download_address():
    for path in (ROOT / "scripts" / "constraints").glob("*.txt"):
        assert "://" not in path.read_text(), path

"""The project as a whole: versions of verl, a light default install, no address of a package host."""

import ast
import os
import re
import shutil
import subprocess
import sys
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


def test_every_python_file_is_linted_but_those_of_the_submodule():
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    linted = {str(Path(line).relative_to(ROOT)) for line in shown}
    assert {name for name in git("ls-files", "*.py").splitlines() if (ROOT / name).exists()} <= linted
    assert not [name for name in linted if name.startswith("verl/")]


def test_every_extra_allows_the_same_versions_of_verl():
    allowed = re.findall(r'"verl(?:\[[^\]]*\])?([<>=!~][^"]*)"', PYPROJECT)
    assert len(allowed) == 2, "one in the extra cpu, one in gpu"
    assert len(set(allowed)) == 1


@pytest.mark.parametrize("file", ["verl.txt", "cpu.txt", "gpu.txt"])
def test_one_verl_is_pinned(file):
    """scripts/env.sh installs it, unless VERL_TOOL_VERL names another."""
    pins = (ROOT / "scripts" / "constraints" / file).read_text()
    assert re.findall(r"^verl==(.+)$", pins, re.MULTILINE) == [setting("verl-version")]


@pytest.mark.parametrize(
    ("extras", "python", "all_pinned"), [("cpu", "3.11", True), ("cpu", "3.12", False), ("gpu", "3.12", True)]
)
@pytest.mark.parametrize("other", ["", "0.9.1"])
def test_the_environment_gets_the_verl_that_is_asked_for(tmp_path, extras, python, all_pinned, other):
    given = {"PATH": os.environ["PATH"], "VERL_TOOL_VENV": str(tmp_path), "VERL_TOOL_SKIP_INSTALL": "1"}
    script = f"set -euo pipefail; source {ROOT}/scripts/env.sh; verl_tool_pins {extras} {python}"
    given |= {"VERL_TOOL_VERL": other} if other else {}
    pins = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^verl==(.+)$", pins, re.MULTILINE)) == {other or setting("verl-version")}
    assert ("\nray==" in pins) == all_pinned


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


ARROWS = {
    "protocol": "",
    "formats": "protocol",
    "sandbox": "protocol",
    "judge": "protocol",
    "retrieval": "protocol",
    "platforms": "protocol",
    "client": "protocol",
    "sql": "protocol",
    "web": "protocol sandbox",
    "servers.command_options": "",
    "servers.tool_config": "protocol",
    "servers.metrics": "protocol",
    "servers.supervised_server": "protocol",
    "servers.tools": "protocol formats sandbox judge retrieval sql web servers.tool_config",
    "tasks": "protocol sandbox servers.tools",
    "servers.tests": "protocol client",
    "servers.execution": "protocol formats servers.metrics servers.tools",
    "servers.api": "protocol sandbox servers.metrics servers.execution",
    "servers.mcp": "protocol formats sandbox servers.tools servers.execution",
    "servers.mcp.endpoint": "protocol servers.execution servers.api",
    "servers.cluster": "protocol servers.api",
    "servers.settings": "servers.tool_config servers.api servers.mcp",
    "servers.replica_log": "servers.execution",
    "servers.replica_parts": "servers.tools servers.execution servers.api servers.mcp servers.mcp.endpoint "
    "servers.settings",
    "servers.server_console": "protocol servers.tools servers.api servers.mcp servers.settings servers.replica_parts",
    "servers.serve": "protocol servers.tools servers.execution servers.api servers.mcp servers.cluster "
    "servers.settings servers.supervised_server servers.replica_log servers.replica_parts servers.server_console",
    "servers.embedded": "protocol servers.api servers.cluster servers.settings servers.supervised_server "
    "servers.replica_log servers.replica_parts servers.server_console servers.serve",
    "servers.ray_serve": "protocol servers.command_options servers.tool_config servers.mcp servers.settings "
    "servers.replica_parts servers.server_console servers.serve servers.embedded",
    "retrieval.serving": "protocol retrieval servers.command_options servers.metrics servers.supervised_server "
    "servers.execution servers.api servers.cluster servers.settings servers.replica_log servers.server_console "
    "servers.serve",
    "retrieval.__main__": "protocol retrieval retrieval.serving",
    "agent_loop": "protocol formats",
    "agent_loop.verl": "protocol formats agent_loop client platforms",
    "text_history": "protocol agent_loop",
    "text_environment": "protocol formats client agent_loop text_history",
    "agent_workers": "protocol formats judge platforms client sql agent_loop",
    "doctor.checks": "protocol formats servers.tools agent_loop agent_workers",
    "trainer.monitoring": "protocol",
    "trainer.progress": "agent_loop.verl trainer.monitoring",
    "trainer": "protocol formats platforms sandbox servers.supervised_server servers.tool_config servers.tools "
    "servers.mcp servers.serve servers.ray_serve agent_loop agent_loop.verl agent_workers doctor.checks "
    "trainer.monitoring trainer.progress",
    "eval_service": "protocol formats client web agent_loop agent_loop.verl servers.command_options servers.metrics "
    "servers.supervised_server servers.server_console servers.execution servers.api servers.settings servers.serve",
    "viewer": "protocol servers.command_options servers.execution servers.api trainer.monitoring eval_service",
    "doctor": "protocol formats client agent_loop agent_loop.verl servers.tool_config servers.tools servers.execution "
    "agent_workers doctor.checks trainer eval_service",
    "doctor.gpu_smoke": "protocol formats client servers.tools servers.supervised_server servers.serve agent_loop "
    "agent_workers trainer.monitoring eval_service",
    "replay": "protocol client servers.tools servers.supervised_server servers.serve agent_loop agent_loop.verl "
    "agent_workers trainer.monitoring trainer eval_service",
    "trajectories": "protocol formats agent_loop replay eval_service",
}
"""What each room may import besides itself: rooms further up in this table. A module is in the longest that fits."""
GROUND = (
    *("protocol", "content", "env_variables", "errors", "json_text", "packed_files", "parent_death"),
    *("util", "plugin", "rendezvous", "json_options", "sandbox_fusion", "verification"),
)
"""Modules of the room ``protocol``."""
LIGHT = ("protocol", "formats", "sandbox", "judge", "retrieval", "sql", "web", "client", "servers", "tasks")
HEAVY = {"torch", "transformers", "verl", "vllm"}


def imported_packages(path: Path) -> set[str]:
    """What a file imports: modules, and names in them, which may be modules too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(module: str) -> str | None:
    """The room of one of our modules; None for other people's, and for one that is in no room."""
    top, _, rest = module.partition(".")
    if top == "eval_service":
        return top
    if top != "verl_tool":
        return None
    if rest.split(".")[0] in GROUND:
        return "protocol"
    return max((room for room in ARROWS if f"{rest}.".startswith(f"{room}.")), key=len, default=None)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources() -> list[Path]:
    return sorted(p for top in ("verl_tool", "eval_service") for p in (ROOT / top).rglob("*.py"))


def test_the_table_of_arrows_has_no_circle():
    rooms = list(ARROWS)
    for number, room in enumerate(rooms):
        assert set(ARROWS[room].split()) <= set(rooms[:number]), f"{room}: list it behind what it imports"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path):
    room = room_of(module_of(path))
    if room is None:
        assert not imported_packages(path), "in no room of ARROWS"
        return
    found = {name: other for name in imported_packages(path) if (other := room_of(name)) not in (None, room)}
    assert set(found.values()) <= set(ARROWS[room].split()), f"{room} may import {ARROWS[room]!r}: {found}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_serving_tools_needs_no_torch(path: Path):
    room = room_of(module_of(path))
    if room is not None and room.split(".")[0] in LIGHT:
        assert not {name.split(".")[0] for name in imported_packages(path)} & HEAVY


MAX_FILES = 14
FULL_FOLDERS = {
    "verl_tool/servers/tools": "one file a tool",
    "verl_tool/servers/tests": "one check a tool",
    "tests/servers/tools": "one file a tool",
    "verl_tool/agent_workers/reward_manager": "one a manager",
    "tests/helpers": "one a helper, all on the path of the tests",
}


def test_no_folder_overflows():
    folders = {path.parent for top in ("verl_tool", "eval_service", "tests") for path in (ROOT / top).rglob("*.py")}
    plumbing = ("__init__.py", "conftest.py")
    counts = {str(f.relative_to(ROOT)): len([p for p in f.glob("*.py") if p.name not in plumbing]) for f in folders}
    full = {folder: count for folder, count in counts.items() if count > MAX_FILES}
    assert set(full) <= set(FULL_FOLDERS), f"more than {MAX_FILES} Python files: {full}"


OF_A_WHOLE_FOLDER = {
    ".": "container_image",
    "agent_loop": "control_tokens properties with_server",
    "agent_workers/reward_manager": "reward_managers",
    "doctor/checks": "all_checks",
    "eval_service": "equals_training live lm_eval",
    "eval_service/openai": "odd_requests",
    "examples/cluster": "manifests slurm",
    "examples/train": "recipes",
    "formats": "all_formats",
    "formats/native": "round_trips",
    "judge/inside": "hacks",
    "platforms": "canaries gpu_stack torchvision",
    "platforms/vision": "training_of_vision",
    "sandbox": "adversarial held_by_the_kernel hostile",
    "servers/api": "hostile_requests loop_turns",
    "servers/cluster": "lost_node",
    "servers/tests": "live_checks",
    "servers/tools": "loading",
    "trainer": "training training_modes training_with_faults two_nodes",
    "trainer/ppo": "provoking trainer_canaries",
    "trajectories": "forms",
    "viewer": "hostile_runs",
}
"""Tests of more than one file. Any other ``test_NAME.py`` or ``test_NAME_PART.py`` tests the file or folder NAME."""


def test_tests_mirror_the_source():
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder, name = str(path.parent.relative_to(ROOT / "tests")), path.stem.removeprefix("test_")
        if folder == "." and name == "project":
            continue
        own = folder.startswith(("eval_service", "benchmarks", "examples", "scripts"))
        source = ROOT / folder if own else ROOT / "verl_tool" / folder
        assert source.is_dir(), f"{path}: there is no {source}"
        known = {p.stem for p in source.iterdir() if p.suffix in (".py", ".sh", "") and not p.name.startswith("_")}
        known |= set(OF_A_WHOLE_FOLDER.get(folder, "").split())
        assert any(name == k or name.startswith(f"{k}_") for k in known), f"{path} is named for no file of {source}"


def test_no_two_tests_have_one_name():
    names = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, "pytest imports them by their names alone"


def test_tests_of_whole_folders_are_there():
    for folder, names in OF_A_WHOLE_FOLDER.items():
        for name in names.split():
            assert (ROOT / "tests" / folder / f"test_{name}.py").is_file(), f"tests/{folder}/test_{name}.py"


def test_pinned_versions_name_no_download_address():
    for path in (ROOT / "scripts" / "constraints").glob("*.txt"):
        assert "://" not in path.read_text(), path

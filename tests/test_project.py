"""The project as a whole: versions of verl, a light default install, no address of a package host."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
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


ROWS = [
    row.split()
    for row in (
        "errors protocol verification workspace_limits sandbox_fusion content util",
        "formats sandbox judge sql client platforms",
        "http web retrieval browser",
        "servers.tool_config",
        "servers.tools",
        "servers.execution servers.tests tasks",
        "environments",
        "servers.mcp",
        "servers.settings",
        "servers.replica",
        "servers.server_console servers.cluster",
        "servers.serve",
        "servers retrieval.serving",
        "agent_loop retrieval.__main__",
        "notebook agent_workers gateway",
        "checks text_environment text_history environments.served",
        "trainer environments.__main__",
        "eval_service",
        "replay viewer",
        "trajectories doctor",
    )
]
"""Packages of the project: each may import those of earlier rows. The first row is one package. A module belongs to the
longest name that fits."""
APART = {
    "agent_loop": {"servers", "environments", "sandbox", "judge", "sql", "web", "browser", "retrieval"},
    "agent_workers": {"servers", "environments", "sandbox", "web", "browser", "retrieval"},
    "notebook": {"servers", "environments", "sandbox", "judge", "sql", "web", "browser", "retrieval"},
    "eval_service": {"trainer"},
}
"""Of earlier rows, what a package does not import: tools are reached through `client` only."""
LIGHT = (
    *(
        "errors",
        "protocol",
        "verification",
        "workspace_limits",
        "content",
        "util",
        "http",
        "formats",
        "sandbox",
        "judge",
    ),
    *("retrieval", "sql", "web", "browser", "client", "servers", "tasks", "environments"),
)
HEAVY = {"torch", "transformers", "verl", "vllm"}


@cache
def syntax_of(path: Path) -> ast.Module:
    """Parse a file, once for all tests."""
    return ast.parse(path.read_text())


@cache
def imported_packages(path: Path) -> set[str]:
    """What a file imports: modules, and names in them, which may be modules too."""
    names: set[str] = set()
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


RANKS = {package: rank for rank, row in enumerate(ROWS) for package in row}


@cache
def package_of(module: str) -> str | None:
    """The package of one of our modules; None for a module of somebody else's, and for `verl_tool` itself."""
    top, _, rest = module.partition(".")
    name = module if top == "eval_service" else rest
    if top not in ("verl_tool", "eval_service") or not name:
        return None
    return max((package for package in RANKS if f"{name}.".startswith(f"{package}.")), key=len, default=None)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources() -> list[Path]:
    return sorted(p for top in ("verl_tool", "eval_service") for p in (ROOT / top).rglob("*.py"))


def test_imports_follow_the_table():
    assert len(ROWS) <= 20
    for path in sources():
        package = package_of(module_of(path))
        imported = {name: other for name in imported_packages(path) if (other := package_of(name))}
        imported = {name: other for name, other in imported.items() if other != package}
        if package is None:
            assert not imported, f"{path} is in no row of ROWS"
            continue
        rank = RANKS[package]
        wrong = [name for name, other in imported.items() if RANKS[other] >= rank and rank > 0]
        wrong += [name for name, other in imported.items() if other.split(".")[0] in APART.get(package, ())]
        wrong += [name for name, other in imported.items() if rank == 0 and RANKS[other]]
        assert not wrong, f"{path}: {package} may not import {wrong}"


def test_serving_tools_needs_no_torch():
    for path in sources():
        if (package_of(module_of(path)) or "").split(".")[0] in LIGHT:
            assert not {name.split(".")[0] for name in imported_packages(path)} & HEAVY, path


MAX_FILES = 14
FULL_FOLDERS = {
    "verl_tool/servers/tools": "one file a tool",
    "verl_tool/servers/tests": "one check a tool",
    "tests/servers/tools": "one file a tool",
    "verl_tool/agent_workers/reward_manager": "one a manager",
    "tests/helpers": "one a helper, all on the path of the tests",
    "tests/benchmarks": "one a benchmark",
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
    "checks": "all_checks",
    "eval_service": "equals_training live lm_eval",
    "eval_service/openai": "odd_requests",
    "environments/served": "served_recordings",
    "examples/cluster": "manifests slurm",
    "examples/train": "recipes",
    "formats": "all_formats",
    "gateway": "recordings",
    "formats/native": "round_trips",
    "judge/inside": "hacks",
    "platforms": "canaries gpu_stack torchvision",
    "platforms/vision": "training_of_vision",
    "sandbox": "adversarial held_by_the_kernel hostile",
    "servers/replica": "hostile_requests loop_turns",
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


ODD_WORDS = {
    *("told", "telling", "shown", "given", "lone", "provoked", "begun", "asked", "wanted", "gone", "kept", "said"),
    *("patiently", "hopeless", "unasked", "mend", "stranger", "most", "least", "refuse"),
}
"""Words that say too little: name the message, the limit (``max_…``), the check (``validate_…``) or the owner."""


ALLOWED = {"most_frequent_gold"} | {
    "told",
    "shown",
    "begun",
    "BEGUN_HEADER",
    "gone",
    "provoked",
}
"""The last ones are fields of records and messages."""


def identifiers(path: Path) -> Iterator[str]:
    """Names of a file's functions, classes and variables."""
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def words_of(name: str) -> set[str]:
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))


def test_names_use_the_fields_words():
    for path in sources():
        odd = {name for name in identifiers(path) if words_of(name) & ODD_WORDS} - ALLOWED
        assert not odd, f"{path.relative_to(ROOT)}: use the field's words for {sorted(odd)}"


def test_no_two_public_classes_have_one_name():
    places: dict[str, list[str]] = {}
    for path in sources():
        for node in syntax_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_no_two_tests_have_one_name():
    names = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, "pytest imports them by their names alone"


def test_examples_that_others_import_by_name_have_a_name_of_their_own():
    scripts = list((ROOT / "examples").rglob("*.py"))
    names = [path.stem for path in scripts]
    imported: set[str | None] = set()
    for node in (node for path in scripts for node in ast.walk(syntax_of(path))):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert not {name for name in imported if names.count(name) > 1}, "who imports it gets the first on sys.path"


def test_scripts_test_finds_all_tests_that_run_alone():
    """It looks for files with their mark, or with the name of the list that has it."""
    helpers = {p.name for p in (ROOT / "tests" / "helpers").glob("*.py") if "mark.alone" in p.read_text()}
    assert helpers == {"calculator_run.py"}
    assert "TRAINS_ON_CPU = (" in (ROOT / "tests" / "helpers" / "calculator_run.py").read_text()
    assert "mark.alone" not in (ROOT / "tests" / "conftest.py").read_text()


def test_tests_of_whole_folders_are_there():
    for folder, names in OF_A_WHOLE_FOLDER.items():
        for name in names.split():
            assert (ROOT / "tests" / folder / f"test_{name}.py").is_file(), f"tests/{folder}/test_{name}.py"


def test_pinned_versions_name_no_download_address():
    for path in (ROOT / "scripts" / "constraints").glob("*.txt"):
        assert "://" not in path.read_text(), path

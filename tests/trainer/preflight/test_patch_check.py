"""What is looked at before a training: all replacements, and with versions that nobody tried, none goes unnoticed."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("verl")
pytest.importorskip("torch")

from verl_tool.errors import ConfigError
from verl_tool.platforms import cpu
from verl_tool.platforms import patch as patch_module
from verl_tool.platforms.patch import Internal
from verl_tool.trainer.preflight import patch_check

SOURCE = Path(patch_check.__file__).parents[2]


def test_the_installed_versions_are_those_that_all_is_written_for():
    patch_check.check_versions()


@pytest.mark.parametrize(("distribution", "found"), [("verl", "0.10.0"), ("torch", "2.14.0"), ("peft", "0.22.0")])
def test_another_version_is_refused_by_name(monkeypatch, distribution, found):
    monkeypatch.setattr(patch_module, "version", lambda name: found if name == distribution else version(name))
    with pytest.raises(ConfigError, match=rf"{distribution} {found} is installed, .* is written for {distribution} <"):
        patch_check.check_versions()


def test_each_has_an_upper_bound():
    for each in patch_check.internals():
        assert any(bound.operator in ("<", "<=", "==") for bound in each.versions), each


def held_by(module: ModuleType) -> list[Internal]:
    """All that a module has, alone or in a tuple."""
    values = [each for value in vars(module).values() for each in (value if isinstance(value, tuple) else (value,))]
    return [each for each in values if isinstance(each, Internal)]


def test_each_has_a_name_by_which_it_can_be_listed():
    for path in SOURCE.rglob("*.py"):
        source = path.read_text()
        if "from verl_tool.platforms.patch import" in source:
            assert not re.search(r"\)\.install\(\)", source), f"{path}: give the patch a name in its module"


def test_none_is_left_out(monkeypatch):
    monkeypatch.setattr(cpu, "trains_on_cpu", lambda: True)
    checked = patch_check.internals()
    for path in SOURCE.rglob("*.py"):
        if re.search(r"^from verl_tool\.platforms\.patch import .*(Patch|Internal|verl_patch)", path.read_text(), re.M):
            name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
            for each in held_by(importlib.import_module(name)):
                assert each in checked, f"{name}: list {each.attribute} in verl_tool/trainer/preflight/patch_check.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_modules_can_be_imported():
    pytest.importorskip("vllm")
    with patch_check.imports_checked() as wait:
        wait()


def test_a_module_that_cannot_be_imported_is_reported(monkeypatch, tmp_path):
    (tmp_path / "broken_check.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(patch_check, "__name__", "broken_check")
    with (
        pytest.raises(ConfigError, match=r"broken_check` ended with exit code 1.*libcudart\.so\.13"),
        patch_check.imports_checked() as wait,
    ):
        wait()

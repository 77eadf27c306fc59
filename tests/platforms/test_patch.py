"""Replacing a function of another package, and refusing when it is gone."""

from __future__ import annotations

import importlib
import json.scanner
import sys
from dataclasses import replace

import pytest

pytest.importorskip("wrapt")

from packaging.specifiers import SpecifierSet

from verl_tool.platforms.patch import Patch, PatchError, check_patches


def make_patch(module: str, attribute: str, versions: str = ">=0") -> Patch:
    return Patch(
        "pytest", SpecifierSet(versions), module, attribute, "a test needs it", lambda original: ("new", original)
    )


def why(patch: Patch) -> str:
    """What the check says before a training."""
    with pytest.raises(PatchError) as error:
        check_patches([patch])
    return str(error.value)


@pytest.fixture
def colors(tmp_path, monkeypatch):
    """A module `colors` that nobody has imported yet."""
    (tmp_path / "colors.py").write_text("red = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "colors"
    sys.modules.pop("colors", None)


def test_a_patch_waits_for_its_module(colors):
    assert make_patch(colors, "red").install()
    assert colors not in sys.modules
    assert importlib.import_module(colors).red == ("new", 1)


def test_a_module_that_is_there_is_patched_at_once(monkeypatch):
    monkeypatch.setattr(json.scanner, "NUMBER_RE", json.scanner.NUMBER_RE)
    original = json.scanner.NUMBER_RE
    make_patch("json.scanner", "NUMBER_RE").install()
    assert ("new", original) == json.scanner.NUMBER_RE


def test_a_missing_symbol_fails_the_import_and_names_it(tmp_path, monkeypatch):
    (tmp_path / "shades.py").write_text("grey = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    make_patch("shades", "black").install()
    with pytest.raises(PatchError, match=r"pytest .* has no shades\.black.*a test needs it"):
        importlib.import_module("shades")
    assert "shades" not in sys.modules


def test_another_version_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "hues.py").write_text("teal = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not make_patch("hues", "teal", "<1").install()
    assert importlib.import_module("hues").teal == 1


@pytest.fixture
def tints(tmp_path, monkeypatch):
    """A package whose import fails, so that nobody can have imported it."""
    (tmp_path / "tints").mkdir()
    for name in ("__init__", "light"):
        (tmp_path / "tints" / f"{name}.py").write_text(
            "if True:\n    from os import path as pale\nelse:\n    grey: int = 1\n"
            "def mauve(): hidden = 1\nclass Beige: inner = 1\ntry:\n    a, b = 1, 2\nfinally:\n    pass\n1 / 0\n"
        )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("tints")
@pytest.mark.parametrize("module", ["tints", "tints.light"])
@pytest.mark.parametrize("attribute", ["pale", "grey", "mauve", "Beige", "a", "b"])
def test_what_is_replaced_is_found_in_the_source(module, attribute):
    check_patches([make_patch(module, attribute)])


@pytest.mark.usefixtures("tints")
@pytest.mark.parametrize("name", ["tints.red", "tints.hidden", "tints.inner", "tints.dark.mauve", "no_such.mauve"])
def test_a_missing_symbol_is_reported_with_reason_and_remedy(name):
    module, _, attribute = name.rpartition(".")
    said = why(make_patch(module, attribute))
    assert f"has no {name}, which must be replaced (a test needs it)" in said
    assert "source scripts/env.sh cpu" in said
    assert "source scripts/env.sh gpu" in said


@pytest.mark.usefixtures("tints")
def test_an_untested_version_is_reported():
    patch = make_patch("tints", "mauve", ">=1,<2")
    said = why(patch)
    assert f"pytest {pytest.__version__} is installed" in said
    assert "tints.mauve is written for pytest <2,>=1 (a test needs it)" in said
    assert not patch.install()


@pytest.mark.usefixtures("tints")
def test_a_version_that_does_without_is_fine():
    check_patches([replace(make_patch("tints", "mauve", ">=1,<2"), not_needed=SpecifierSet(">=2"))])


def test_a_package_that_is_not_installed_is_in_nobody_s_way():
    check_patches([replace(make_patch("tints", "mauve"), distribution="no-such-package")])

"""Replacing a function of another package, and refusing when it is gone."""

from __future__ import annotations

import importlib
import json.scanner
import sys

import pytest

pytest.importorskip("wrapt")

from packaging.specifiers import SpecifierSet

from verl_tool.platforms.patch import Patch, PatchError


def make_patch(module: str, attribute: str, versions: str = ">=0") -> Patch:
    return Patch(
        "pytest", SpecifierSet(versions), module, attribute, "a test needs it", lambda original: ("new", original)
    )


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

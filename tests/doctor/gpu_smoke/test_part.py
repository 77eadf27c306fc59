"""The table of parts is whole, and selecting some of them brings what they continue."""

from __future__ import annotations

import importlib

import pytest

from verl_tool.doctor.gpu_smoke.part import PARTS, UsageError, missing_packages, select_parts

NAMES = [part.name for part in PARTS]


def test_names_are_unique_and_every_part_continues_an_earlier_one():
    assert len(set(NAMES)) == len(NAMES)
    for part in PARTS:
        assert set(part.after) <= set(NAMES[: NAMES.index(part.name)])


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_the_function_of_each_part_is_there(part):
    pytest.importorskip("torch")
    module, _, function = part.function.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_selecting_a_part_selects_what_it_continues_in_the_order_of_the_table():
    assert [part.name for part in select_parts(["resume", "device"])] == ["device", "grpo", "resume"]
    assert select_parts([]) == list(PARTS)


def test_an_unknown_part_is_named_with_the_known_ones():
    with pytest.raises(UsageError, match="part 'gpro' is unknown; known: device, "):
        select_parts(["grpo", "gpro"])


def test_missing_packages_are_named():
    assert missing_packages(["json", "no_such_package", "no_such.module"]) == ["no_such_package", "no_such.module"]

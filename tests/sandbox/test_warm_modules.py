"""Which forkserver a program is thought to suit."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.sandbox.pool import SandboxPool
from verl_tool.sandbox.warm_modules import WARM_MODULES, choose_tier, imported_by, tiers_of

pytestmark = pytest.mark.slow

BARE, BASIC, STANDARD, NUMPY, ALL = TIERS = tiers_of(WARM_MODULES)
HOLDS = {tier: frozenset({"os", "sys", "math", *tier}) for tier in TIERS}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b"import os", {"os"}),
        (b"import os.path as p, re\nx = 1", {"os", "re"}),
        (b"from collections.abc import Iterable, Sized", {"collections"}),
        (b"def f():\n    from a import (b,\n        c)\n    import d; import e", {"a", "d", "e"}),
        (b"from . import x\nfrom .y import z", set()),
        (b"print('important')\nimported = 1", set()),
        (b"x = '''import numpy'''", {"numpy"}),
        (b"import\nfrom\nimport ,", set()),
    ],
)
def test_imports_are_found(text, names):
    assert imported_by(text) == names


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        (b"print(1)", BARE),
        (b"import os, sys\nimport math", BARE),
        (b"from typing import List\nimport heapq", BASIC),
        (b"import nothing_known", BASIC),
        (b"import datetime", STANDARD),
        (b"import numpy as np", NUMPY),
        (b"import datetime, nothing_known", STANDARD),
        (b"__import__('numpy').arange(3)", NUMPY),
        (b"from sympy import *\nimport json", ALL),
    ],
)
def test_a_program_goes_to_the_smallest_that_holds_its_imports(text, tier):
    assert choose_tier([text], HOLDS) == tier


def test_files_of_the_program_count():
    assert choose_tier([b"import helper", b"import sympy"], HOLDS) == ALL


def test_with_nothing_warm_there_is_one_kind():
    (only,) = tiers_of((), always=("json",))
    assert only == ("json",)
    assert choose_tier([b"import numpy"], {only: frozenset({"json"})}) == only


@given(st.binary(max_size=300) | st.text("imporf ,.\n\tas1", max_size=300).map(str.encode))
def test_any_text_suits_some_forkserver(text):
    assert choose_tier([text], HOLDS) in HOLDS


@pytest.mark.parametrize("part", [b"import ", b"from a.", b"import a, ", b"from \t", b"from a    "])
def test_a_long_text_is_looked_at_quickly(part):
    began = time.process_time()
    imported_by(part * 1_000_000)
    assert time.process_time() - began < 1.0


async def test_a_run_finds_warm_what_it_imports_and_no_more():
    look = "import sys, {name}\nprint(*sorted({{'typ' + 'ing', 'num' + 'py'}} & set(sys.modules)))"
    async with SandboxPool(workers=1, warm_modules=("typing", "numpy")) as pool:
        found = [(await pool.run(look.format(name=name))).stdout for name in ("os", "re", "numpy")]
    assert found == ["\n", "typing\n", "numpy typing\n"]

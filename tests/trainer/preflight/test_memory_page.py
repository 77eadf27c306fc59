"""The tables of assets/docs/one_gpu.md have the estimator's numbers, and what they say of what fits holds."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from memory_page import estimated_cells, rows_of_page, settings_of
from preflight_configs import changed_config

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.trainer.preflight import memory_report, packages
from verl_tool.trainer.preflight.checks import run_preflight

pytestmark = pytest.mark.slow

ROWS = rows_of_page()
DOES_NOT_FIT = {"pixel_reasoner"}
"""On eight GPUs, as the page says."""


@pytest.fixture(autouse=True)
def _as_the_page_says(monkeypatch):
    """verl 0.9.0, without flash-attention, in whichever environment."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(memory_report, "_always_scales", lambda: True)
    monkeypatch.setattr(memory_report, "is_installed", lambda _module: False)
    monkeypatch.setattr(packages, "is_installed", lambda _module: True)


def test_the_page_has_both_tables():
    assert len(ROWS) == 14
    assert {settings_of(variables)["trainer.n_gpus_per_node"] for variables, _, _ in ROWS} == {1, 8}


@pytest.mark.parametrize(("variables", "recipe", "cells"), ROWS, ids=[f"{recipe} {names}" for names, recipe, _ in ROWS])
def test_a_row_has_the_estimate_of_its_command(variables, recipe, cells):
    assert cells == estimated_cells(variables, recipe)


@pytest.mark.parametrize(("variables", "recipe", "cells"), ROWS, ids=[f"{recipe} {names}" for names, recipe, _ in ROWS])
def test_its_command_passes_the_preflight_and_fits_or_is_named(variables, recipe, cells):
    config = changed_config(f"{recipe}/gpu.yaml", settings_of(variables))
    assert not run_preflight(config, EpisodeOptions(enable_mtrl=True)).problems
    card, *phases, _ = map(int, cells)
    fits = max(phases) <= card
    assert fits == (recipe not in DOES_NOT_FIT)

"""The checks do not see a Ray that other people run on this machine."""

import os

import pytest

pytest.importorskip("verl")

from verl_tool.trainer.preflight import resources


@pytest.fixture(autouse=True)
def _no_ray_of_others(monkeypatch):
    monkeypatch.setattr(resources, "address_to_join", lambda given: given or os.environ.get("RAY_ADDRESS") or None)

"""Fixtures of the training tests."""

from __future__ import annotations

import pytest
from calculator_run import Calculator, prepare


@pytest.fixture(scope="session")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Calculator:
    """Problems and a warmed-up model, made once for all trainings."""
    return prepare(tmp_path_factory.mktemp("calculator"))

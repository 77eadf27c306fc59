"""The container engine of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_tool.sandbox.backends.engine import find_engine


@pytest.mark.parametrize(
    ("codes", "found"),
    [
        ({}, "sandbox"),
        ({"docker": 1}, "sandbox"),
        ({"docker": 1, "podman": 0}, "podman"),
        ({"docker": 0, "podman": 1}, "docker"),
        ({"docker": 0, "podman": 0}, "podman"),
    ],
)
def test_an_engine_is_one_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], found: str
) -> None:
    for name, code in codes.items():
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\n[ "$1" = info ] && exit {code}\nexit 9\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # none of the machine's own
    find_engine.cache_clear()
    try:
        assert find_engine() == found
    finally:
        find_engine.cache_clear()

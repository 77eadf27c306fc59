"""Environment variables that are set for a while."""

from __future__ import annotations

import os

import pytest

from verl_tool.util.env_variables import variables_unless_set


def test_what_is_given_is_taken_back_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN_BY_THE_USER", "mine")
    for name in ("SET_FOR_A_WHILE", "SET_MEANWHILE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with variables_unless_set({"GIVEN_BY_THE_USER": "ours", "SET_FOR_A_WHILE": "ours"}):
        assert (os.environ["GIVEN_BY_THE_USER"], os.environ["SET_FOR_A_WHILE"]) == ("mine", "ours")
        # As ray.init does with RAY_AUTH_MODE.
        monkeypatch.setenv("SET_MEANWHILE", "theirs")
    assert os.environ == before | {"SET_MEANWHILE": "theirs"}

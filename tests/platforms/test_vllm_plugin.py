"""FlashInfer's sampler is left to machines that can compile it."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm")

from verl_tool.platforms.vllm_plugin import SAMPLER, choose_sampler


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    """No nvcc anywhere that FlashInfer looks, and nothing chosen."""
    for name in ("CUDA_HOME", "CUDA_PATH", SAMPLER):
        # Set first, so that what the test sets is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def add_nvcc(home):
    (home / "bin").mkdir()
    (home / "bin" / "nvcc").touch(mode=0o755)


def test_without_nvcc_vllm_samples_by_itself(no_compiler):
    choose_sampler(toolkit=str(no_compiler))
    assert os.environ[SAMPLER] == "0"


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME", "CUDA_PATH", "toolkit"])
def test_with_nvcc_the_choice_is_left_to_vllm(no_compiler, monkeypatch, where):
    add_nvcc(no_compiler)
    if where != "PATH":
        monkeypatch.setenv("PATH", "/nonexistent")
    if where.startswith("CUDA"):
        monkeypatch.setenv(where, str(no_compiler))
    choose_sampler(toolkit=str(no_compiler) if where == "toolkit" else "/nonexistent")
    assert SAMPLER not in os.environ


def test_the_users_choice_stays(no_compiler, monkeypatch):
    monkeypatch.setenv(SAMPLER, "1")
    choose_sampler(toolkit=str(no_compiler))
    assert os.environ[SAMPLER] == "1"

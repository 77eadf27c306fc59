"""What is kept of each token, written and read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.errors import ConfigError
from verl_tool.trainer.monitoring.token_records import COLUMNS, TokenRecords, mean_advantages, tokens_of, tokens_path

LENGTHS = st.lists(st.integers(0, 5), max_size=6)


def made(lengths, seed):
    draw = np.random.default_rng(seed)
    return {
        "advantages": [draw.normal(size=n).astype("f4") for n in lengths],
        "log_probs": [-draw.random(n, "f4") for n in lengths],
        "mask": [draw.integers(0, 2, n).astype("u1") for n in lengths],
    }


@given(LENGTHS, LENGTHS, st.integers(0, 100))
def test_what_was_written_is_read(tmp_path_factory, first, second, seed):
    """In two batches, whose rows come in any order."""
    folder = tmp_path_factory.mktemp("records")
    records, log = folder / "step_3.jsonl", TokenRecords(folder, 1)
    lines = np.random.default_rng(seed).permutation(len(first) + len(second)).tolist()
    batches = made(first, seed), made(second, seed + 1)
    log.add(3, lines[: len(first)], batches[0])
    log.add(3, lines[len(first) :], batches[1])
    means = mean_advantages(records, len(lines) + 1)
    for row, line in enumerate(lines):
        batch, at = (batches[0], row) if row < len(first) else (batches[1], row - len(first))
        told = tokens_of(records, line)
        assert {name: column.tolist() for name, column in told.items()} == {n: batch[n][at].tolist() for n in COLUMNS}
        counted = batch["advantages"][at][batch["mask"][at] > 0]
        assert np.isnan(means[line]) if not len(counted) else means[line] == pytest.approx(counted.mean(), abs=1e-6)
    assert np.isnan(means[-1])
    assert tokens_of(records, len(lines)) == {}


def test_another_step_has_a_file_of_its_own(tmp_path):
    log = TokenRecords(tmp_path, 1)
    log.add(1, [0], made([2], 0))
    log.add(2, [0], made([3], 0))
    assert [len(tokens_of(tmp_path / f"step_{step}.jsonl", 0)["mask"]) for step in (1, 2)] == [2, 3]


@pytest.mark.parametrize(("every", "kept"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_which_steps_are_kept(tmp_path, every, kept):
    assert [step for step in range(1, 5) if TokenRecords(tmp_path, every).is_due(step)] == kept
    assert not TokenRecords(None, every).is_due(2)


def test_a_number_below_zero_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="token_records_every is -1"):
        TokenRecords(tmp_path, -1)


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 cut off", b"text"])
def test_a_file_that_is_not_there_or_broken_tells_nothing(tmp_path, content):
    records = tmp_path / "step_1.jsonl"
    if content is not None:
        Path(tokens_path(records)).write_bytes(content)
    assert tokens_of(records, 0) == {}
    assert np.isnan(mean_advantages(records, 2)).all()

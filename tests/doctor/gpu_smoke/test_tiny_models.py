"""The yardstick of the parts: differences of log-probabilities are measured and held against limits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")

from verl_tool.doctor.gpu_smoke.part import PartFailed  # noqa: E402
from verl_tool.doctor.gpu_smoke.tiny_models import Differences  # noqa: E402


def test_small_differences_pass_with_their_figures():
    differences = Differences()
    differences.add(torch.tensor([-1.0, -2.0]), [-1.0, -2.0001])
    figures = differences.check("cpu", "x")
    assert figures["tokens"] == 2
    assert figures["logprob_diff_max"] == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ([], "no token"),
        ([float("nan")], "NaN"),
        ([-1.01], r"0\.01 \(mean\)"),
        ([-1.0] * 1999 + [-1.1], r"0\.1 \(max\)"),
    ],
)
def test_what_is_not_right_fails(values, cause):
    differences = Differences()
    differences.add(torch.full((len(values),), -1.0), values)
    with pytest.raises(PartFailed, match=cause):
        differences.check("cpu", "x")

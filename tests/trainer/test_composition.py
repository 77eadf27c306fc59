"""Arithmetic in configs."""

from __future__ import annotations

import pytest

pytest.importorskip("hydra")

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl_tool.trainer.composition import resolve_calculations


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${calc.sum:${a},${b},1}", 11),
        ("${calc.product:2,${calc.sum:${a},${b}}}", 20),
        ("${calc.quotient:${a},${b}}", 2),
        ("${calc.max:${a},${b}}", 7),
        ("${calc.not_zero:${none}}", False),
        ("${calc.not_zero:0.5}", True),
        ("${calc.if:${none},x,${a}}", 7),
        ("${calc.if:${a},--x}", "--x"),
        ("${calc.if:${none},--x}", ""),
        ("${calc.equal:${name},tiny}", True),
    ],
)
def test_calculations(written, value):
    config = OmegaConf.create({"a": 7, "b": 3, "none": 0, "name": "tiny", "group": {"told": written}})
    resolve_calculations(config)
    assert OmegaConf.to_container(config, resolve=False)["group"]["told"] == value


def test_other_interpolations_stay_and_follow_what_they_name():
    config = OmegaConf.create({"a": 1, "b": "${a}", "c": "${calc.sum:${a},1}"})
    resolve_calculations(config)
    config.a = 5
    assert (config.b, config.c) == (5, 2)


def test_a_config_that_lies_elsewhere_finds_ours(tmp_path):
    (tmp_path / "own.yaml").write_text("defaults: [tool_server@there: tool_server]")
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert compose("own").there.max_restarts == 10

"""Arithmetic in configs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from verl_tool.errors import ConfigError
from verl_tool.trainer import composition
from verl_tool.trainer.composition import known_names, resolve_calculations


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


def test_calculations_in_a_list():
    config = OmegaConf.create({"a": 7, "group": {"lines": ["${a}", "seed=${calc.sum:${a},1} ${a}", 5, {"x": 1}]}})
    resolve_calculations(config)
    assert OmegaConf.to_container(config, resolve=False)["group"]["lines"] == ["${a}", "seed=8 7", 5, {"x": 1}]


def test_other_interpolations_stay_and_follow_what_they_name():
    config = OmegaConf.create({"a": 1, "b": "${a}", "c": "${calc.sum:${a},1}"})
    resolve_calculations(config)
    config.a = 5
    assert (config.b, config.c) == (5, 2)


def test_a_config_that_lies_elsewhere_finds_ours(tmp_path):
    (tmp_path / "own.yaml").write_text("defaults: [tool_server@there: tool_server]")
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert compose("own").there.max_restarts == 10


def composed_of(override):
    with initialize_config_dir(str(Path(composition.__file__).parent / "config"), version_base=None):
        return compose("agent_ppo_trainer", overrides=[override])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "actor_rollout_ref.agent.max_turn=3",
            ".agent has no option 'max_turn', perhaps max_turns is meant; known",
        ),
        ("actor_rollout_ref.xyz.a=3", "^actor_rollout_ref has no option 'xyz'; known: actor, agent, "),
        ("xyz=3", "^the config has no option 'xyz'; known: actor_rollout_ref, "),
    ],
)
def test_an_option_of_a_wrong_name_gets_the_known_ones(override, told):
    with pytest.raises(ConfigCompositionException) as raised:
        composed_of(override)
    assert re.search(told, known_names(raised.value))


@pytest.mark.parametrize("error", [None, ConfigError("of ours"), ConfigCompositionException("of another kind")])
def test_other_errors_name_no_options(error):
    assert known_names(error) is None

"""The loop's options on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from eval_service.episode_flags import TRAINING_ONLY, merged_options, set_options, with_episode_flags
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.errors import ConfigError


def parsed(*arguments: str) -> dict[str, Any]:
    """What a command with these flags is given."""
    given: dict[str, Any] = {}

    @with_episode_flags
    def command(own: str = "x", **episode: Any) -> None:
        given.update(set_options(episode), own=own)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return given


def test_what_is_not_given_is_not_set() -> None:
    assert parsed() == {"own": "x"}


def test_every_option_that_matters_for_an_answer_is_a_flag() -> None:
    values = {int: "3", float: "2.5", str: "user"}
    for name, field in EpisodeOptions.model_fields.items():
        if name in TRAINING_ONLY:
            continue
        kinds = {int: "int", float: "float", bool: "bool"}
        kind = next((k for k, word in kinds.items() if word in str(field.annotation)), str)
        arguments = [f"--{name}"] if kind is bool else [f"--{name}", values.get(kind, "user")]
        assert name in parsed(*arguments), name


def test_flags_give_the_options_that_a_config_gives() -> None:
    given = parsed("--max_turns", "3", "--enable_mtrl", "--truncate_obs_side", "left", "--tool_call_timeout", "5")
    del given["own"]
    assert EpisodeOptions.load(given) == EpisodeOptions.load(
        {"max_turns": 3, "enable_mtrl": True, "truncate_obs_side": "left", "tool_call_timeout": 5.0}
    )
    assert parsed("--no_enable_agent")["enable_agent"] is False


@pytest.mark.parametrize("text", ["</python>,```output", '["</python>", "```output"]', "FILE"])
def test_stop_strings_as_a_list_as_json_and_from_a_file(tmp_path: Path, text: str) -> None:
    if text == "FILE":
        path = tmp_path / "stops.json"
        path.write_text('["</python>", "```output"]')
        text = str(path)
    assert parsed("--action_stop_tokens", text)["action_stop_tokens"] == ("</python>", "```output")


def test_a_broken_list_is_told() -> None:
    with pytest.raises(ConfigError, match="starts like a JSON list"):
        set_options({"action_stop_tokens": '["a"'})


def test_flags_stand_before_the_runs_own_options() -> None:
    base = EpisodeOptions.load({"max_turns": 4, "action_stop_tokens": ["<call>"]})
    merged = merged_options(base, {"max_turns": 1})
    assert (merged.max_turns, merged.action_stop_tokens) == (1, ("<call>",))
    assert merged.max_obs_length == base.max_obs_length


def test_a_contradiction_with_the_runs_options_is_told() -> None:
    base = EpisodeOptions.load({"min_turns": 2, "action_stop_tokens": ["<call>"]})
    with pytest.raises(ConfigError, match="min_turns=2 is above max_turns=1"):
        merged_options(base, {"max_turns": 1})

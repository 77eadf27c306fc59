from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from verl_tool.agent_loop.options import TOOL_CONFIG_ALIASES, EpisodeOptions
from verl_tool.errors import ConfigError

TABLE = Path(__file__).parents[2] / "assets/docs/options.md"
INLINE: dict[str, Any] = {"action_stop_tokens": ["</python>"]}


def test_every_alias_sets_its_option() -> None:
    values: dict[str, Any] = {
        "enabled": True,
        "server_url": "http://127.0.0.1:5000",
        "max_tool_turns": 7,
        "max_retries": 2,
        "retry_delay": 0.25,
        "timeout": 11.0,
        "queue_timeout": 13.0,
        "max_workers": 5,
        "request_interval": 0.125,
    }
    assert set(values) == set(TOOL_CONFIG_ALIASES)
    options = EpisodeOptions.load({**INLINE, "tool_config": values})
    assert {alias: getattr(options, name) for alias, name in TOOL_CONFIG_ALIASES.items()} == values
    assert options.client_settings() == {
        "timeout": 11.0,
        "queue_timeout": 13.0,
        "max_retries": 2,
        "retry_delay": 0.25,
        "max_workers": 5,
        "request_interval": 0.125,
    }


def test_an_alias_may_repeat_its_option_but_not_contradict_it() -> None:
    assert EpisodeOptions.load({**INLINE, "max_turns": 3, "tool_config": {"max_tool_turns": 3}}).max_turns == 3
    with pytest.raises(ConfigError, match=r"tool_config\.max_tool_turns=4 and max_turns=3"):
        EpisodeOptions.load({**INLINE, "max_turns": 3, "tool_config": {"max_tool_turns": 4}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**INLINE, "max_trns": 3}, "unknown option max_trns; known: .*max_turns"),
        ({**INLINE, "retokenization": True}, "never decoded and encoded again"),
        ({**INLINE, "tool_call_time_out": 3}, "it is called tool_call_timeout"),
        ({**INLINE, "tool_config": {"max_turns": 3}}, r"tool_config\.max_turns is unknown; known: .*max_tool_turns"),
        ({**INLINE, "tool_config": [1]}, "tool_config is a list"),
        ({**INLINE, "max_turns": -1}, "max_turns: .*greater than or equal to 0.*got -1"),
        ({**INLINE, "truncate_obs_side": "up"}, "truncate_obs_side: .*'left', 'right' or 'middle'.*got 'up'"),
        ({**INLINE, "max_turns": 1, "min_turns": 2}, "min_turns=2 is above max_turns=1"),
        ({**INLINE, "val_max_turns": 1, "min_turns": 2}, "min_turns=2 is above val_max_turns=1"),
        ({**INLINE, "val_max_turns": 0, "force_finish_for_last_turn": True}, "val_max_turns=0 lets the model write"),
        ({**INLINE, "enable_agent": False, "tool_schemas": ["a"]}, r"tool_schemas=\['a'\] describes some"),
        ({**INLINE, "tool_schemas": "none", "tool_prompt": "system"}, "tool_schemas=none describes no tool"),
        ({**INLINE, "max_turns": 0, "force_finish_for_last_turn": True}, "lets the model write nothing"),
        ({**INLINE, "max_start_length": 9, "max_prompt_length": 8}, "max_start_length=9 is above max_prompt_length=8"),
        ({"enable_agent": False, "call_tool_first": True}, "enable_agent=False calls no tool"),
        ({"enable_agent": False, "min_turns": 1}, "enable_agent=False calls no tool"),
        ({}, "inline actions need action_stop_tokens"),
        ({"action_stop_tokens": [""]}, "every text contains the empty string"),
        ({**INLINE, "mtrl_sep": "{obs}"}, "mtrl_sep is set and enable_mtrl is False"),
        ({"enable_mtrl": True, "mtrl_sep": "obs"}, "contains {obs} 0 times"),
        ({"enable_mtrl": True, "mtrl_sep": "{obs}{obs}"}, "contains {obs} 2 times"),
        ({"enable_mtrl": True, "mtrl_sep": "{obs}", "mtrl_role": "tool"}, "mtrl_sep and mtrl_role are both set"),
        ({"action_stop_tokens": "/no/such/file"}, "'/no/such/file' is not a readable file"),
    ],
)
def test_wrong_options_are_refused_with_their_mend(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EpisodeOptions.load(values)


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("</python>, ```output\n", ("</python>", "```output")),
        (json.dumps(["</a>", "b, c", "\n"]), ("</a>", "b, c", "\n")),
        ("", ()),
    ],
)
def test_stop_strings_come_from_a_file(tmp_path: Path, text: str, stops: tuple[str, ...]) -> None:
    file = tmp_path / "stops.txt"
    file.write_text(text)
    options = EpisodeOptions.load({"enable_mtrl": True, "action_stop_tokens": str(file)})
    assert options.action_stop_tokens == stops


def test_a_broken_json_file_of_stop_strings_is_named(tmp_path: Path) -> None:
    file = tmp_path / "stops.json"
    file.write_text('["</a>"')
    with pytest.raises(ConfigError, match=r"stops\.json starts like a JSON list but is not one"):
        EpisodeOptions.load({"action_stop_tokens": str(file)})


def test_the_table_of_options_is_complete_and_true() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", TABLE.read_text(), re.MULTILINE)
    told = {name: default.strip().strip("`") for name, default in rows if name in EpisodeOptions.model_fields}
    assert set(told) == set(EpisodeOptions.model_fields)
    for name, field in EpisodeOptions.model_fields.items():
        default = field.default
        written = json.dumps(default if not isinstance(default, tuple) else list(default)).strip('"')
        assert told[name] == written, name


@pytest.mark.parametrize(
    ("written", "read"), [("a, b", ("a", "b")), ("[a]", ("a",)), (["a"], ("a",)), ("none", "none")]
)
def test_names_of_tools_may_stand_in_one_string(written: object, read: object) -> None:
    assert EpisodeOptions.load({**INLINE, "tool_schemas": written}).tool_schemas == read


def test_validation_has_limits_of_its_own_where_they_are_set() -> None:
    options = EpisodeOptions.load({**INLINE, "max_turns": 3, "max_response_length": 50, "val_max_turns": 9})
    validation = options.for_validation()
    assert (validation.max_turns, validation.max_response_length, validation.val_max_turns) == (9, 50, None)
    assert validation.action_stop_tokens == ("</python>",)
    assert EpisodeOptions.load({**INLINE, "val_max_response_length": 7}).for_validation().max_response_length == 7
    assert EpisodeOptions.load(INLINE).for_validation() == EpisodeOptions.load(INLINE)

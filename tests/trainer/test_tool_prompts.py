"""What a training asks of a real tool server, and what it looks at, before its first step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
arrow = pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet  # noqa: E402
from live_server import LiveServers  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from real_tokenizers import HERMES_TEMPLATE, chat_tokenizer  # noqa: E402
from verl_loop import ScriptedEngine, composed, loop_of  # noqa: E402

from verl_tool.agent_loop.verl.config import options_in  # noqa: E402
from verl_tool.agent_loop.verl.tool_descriptions import tools_in  # noqa: E402
from verl_tool.checks.row_files import row_files  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402
from verl_tool.trainer.resume_check import check_same_run  # noqa: E402
from verl_tool.trainer.run_folder.saved_config import save_config  # noqa: E402
from verl_tool.trainer.tool_prompts import attach_tool_descriptions  # noqa: E402

AGENT = "actor_rollout_ref.agent"
CHAT = f"{AGENT}.enable_mtrl=true"
NOBODY = "http://127.0.0.1:9"
SHORT = {"prompt": [{"role": "user", "content": "hi"}]}


def config_of(folder: Path, url: str, rows: list[dict[str, Any]], *overrides: str) -> DictConfig:
    chat_tokenizer(HERMES_TEMPLATE).save_pretrained(folder / "model")
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "rows.parquet")
    return composed(
        *(f"run_dir={folder}", f"data.train_files={folder}/rows.parquet", f"data.val_files=[{folder}/rows.parquet]"),
        *(
            "data.max_prompt_length=4096",
            "data.max_response_length=512",
            f"actor_rollout_ref.model.path={folder}/model",
        ),
        *(f"{AGENT}.tool_server_url={url}", f"{AGENT}.tool_call_max_retries=0", "platform=cpu", *overrides),
    )


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        (f"{AGENT}.action_stop_tokens=['</a>']", "[]"),
        (f"{AGENT}.tool_schemas=none", "[]"),
        (f"{AGENT}.enable_agent=false", None),
        (f"{AGENT}.formats=hermes", None),
    ],
)
def test_a_server_need_not_tell_its_tools_where_no_prompt_does(
    mode: str, kept: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for the tags of their names, unless the formats are named; a run keeps that it was told of none."""
    chat = f"{AGENT}.enable_mtrl=false" if "agent=" in mode else CHAT
    config = config_of(tmp_path, NOBODY, [SHORT], mode, chat, f"{AGENT}.tool_schemas=none")
    attach_tool_descriptions(config, options_in(config), row_files(config))
    assert config.tool_server.tools == kept
    assert ("names the tags" in caplog.text) == (kept is not None)


async def test_a_tool_is_called_by_a_tag_of_its_name_in_chat_mode(tmp_path: Path, servers: LiveServers) -> None:
    """The run keeps what its server told, and finds the same calls whatever the server tells later."""
    server = await servers.start(load_tools("calculator,finish"))
    config = config_of(tmp_path, server.url, [SHORT], CHAT, f"{AGENT}.tool_schemas=none")
    await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    assert [tool.name for tool in tools_in(config)] == ["calculator", "finish"]
    config.actor_rollout_ref.agent.tool_server_url = (await servers.start(load_tools("calculator"))).url
    await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    assert [tool.name for tool in tools_in(config)] == ["calculator", "finish"]
    tokenizer = chat_tokenizer(HERMES_TEMPLATE)
    call, thought = "<calculator>6*7</calculator>", "<think>Not <calculator>1</calculator>.</think>"
    engine = ScriptedEngine(tokenizer, f"{thought}So {call}", "42", call)
    loop = loop_of(config, tokenizer, engine)
    output = await loop.run({}, raw_prompt=[{"role": "user", "content": f"Write {call}."}])
    [record] = output.extra_fields["trajectory"].calls
    assert (record.names, record.valid) == (("calculator",), True)
    assert "42" in record.observation
    mask = output.extra_fields["action_mask"]
    masked = [token for token, is_call in zip(output.response_ids, mask, strict=True) if is_call]
    assert tokenizer.decode(masked) == call
    other = await loop.run({}, raw_prompt=SHORT["prompt"], extra_info={"tool_selection": ["finish"]})
    assert other.extra_fields["trajectory"].calls == ()
    assert sum(other.extra_fields["action_mask"]) == 0


def test_a_server_that_does_not_tell_its_tools_is_named_with_the_remedy(tmp_path: Path) -> None:
    config = config_of(tmp_path, NOBODY, [SHORT], CHAT)
    with pytest.raises(ConfigError, match=rf"{NOBODY} does not tell its tools.*tool_schemas=none"):
        attach_tool_descriptions(config, options_in(config), row_files(config))


async def test_what_it_tells_is_in_the_saved_config_as_it_was_told(tmp_path: Path, servers: LiveServers) -> None:
    kind = type(load_tools("calculator")[0])
    tool = kind(description="Costs ${oc.env:HOME} and $5.")
    server = await servers.start([tool])
    config = config_of(tmp_path, server.url, [SHORT], CHAT)
    await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    saved = OmegaConf.load(save_config(config))
    assert isinstance(saved, DictConfig)
    assert tools_in(config) == tools_in(saved) == (tool.describe(),)
    # Another start of the same run is told the same, or is refused.
    await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    other = await servers.start([kind()])
    config.actor_rollout_ref.agent.tool_server_url = other.url
    with pytest.raises(ConfigError, match="the tools of this run have changed since it began: calculator"):
        await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))


def test_a_start_that_goes_on_with_a_run_has_what_its_tools_told(tmp_path: Path) -> None:
    config = config_of(tmp_path, NOBODY, [SHORT], CHAT)
    config.tool_server.tools = "[]"
    OmegaConf.save(config, tmp_path / "config.yaml", resolve=True)
    config.tool_server.tools = None
    check_same_run(config)
    assert config.tool_server.tools is None  # there is no checkpoint: it begins anew
    checkpoints = Path(config.trainer.default_local_dir)
    (checkpoints / "global_step_1/actor").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("1")
    check_same_run(config)
    assert config.tool_server.tools == "[]"


@pytest.mark.parametrize("row", [{"tools_kwargs": {"tools": ["calculator", "calc"]}}, {"tool_selection": ["calc"]}])
async def test_a_row_that_lists_an_unknown_tool_is_named(row: Any, tmp_path: Path, servers: LiveServers) -> None:
    server = await servers.start(load_tools("calculator"))
    for mode in (CHAT, f"{AGENT}.action_stop_tokens=['</a>']", f"{AGENT}.tool_schemas=none"):
        config = config_of(tmp_path, server.url, [{**SHORT, "extra_info": None}, {**SHORT, "extra_info": row}], mode)
        if mode.endswith("none"):
            config.actor_rollout_ref.agent.enable_mtrl = True
        with pytest.raises(
            ConfigError, match=r"row 1 of .*rows\.parquet: the tool 'calc' is unknown; known: calculator"
        ):
            await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))


async def test_a_row_that_the_schemas_make_too_long_is_named_with_both_lengths(
    tmp_path: Path, servers: LiveServers
) -> None:
    server = await servers.start(load_tools("calculator"))
    tokenizer = chat_tokenizer(HERMES_TEMPLATE)
    long = {"prompt": [{"role": "user", "content": "hello " * 200}]}
    config = config_of(tmp_path, server.url, [SHORT, long], CHAT, "data.max_prompt_length=700")
    assert len(tokenizer.apply_chat_template(long["prompt"])["input_ids"]) > 700
    # Too long by itself: left out by verl if it is told to, else cut by the loop, which would cut what tells of tools.
    config.data.filter_overlong_prompts = True
    await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    config.data.filter_overlong_prompts = False
    with pytest.raises(
        ConfigError, match=r"row 1 of .*: the prompt has \d+ tokens, \d+ of them .*max_prompt_length=700"
    ):
        await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    config.data.max_prompt_length = 100
    config.data.filter_overlong_prompts = True
    with pytest.raises(
        ConfigError, match=r"row 0 of .*: the prompt has \d+ tokens, \d+ of them .*max_prompt_length=100"
    ):
        await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))


async def test_the_loop_tells_of_the_tools_that_a_row_lists_and_lets_it_use_no_other(
    tmp_path: Path, servers: LiveServers
) -> None:
    server = await servers.start(load_tools("calculator,finish"))
    config = config_of(tmp_path, server.url, [SHORT], CHAT, f"{AGENT}.action_stop_tokens=['</tool_call>']")
    await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    tokenizer = chat_tokenizer(HERMES_TEMPLATE)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    engine = ScriptedEngine(tokenizer, call, "42", call, "no")
    loop = loop_of(config, tokenizer, engine)
    row = {"raw_prompt": SHORT["prompt"], "tools_kwargs": {"unit": "m", "tools": ["calculator"]}}
    told = (await loop.run({}, **row)).extra_fields["trajectory"]
    prompt = tokenizer.decode(engine.asked[0][1])
    assert ('"calculator"' in prompt, '"finish"' in prompt) == (True, False)
    assert "42" in told.calls[0].observation
    row = {"raw_prompt": SHORT["prompt"], "extra_info": {"tool_selection": ["finish"]}}
    refused = (await loop.run({}, **row)).extra_fields["trajectory"]
    assert not refused.calls[0].valid
    assert "42" not in refused.calls[0].observation
    with pytest.raises(ConfigError, match="row 5 of the data: the tool 'nope' is unknown; known: calculator, finish"):
        await loop.run({}, raw_prompt=SHORT["prompt"], tools_kwargs={"tools": ["nope"]}, index=5)


def test_a_loop_whose_config_lacks_the_tools_says_who_asks_for_them(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(HERMES_TEMPLATE)
    with pytest.raises(ConfigError, match=r"tool_server\.tools.*tool_schemas=none"):
        loop_of(config_of(tmp_path, NOBODY, [SHORT], CHAT), tokenizer, ScriptedEngine(tokenizer))

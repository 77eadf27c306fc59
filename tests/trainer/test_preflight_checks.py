"""The doctor's checks at the start of a training, and in a dry run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
arrow = pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from real_tokenizers import HERMES_TEMPLATE, PLAIN_TEMPLATE, chat_tokenizer  # noqa: E402
from verl_loop import composed  # noqa: E402

from verl_tool.agent_loop.verl.config import options_in  # noqa: E402
from verl_tool.checks.row_files import row_files  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.trainer import main_ppo  # noqa: E402
from verl_tool.trainer.preflight_checks import check_setup  # noqa: E402
from verl_tool.trainer.tool_prompts import attach_tool_descriptions  # noqa: E402

AGENT = "actor_rollout_ref.agent"
CHAT = f"{AGENT}.enable_mtrl=true"
PAYS_ALL = """
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade

class PaysAll(GradingRewardManager):
    async def grade(self, sample):
        return Grade(1.0, True, {})
"""
ENCODES = """
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade

class Encodes(GradingRewardManager):
    async def grade(self, sample):
        return Grade(float(len(self.tokenizer.encode(sample.text)) > 9), False, {})
"""
READS_PROGRAM = """
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade

class ReadsProgram(GradingRewardManager):
    async def grade(self, sample):
        return Grade(float(sample.trajectory.extra["agent_program"]["exit_code"] == 0), True, {})
"""
READS_UID = """
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

class ReadsUid(RewardManagerBase):
    async def run_single(self, data):
        return {"reward_score": float(data[0].non_tensor_batch["uid"] == 1), "reward_extra_info": {}}
"""


def row(gold: str, **tools_kwargs: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": "How many?"}],
        "data_source": "rivers",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"tools_kwargs": {"unit": "m", **tools_kwargs}},
    }


ROWS = [row("7212"), row("3144"), row("905"), row("1618")]


def config_of(folder: Path, *overrides: str, rows: Any = ROWS, template: str = HERMES_TEMPLATE) -> DictConfig:
    if template:
        chat_tokenizer(template).save_pretrained(folder / "model")
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "rows.parquet")
    files = (f"data.train_files={folder}/rows.parquet", f"data.val_files=[{folder}/rows.parquet]")
    lengths = ("data.max_prompt_length=4096", "data.max_response_length=2048")
    of_model = (f"run_dir={folder}", f"actor_rollout_ref.model.path={folder}/model", "platform=cpu")
    parts = ("reward.reward_manager.name=gsm8k", "tool_server.start=calculator")
    return composed(*files, *lengths, *of_model, *parts, CHAT, *overrides)


def check(config: DictConfig, **options: bool) -> None:
    check_setup(config, options_in(config), row_files(config), **options)


def own_manager(folder: Path, source: str, name: str) -> tuple[str, ...]:
    (folder / "manager.py").write_text(source)
    manager = f"{{source: importlib, name: {name}, module: {{path: {folder}/manager.py}}}}"
    return (f"reward.reward_manager={manager}",)


def test_a_training_that_is_right_goes_on_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = (f"{AGENT}.formats=[fenced]", f"{AGENT}.tool_prompt=system")
    with caplog.at_level(logging.WARNING, "verl_tool"):
        check(config_of(tmp_path, *options, template=PLAIN_TEMPLATE))
    assert not caplog.messages


def test_warnings_are_lines_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "verl_tool"):
        check(config_of(tmp_path))
    assert any("splits markers" in line and "[markers_are_tokens]" in line for line in caplog.messages)


@pytest.mark.parametrize("server_is_up", [True, False])
def test_an_error_ends_it_unless_the_checks_are_left_out(tmp_path: Path, server_is_up: bool) -> None:
    overrides = (f"{AGENT}.formats=[hermes]", f"{AGENT}.action_stop_tokens=['```output']")
    with pytest.raises(ConfigError, match=r"no call ends: formats=hermes.*\[calls_end\]\n.*doctor=false") as refused:
        check(config_of(tmp_path, *overrides), server_is_up=server_is_up)
    assert (f"--config {tmp_path}/refused.yaml" in str(refused.value)) == server_is_up
    assert (tmp_path / "refused.yaml").exists() == server_is_up
    assert not (tmp_path / "config.yaml").exists()
    check(config_of(tmp_path, *overrides, "doctor=false"), server_is_up=server_is_up)


@pytest.mark.parametrize("server_is_up", [True, False])
def test_the_loops_own_calls_are_not_looked_at_if_a_program_is_the_agent(tmp_path: Path, server_is_up: bool) -> None:
    overrides = (f"{AGENT}.formats=[hermes]", f"{AGENT}.action_stop_tokens=['```output']", "data.max_prompt_length=50")
    config = config_of(tmp_path, *overrides, "gateway.program.command=[python,agent.py,'{task}']")
    check(config, server_is_up=server_is_up)
    reads = own_manager(tmp_path, READS_PROGRAM, "ReadsProgram")
    check(config_of(tmp_path, *reads, "gateway.program.command=[agent]"), server_is_up=server_is_up)
    paid = config_of(tmp_path, *own_manager(tmp_path, PAYS_ALL, "PaysAll"), "gateway.program.command=[agent]")
    with pytest.raises(ConfigError, match="the answer '' scores like a right one"):
        check(paid, server_is_up=server_is_up)


def test_a_dry_run_looks_at_prompts_with_the_tools_that_a_server_would_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 0 of .*about the tools calculator.*max_prompt_length=50"):
        check(config_of(tmp_path, "data.max_prompt_length=50"), server_is_up=False)


@pytest.mark.parametrize("server", ["mcp", "mcp alone", "another's"])
@pytest.mark.parametrize("by", ["config", "rows", "nobody"])
def test_a_dry_run_knows_tools_that_only_a_server_can_tell_of_by_their_names(
    tmp_path: Path, server: str, by: str
) -> None:
    (tmp_path / "mcp.json").write_text('{"mcpServers": {"time": {"command": "mcp-server-time", "args": []}}}')
    mcp = f"tool_server.args=[--mcp,{tmp_path}/mcp.json]"
    of_server = {
        "mcp": [mcp],
        "mcp alone": [mcp, "tool_server.start="],
        "another's": ["tool_server.start=null", f"{AGENT}.tool_server_url=http://127.0.0.1:9"],
    }[server]
    told = [f"{AGENT}.tool_schemas=[mcp__time__now]"] if by == "config" else []
    rows = [row("7212", tools=["mcp__time__now"])] if by == "rows" else ROWS
    check(config_of(tmp_path, *of_server, *told, rows=rows), server_is_up=False)


@pytest.mark.parametrize("by", ["config", "rows"])
def test_a_dry_run_refuses_a_tool_that_the_training_s_own_server_lacks(tmp_path: Path, by: str) -> None:
    told = [f"{AGENT}.tool_schemas=[calculater]"] if by == "config" else []
    rows = [row("7212", tools=["calculater"])] if by == "rows" else ROWS
    with pytest.raises(ConfigError, match="the tool 'calculater' is unknown; known: calculator"):
        check(config_of(tmp_path, *told, rows=rows), server_is_up=False)


def test_a_dry_run_without_the_model_looks_at_the_rows_only(tmp_path: Path) -> None:
    bare = [{name: value for name, value in row("905").items() if name != "data_source"}]
    check(config_of(tmp_path, template=""), server_is_up=False)
    with pytest.raises(ConfigError, match="1 of 1 rows have no 'data_source'"):
        check(config_of(tmp_path, rows=bare, template=""), server_is_up=False)


def test_a_reward_that_a_constant_answer_gets_is_an_error(tmp_path: Path) -> None:
    config = config_of(tmp_path, *own_manager(tmp_path, PAYS_ALL, "PaysAll"))
    with pytest.raises(ConfigError, match="the answer '' scores like a right one on 4 of 4 rows"):
        check(config)


@pytest.mark.parametrize(
    ("source", "name", "lacks"), [(ENCODES, "Encodes", "'encode'"), (READS_UID, "ReadsUid", "'uid'")]
)
def test_a_reward_that_reads_what_only_a_training_has_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str, name: str, lacks: str
) -> None:
    with caplog.at_level(logging.WARNING, "verl_tool"):
        check(config_of(tmp_path, *own_manager(tmp_path, source, name)))
    assert any("gives no score to" in line and lacks in line for line in caplog.messages)


def test_rows_need_no_gold_where_a_reward_model_alone_gives_the_scores(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "How many?"}]}]
    check(config_of(tmp_path, "reward.reward_model.enable=true", rows=rows))
    reads_gold = ("reward.reward_model.enable=true", "reward.custom_reward_function.path=score.py")
    with pytest.raises(ConfigError, match="1 of 1 rows have no 'reward_model'"):
        check(config_of(tmp_path, *reads_gold, rows=rows))


def test_a_server_that_does_not_tell_its_tools_is_no_finding(tmp_path: Path) -> None:
    inline = (f"{AGENT}.enable_mtrl=false", f"{AGENT}.action_stop_tokens=['```output']", f"{AGENT}.tool_schemas=none")
    nobody = ("tool_server.start=null", f"{AGENT}.tool_server_url=http://127.0.0.1:9")
    check(config_of(tmp_path, *inline, *nobody))


def test_a_file_of_rows_is_opened_once_for_all_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("data.train_batch_size=4", f"{AGENT}.tool_schemas=none", f"{AGENT}.formats=[hermes]")
    config = config_of(tmp_path, *options)
    opened = []

    class RecordingFile(parquet.ParquetFile):
        def __init__(self, source: Path) -> None:
            opened.append(source)
            super().__init__(source)

    monkeypatch.setattr(parquet, "ParquetFile", RecordingFile)
    files = main_ppo.check_data(config)
    attach_tool_descriptions(config, options_in(config), files)
    check_setup(config, options_in(config), files, server_is_up=False)
    assert opened == [tmp_path / "rows.parquet"]

"""The command on folders with real chat templates: what it shows, what it warns of, and how it ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from doctor_setups import row
from live_server import LiveServers
from template_models import WEATHER, save_model
from typer.testing import CliRunner

from verl_tool.doctor.doctor_cli import app
from verl_tool.servers.tools import load_tools

ONCE = ("--tool_call_max_retries", "0")
GRADES = pytest.mark.timeout(400)
"""Of tests whose command grades, in a process that imports torch and verl first."""
NATIVE = {"qwen3": "hermes", "llama3": "llama3", "mistral": "mistral", "glm": "glm"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each family."""
    folder = tmp_path_factory.mktemp("models")
    for name in NATIVE:
        save_model(folder / name, name)
    return folder


@dataclass(frozen=True)
class Said:
    """What the command wrote, and how it ended."""

    exit_code: int
    output: str

    @property
    def words(self) -> str:
        """However the lines are broken."""
        return " ".join(self.output.split())


def doctor(*arguments: object) -> Said:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Said(result.exit_code, result.output)


def weather(folder: Path) -> Path:
    path = folder / "weather.py"
    path.write_text(WEATHER)
    return path


@pytest.mark.parametrize("family", NATIVE)
def test_a_model_with_its_own_format_has_neither_errors_nor_warnings(family: str, models: Path, tmp_path: Path) -> None:
    options = ("--mtrl_role", "tool", "--formats", NATIVE[family], "--tool_type", weather(tmp_path))
    result = doctor("--model", models / family, *options)
    assert result.exit_code == 0, result.output
    for words in (
        "What the model sees first",
        f"{NATIVE[family]} finds a call of 'weather'",
        "The turn ends at the end token",
        "the call is valid",
        "the trajectory ends: answered",
        "0 errors, 0 warnings",
    ):
        assert words in result.words


def test_a_model_alone_is_shown_with_a_made_up_tool(models: Path) -> None:
    result = doctor("--model", models / "qwen3")
    assert result.exit_code == 0, result.output
    assert "(the tool's answer)" in result.words
    assert "warning: the chat template drops the model's thoughts" in result.words


def test_masks_and_tokens_stand_side_by_side(models: Path, tmp_path: Path) -> None:
    options = ("--mtrl_role", "tool", "--formats", "hermes", "--tool_type", weather(tmp_path))
    lines = doctor("--model", models / "qwen3", *options).output.splitlines()
    parts = [[part.strip() for part in line.split("│")[1:5]] for line in lines if line.startswith("│")]
    authors = [(part[0], part[1]) for part in parts if part[0]]
    assert authors == [("model", "1"), ("template", "0"), ("tool", "0"), ("template", "0"), ("model", "1")]
    assert parts[0][3].startswith("<tool_call>╎↵╎{")


def test_an_error_is_exit_code_1(models: Path) -> None:
    options = ("--formats", "llama3", "--action_stop_tokens", "</tool_call>")
    result = doctor("--model", models / "llama3", *options)
    assert result.exit_code == 1
    assert "error: no call ends: formats=llama3" in result.words


def test_a_template_of_one_s_own_takes_the_place_of_the_model_s(models: Path, tmp_path: Path) -> None:
    template = tmp_path / "refuses.jinja"
    template.write_text("{{ raise_exception('closed') }}")
    result = doctor("--model", models / "qwen3", "--chat_template", template)
    assert result.exit_code == 1
    assert "closed" in result.words
    assert "What the model sees first" not in result.words


@GRADES
def test_rows_and_reward_are_looked_at(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("verl")
    data, manager = tmp_path / "rows.jsonl", tmp_path / "pays.py"
    sent = {"extra_info": {"tools_kwargs": {"hint": "Danube"}}}
    data.write_text("".join(json.dumps(row(gold=gold) | sent) + "\n" for gold in ("Danube", "Rhine", "Elbe", "Po")))
    manager.write_text(
        "class Pays:\n    def __init__(self, *args, **kwargs): ...\n"
        "    async def run_single(self, data):\n"
        "        return {'reward_score': 1.0, 'reward_extra_info': {'acc': 1.0}}\n"
    )
    result = doctor("--model", models / "qwen3", "--data", data, "--reward_manager", manager, "--row", 3)
    assert result.exit_code == 1
    assert "warning: 1 of 3 rows send their gold answer" in result.words  # Po is too short to tell
    assert "error: the answer '' scores like a right one on 4 of 4 rows" in result.words


@GRADES
def test_the_command_reads_what_a_run_left(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl_loop import composed

    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row()) + "\n")
    files = (f"data.train_files={data}", f"data.val_files={data}", f"actor_rollout_ref.model.path={models}/mistral")
    agent = ("actor_rollout_ref.agent.enable_mtrl=true", "actor_rollout_ref.agent.formats=[hermes]")
    tools = ("tool_server.start=calculator", "reward.reward_manager.name=gsm8k", "platform=cpu")
    OmegaConf.save(composed(*files, *agent, *tools), tmp_path / "config.yaml")
    result = doctor("--config", tmp_path)
    assert "hermes finds a call of 'calculator'" in result.words
    assert "set formats=[mistral]" in result.words
    own = doctor("--config", tmp_path, "--formats", "mistral", "--mtrl_role", "tool")
    assert "mistral finds a call of 'calculator'" in own.words


@pytest.mark.parametrize(
    "server",
    [
        ("tool_server.start=null", "actor_rollout_ref.agent.tool_server_url=http://127.0.0.1:9"),
        ("tool_server.start=", "tool_server.args=[--mcp,servers.json]"),
    ],
    ids=["another's", "of MCP servers"],
)
def test_a_run_s_tools_are_known_from_its_config_where_its_server_is_gone(
    server: tuple[str, ...], models: Path, tmp_path: Path
) -> None:
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl_loop import composed

    from verl_tool.agent_loop.verl.tool_descriptions import as_setting

    files = ("data.train_files=[]", "data.val_files=[]", f"actor_rollout_ref.model.path={models}/mistral")
    config = composed(*server, *files, "actor_rollout_ref.agent.enable_mtrl=true", "platform=cpu")
    config.tool_server.tools = as_setting([tool.describe() for tool in load_tools("calculator")])
    OmegaConf.save(config, tmp_path / "config.yaml")
    result = doctor("--config", tmp_path / "config.yaml")
    assert result.exit_code == 0, result.output
    assert "calculator" in result.words
    assert "(the tool's answer)" in result.words


async def test_a_server_is_asked_and_called(models: Path, servers: LiveServers) -> None:
    import asyncio

    server = await servers.start(load_tools("calculator"))
    options = ("--tool_server_url", server.url, "--enable_mtrl")
    result = await asyncio.to_thread(doctor, "--model", models / "qwen3", *options)
    assert result.exit_code == 0, result.output
    assert "10.1" in result.words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model: give --model"),
        (("--model", "nowhere/at all"), "no tokenizer in 'nowhere/at all'"),
        (("--model", "MODELS/qwen3", "--tool_type", "nope"), "tool 'nope' is unknown"),
        (("--model", "MODELS/qwen3", "--data", "nope.parquet"), "there is no file nope.parquet"),
        (("--model", "MODELS/qwen3", "--data", "MODELS/qwen3/tokenizer.json", "--row", "9"), "9"),
        (("--model", "MODELS/qwen3", "--formats", "nope"), "format 'nope' is unknown"),
        (("--model", "MODELS/qwen3", "--tool_server_url", "http://127.0.0.1:9", *ONCE), "does not tell its tools"),
        (("--model", "MODELS/qwen3", "--tool_type", "finish", "--tool_server_url", "http://x"), "give just one"),
        (("--model", "MODELS/qwen3", "--tool_config", "x.json"), "give that too"),
        (("--model", "MODELS/qwen3", "--chat_template", "nope.jinja"), "--chat_template nope.jinja cannot be read"),
        (("--model", "MODELS/qwen3", "--chat_template_kwargs", "x"), "is no JSON"),
        (("--config", "nowhere"), "no config in nowhere"),
        (("--model", "MODELS/qwen3", "--min_turns", "99"), "min_turns=99 is above max_turns"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], words: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = doctor(*(each.replace("MODELS", str(models)) for each in arguments))
    assert result.exit_code == 2, result.output
    assert words in result.words
    assert "Traceback" not in result.words

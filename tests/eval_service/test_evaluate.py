"""A data set through an endpoint: scored as in training, resumed where it stopped."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_endpoint import CALL, MODEL, LiveEndpoint, live_endpoint
from run_folders import run_folder
from toy_environments import GuessEnvironment
from toy_tools import picture

pytest.importorskip("openai")
pytest.importorskip("verl")

from typer.testing import CliRunner

from eval_service import evaluate as program
from eval_service.evaluation.asking import Asking
from eval_service.evaluation.dataset import read_problems
from eval_service.evaluation.record import ABOUT, Record, read_records
from eval_service.evaluation.scoring import Scorer, TextTokenizer, reward_config
from eval_service.model.run_config import run_config
from eval_service.openai.image_reader import ImageReader
from verl_tool.agent_loop.verl.config import context_tokens
from verl_tool.agent_workers.reward_manager.grading.code_grader import CodeOptions, server_url
from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.content.parts import to_wire
from verl_tool.errors import ConfigError

pytestmark = pytest.mark.slow

RIGHT = {"reward_model": {"style": "rule", "ground_truth": "10.1"}}
WRONG = {"reward_model": {"style": "rule", "ground_truth": "11"}}


def data_file(tmp_path: Path, *changes: dict[str, Any]) -> Path:
    rows = [
        {"data_source": "calculator", "prompt": [{"role": "user", "content": f"{i}: What is 13.1-3?"}]} | change
        for i, change in enumerate(changes)
    ]
    path = tmp_path / "test.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def evaluation(tmp_path: Path, path: Path, live: LiveEndpoint, samples: int = 1) -> program.Evaluation:
    asking = Asking(f"{live.url}/v1", samples=samples, concurrency=8)
    return program.Evaluation(tuple(read_problems(path)), asking, tmp_path / "out", (1,), "test")


async def test_right_and_wrong_answers_are_told_apart_by_the_reward_manager(tmp_path: Path) -> None:
    path = data_file(tmp_path, RIGHT, WRONG, RIGHT)
    async with live_endpoint() as live:
        summary = await program.evaluate(evaluation(tmp_path, path, live), reward_config("calculator", {}), None)
    assert summary.accuracy.value == pytest.approx(2 / 3)
    assert summary.tools["SimpleCalculatorTool"].calls == 3
    assert summary.stops == {"answered": 3}
    records = list(read_records(tmp_path / "out/records.jsonl"))
    assert [(r.index, r.correct) for r in records] == [(0, True), (1, False), (2, True)]
    assert all(r.trajectory is not None for r in records)
    assert "| avg@1 | 66.7% [" in (tmp_path / "out/report.md").read_text()
    assert json.loads((tmp_path / "out/summary.json").read_text())["answers"] == 3


async def test_a_run_that_was_broken_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = data_file(tmp_path, RIGHT, WRONG, RIGHT, RIGHT)
    async with live_endpoint() as live:
        first = evaluation(tmp_path, path, live)
        first.folder.mkdir()
        records = await program.answers(first)
        lines = [r.to_json() for r in records[:2]]
        first.records_path.write_text("\n".join(lines) + "\n" + records[2].to_json()[:30])
        asked = len(live.engine.params)
        summary = await program.evaluate(first, reward_config("calculator", {}), None)
        assert len(live.engine.params) - asked == 2 * 2
    assert summary.answers == 4


async def test_an_answer_that_failed_is_asked_for_again(tmp_path: Path) -> None:
    path = data_file(tmp_path, RIGHT)
    async with live_endpoint() as live:
        this = evaluation(tmp_path, path, live)
        this.folder.mkdir()
        this.records_path.write_text(Record(0, 0, "any", error="no").to_json() + "\n")
        assert [r.error for r in await program.answers(this)] == [None]


@pytest.mark.parametrize("change", ["weights", "question", "sampling", "fewer samples"])
async def test_answers_of_another_evaluation_are_neither_taken_nor_lost(tmp_path: Path, change: str) -> None:
    path = data_file(tmp_path, RIGHT)
    async with live_endpoint(fingerprint="a") as live:
        first = evaluation(tmp_path, path, live, samples=2)
        await _answers(first)
    text = first.records_path.read_text()
    if change == "question":
        data_file(tmp_path, RIGHT | {"prompt": [{"role": "user", "content": "What is 1+1?"}]})
    async with live_endpoint(fingerprint="b" if change == "weights" else "a") as live:
        other = evaluation(tmp_path, path, live, samples=1 if change == "fewer samples" else 2)
        if change == "sampling":
            other = replace(other, asking=replace(other.asking, temperature=0.5))
        with pytest.raises(ConfigError, match="another evaluation"):
            await program.answers(other)
    assert first.records_path.read_text() == text


async def test_an_answer_that_does_not_come_counts_nowhere(tmp_path: Path) -> None:
    path = data_file(tmp_path, RIGHT, RIGHT | {"prompt": [{"role": "user", "content": "x" * 9000}]})
    async with live_endpoint() as live:
        summary = await program.evaluate(evaluation(tmp_path, path, live), reward_config("calculator", {}), None)
    assert (summary.accuracy.value, summary.answers, summary.errors) == (1.0, 1, 1)


async def test_a_row_without_tools_gets_none(tmp_path: Path) -> None:
    path = data_file(tmp_path, RIGHT | {"use_tool": False})
    async with live_endpoint() as live:
        (record,) = await _answers(evaluation(tmp_path, path, live))
    assert record.content == CALL
    assert record.usage["tool_calls"] == 0


async def test_workspaces_are_judged_by_the_verifiers_of_the_rows(tmp_path: Path) -> None:
    """The model copies a file; one of two rows wants just that."""
    rows = []
    script = b"cmp out.txt /tests/wanted; echo $((1 - $?)) > /logs/verifier/reward.txt"
    for wanted in (b"7", b"8"):
        tests = pack_files({"test.sh": PackedFile(script), "wanted": PackedFile(wanted)})
        truth = json.dumps({"files": tests, "timeout_seconds": 5})
        files = {"tools_kwargs": {"workspace_files": pack_files({"in.txt": PackedFile(b"7")})}}
        rows.append({"reward_model": {"style": "workspace_verifier", "ground_truth": truth}, "extra_info": files})
    call = "<bash>cat in.txt > out.txt</bash>"
    path = data_file(tmp_path, *rows)
    options = {"action_stop_tokens": ["</bash>"]}
    async with live_endpoint(
        lambda text: "done" if call in text else call, tools="bash_terminal", options=options
    ) as live:
        summary = await program.evaluate(evaluation(tmp_path, path, live), reward_config("terminal", {}), None)
    assert (summary.accuracy.value, summary.answers, summary.errors) == (0.5, 2, 0)
    records = list(read_records(tmp_path / "out/records.jsonl"))
    assert [(r.index, r.score, r.details["verified"]) for r in records] == [(0, 1.0, 1.0), (1, 0.0, 1.0)]
    assert records[0].usage["tool_calls"] == 1, "the verifier is none of the model's"


async def test_environments_judge_the_answers_of_their_rows(tmp_path: Path) -> None:
    """One of two rows has the secret that the model guesses in its second turn."""
    rows = [
        {
            "prompt": [{"role": "system", "content": "Guess."}],
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"tools_kwargs": {"environment": {"secret": secret}, "tools": []}},
            "max_turns": 2,
        }
        for secret in (7, 8)
    ]
    path = data_file(tmp_path, *rows)
    options = {"enable_mtrl": True, "action_stop_tokens": [], "tool_schemas": "auto"}
    environment = [GuessEnvironment()]
    async with live_endpoint(lambda text: "7" if "No." in text else "4", tools=environment, options=options) as live:
        summary = await program.evaluate(evaluation(tmp_path, path, live), reward_config("environment", {}), None)
        body = {"model": MODEL, "prompt": "Guess.", "extra_fields": {"environment": {"secret": 7}}}
        async with aiohttp.ClientSession() as session, session.post(f"{live.url}/v1/completions", json=body) as answer:
            assert (answer.status, "send a chat" in await answer.text()) == (400, True)
    assert (summary.accuracy.value, summary.answers, summary.errors) == (0.5, 2, 0)
    records = list(read_records(tmp_path / "out/records.jsonl"))
    assert [(r.index, r.score, r.details["env_steps"]) for r in records] == [(0, 1.0, 2.0), (1, 0.0, 2.0)]


async def _answers(this: program.Evaluation) -> list[Record]:
    this.folder.mkdir(exist_ok=True)
    return await program.answers(this)


async def test_an_endpoint_that_gives_no_trajectory_is_scored_by_its_text(tmp_path: Path) -> None:
    (problem,) = read_problems(data_file(tmp_path, RIGHT))
    scorer = Scorer(reward_config("calculator", {}), None)
    right = await scorer.score(Record(0, 0, "d", "It is Result=10.1<submit>"), problem)
    wrong = await scorer.score(Record(0, 0, "d", "It is Result=11<submit>"), problem)
    assert (right.correct, wrong.correct) == (True, False)


async def test_a_row_that_cannot_be_scored_is_told(tmp_path: Path) -> None:
    (problem,) = read_problems(data_file(tmp_path, {"reward_model": {"ground_truth": "no number"}}))
    record = await Scorer(reward_config("calculator", {})).score(Record(0, 0, "d", "Result=1<submit>"), problem)
    assert record.correct is None
    assert "no number" in (record.reward_fault or "")


@pytest.mark.parametrize("name", [None, "acecoder"])
def test_the_reward_of_a_run_has_the_run_s_options_and_the_server_that_is_given(
    tmp_path: Path, name: str | None
) -> None:
    folder = run_folder(
        tmp_path, "reward.reward_manager.name=acecoder", "+reward.reward_kwargs={binary:false,wrong:-2}"
    )
    reward = program._reward(name, '{"right": 3}', folder, "http://127.0.0.1:5999")
    manager = Scorer(reward)._manager
    assert (manager.options.binary, manager.options.wrong, manager.options.right) == (False, -2.0, 3.0)
    assert server_url(manager.options, reward) == "http://127.0.0.1:5999"


@pytest.mark.parametrize("name", [None, "acecoder", "mathcoder"])
def test_no_reward_asks_the_tool_server_that_ended_with_its_training(tmp_path: Path, name: str | None) -> None:
    started = "actor_rollout_ref.agent.tool_server_url=http://127.0.0.1:5811"  # as the trainer writes it down
    folder = run_folder(tmp_path, "reward.reward_manager.name=acecoder", started)
    with pytest.raises(ConfigError, match="give --tool_server_url"):
        Scorer(program._reward(name, "{}", folder))
    assert server_url(CodeOptions(), program._reward(name, "{}", folder, "http://h:1")) == "http://h:1"


@pytest.mark.parametrize("name", [None, "acecoder", "mathcoder"])
def test_a_tool_server_that_the_run_was_told_is_asked_again(tmp_path: Path, name: str | None) -> None:
    told = ("tool_server.start=null", "actor_rollout_ref.agent.tool_config.server_url=http://tools:5000")
    folder = run_folder(tmp_path, "reward.reward_manager.name=acecoder", *told)
    assert server_url(CodeOptions(), program._reward(name, "{}", folder)) == "http://tools:5000"


def test_another_reward_manager_than_the_run_s_has_its_own_options(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "reward.reward_manager.name=gsm8k", "+reward.reward_kwargs={flexible:true}")
    assert program._reward("torl", "{}", folder).reward.reward_kwargs == {}


def test_text_goes_through_the_tokenizer_unchanged() -> None:
    tokenizer = TextTokenizer()
    assert tokenizer.decode(tokenizer.encode("añ€😀")) == "añ€😀"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k", "2"], "--k 2 with --n 1"),
        (["--reward_manager", "nope"], "reward manager"),
        (["--reward_kwargs", "{"], "is no JSON"),
        ([], "does not tell its models"),
    ],
)
def test_what_is_wrong_is_told_and_ends_with_2(tmp_path: Path, arguments: list[str], words: str) -> None:
    given = ["--data", str(data_file(tmp_path, RIGHT)), "--base_url", "http://127.0.0.1:9/v1", "--out", str(tmp_path)]
    if "--reward_manager" not in arguments:
        given += ["--reward_manager", "calculator"]
    app = program.typer.Typer()
    app.command()(program.command)
    result = CliRunner().invoke(app, [*given, *arguments])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """Not the model with which it began is scored in its place."""
    folder = run_folder(tmp_path, "reward.reward_manager.name=calculator")
    (folder / "checkpoints").rename(folder / "moved")
    (folder / "moved/global_step_4/actor/huggingface").rename(folder / "model")
    given = ["--data", str(data_file(tmp_path, RIGHT)), "--base_url", "http://127.0.0.1:9/v1", "--out", str(tmp_path)]
    app = program.typer.Typer()
    app.command()(program.command)
    result = CliRunner().invoke(app, [*given, "--from_run", str(folder)])
    assert result.exit_code == 2, result.output
    told = " ".join(result.output.split())
    assert f"no checkpoint in {folder}" in told
    assert "name its tokenizer: --tokenizer" in told


async def test_the_endpoint_s_checkpoint_is_stored_with_the_answers(tmp_path: Path) -> None:
    path = data_file(tmp_path, RIGHT)
    async with live_endpoint(fingerprint="a") as live:
        await _answers(evaluation(tmp_path, path, live))
    about = json.loads((tmp_path / "out" / ABOUT).read_text())
    assert (about["fingerprint"], about["checkpoint"], about["samples"]) == ("a", None, 1)
    assert [record.problem for record in read_records(tmp_path / "out/records.jsonl")] == [
        read_problems(path)[0].digest
    ]


async def test_many_at_once_are_bounded_by_the_concurrency(tmp_path: Path) -> None:
    path = data_file(tmp_path, *[RIGHT] * 30)
    async with live_endpoint(pause=0.001) as live:
        this = evaluation(tmp_path, path, live, samples=2)
        records = await _answers(this)
        assert live.engine.most_running <= 8
    assert [r.key for r in records] == [(i, j) for i in range(30) for j in range(2)]
    await asyncio.sleep(0)


async def test_rows_with_images_are_asked_and_reported_with_what_the_model_saw(tmp_path: Path) -> None:
    one, two = picture(1, (8, 2)), picture(2, (6, 2))
    half = str(Path(__file__).parent / "data/half.py")
    asked = {"prompt": [{"role": "user", "content": "<image>or <image>?"}], "images": [to_wire(one), to_wire(two)]}
    path = data_file(tmp_path, RIGHT | asked, RIGHT)
    call = "<half>2</half>"
    options = {"enable_mtrl": True, "mtrl_role": "tool", "action_stop_tokens": ["</half>"]}
    async with live_endpoint(
        lambda text: "Result=10.1" if call in text else call,
        tools=half,
        options=options,
        image_reader=ImageReader(),
    ) as live:
        this = evaluation(tmp_path, path, live)
        with_images = replace(this, problems=this.problems[:1])
        summary = await program.evaluate(with_images, reward_config("calculator", {}), None)
        assert live.engine.seen == [[one, two], [one, two, picture(2, (3, 2))]]
        asked_again = await program.answers(with_images)
    assert len(live.engine.seen) == 2, "a known answer is not asked for again"
    assert (summary.accuracy.value, summary.errors) == (1.0, 0)
    (record,) = asked_again
    assert record.trajectory is not None
    seen = [segment.image for segment in record.trajectory.segments if segment.image]
    report = (tmp_path / "out/report.md").read_text()
    assert "## What the model saw in 1 of 1 problems with images" in report
    assert re.findall(r"!\[image\]\(images/(\w+)\.png\)", report) == seen
    for image in (one, two, picture(2, (3, 2))):
        assert (tmp_path / f"out/images/{image.sha256}.png").read_bytes() == image.data
    assert this.problems[0].digest != replace(this.problems[0], images=(two, one)).digest


# Agents


def test_the_agent_of_the_command_line_has_the_settings_of_the_run(tmp_path: Path) -> None:
    trained = ("gateway.program.command=[a]", "gateway.program.seconds=5", "gateway.session.max_turns=3")
    folder = run_folder(tmp_path, *trained)
    of_run = program._agent(None, "{}", folder)
    assert of_run is not None
    assert (of_run.program.command, of_run.program.seconds, of_run.session.max_turns) == (("a",), 5.0, 3)
    options = '{"program": {"keep_files": ["x"]}, "session": {"policy": {"thoughts": "sent"}}}'
    assert of_run.program.context_tokens == context_tokens(run_config(folder).actor_rollout_ref.rollout)
    in_python = run_folder(tmp_path / "python", f"gateway.program.python={__file__}:run_folder")
    replaced = program._agent("sh", "{}", in_python)
    assert replaced is not None
    assert (replaced.program.command, replaced.program.python) == (("sh",), None)
    other = program._agent("sh -c 'echo ${HOME}' {task}", options, folder)
    assert other is not None
    assert other.program.command == ("sh", "-c", "echo ${HOME}", "{task}")
    assert (other.program.seconds, other.program.keep_files) == (5.0, ("x",))
    assert (other.session.max_turns, other.session.policy.thoughts, other.session.policy.edited) == (3, "sent", "adopt")


@pytest.mark.parametrize(
    ("agent", "options", "words"),
    [
        (None, '{"program": {"seconds": 5}}', "give --agent"),
        ("a", '{"program": {"second": 5}}', "gateway.program.second"),
        ("pi", '{"program": {"install": "/none"}}', "install_agents"),
    ],
)
def test_settings_of_no_agent_are_named(agent: str | None, options: str, words: str) -> None:
    assert program._agent(None, "{}", None) is None
    with pytest.raises(ConfigError, match=re.escape(words)):
        program._agent(agent, options, None)


def test_an_agent_needs_a_tokenizer(tmp_path: Path) -> None:
    arguments = ["--data", str(data_file(tmp_path, RIGHT)), "--reward_manager", "calculator", "--agent", "a"]
    app = program.typer.Typer()
    app.command()(program.command)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "give --tokenizer" in result.output

"""The loop as verl drives it: verl's own worker class, a real tokenizer and a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from live_server import LiveServers  # noqa: E402
from toy_environments import GuessEnvironment  # noqa: E402
from toy_model import ToyTokenizer  # noqa: E402
from transfer_queue.utils.serial_utils import decode, encode  # noqa: E402
from verl.experimental.agent_loop.agent_loop import DictConfigWrap  # noqa: E402
from verl.utils.dataset.rl_dataset import RLHFDataset  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402
from verl_loop import ScriptedEngine, composed, loop_of, make_loop, make_tokenizer  # noqa: E402

from verl_tool.agent_loop.generators.verl_generator import EngineUse  # noqa: E402
from verl_tool.agent_loop.row import VALIDATION  # noqa: E402
from verl_tool.agent_loop.trajectory import (  # noqa: E402
    DELEGATED,
    RECORD_PLACES,
    ROW_REWARDS,
    Author,
    Excluded,
    RowContext,
    Segment,
    StopReason,
    Trajectory,
)
from verl_tool.agent_loop.verl.agent_loop import VerlToolAgentLoop, as_verl_outputs  # noqa: E402
from verl_tool.agent_loop.verl.tool_descriptions import as_setting  # noqa: E402
from verl_tool.content.packed_files import PackedFile, pack_files  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402


async def test_a_row_without_tools():
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(tokenizer, "42")
    loop = make_loop(tokenizer, engine, "actor_rollout_ref.agent.enable_agent=false")
    gold = {"ground_truth": "42"}
    asked = [{"role": "user", "content": "6*7?"}]
    output = await loop.run(
        {"temperature": 1.0}, raw_prompt=asked, index=3, data_source="sums", reward_model=gold, priority=9
    )
    assert tokenizer.decode(output.prompt_ids) == "6*7?"
    assert tokenizer.decode(output.response_ids) == "42"
    assert output.response_mask == [1, 1]
    assert output.response_logprobs == [-0.5, -0.5]
    assert engine.asked[0][3] == 9
    record = output.extra_fields["trajectory"]
    assert record.extra == {"index": 3, "data_source": "sums"}
    assert record.stop is StopReason.ANSWERED


@pytest.mark.parametrize(("use_v1", "same"), [("false", [0, 1]), ("true", [])])
async def test_a_sample_has_a_seed_of_its_own_in_each_run(use_v1: str, same: list[int]):
    """The older trainer draws `uid` anew in each run; a column of the data may be called `session_id`."""
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(tokenizer, *["42"] * 4)
    loop = make_loop(
        tokenizer,
        engine,
        *("actor_rollout_ref.agent.enable_agent=false", "deterministic=true", f"trainer.use_v1={use_v1}"),
    )
    prompt = [{"role": "user", "content": "6*7?"}]
    for run in ("once", "again"):
        for sample in (0, 1):
            await loop.run({}, raw_prompt=prompt, priority=sample, uid=f"{run}-row", session_id=sample)
    seeds = [asked[2]["seed"] for asked in engine.asked]
    assert seeds[0] != seeds[1]
    assert [i for i in (0, 1) if seeds[i] == seeds[i + 2]] == same


async def test_loops_of_one_worker_share_an_episode():
    tokenizer = make_tokenizer()
    engine, other = ScriptedEngine(tokenizer), ScriptedEngine(tokenizer)
    no_tools = "actor_rollout_ref.agent.enable_agent=false"
    loops = [make_loop(tokenizer, e, no_tools) for e in (engine, engine, other)]
    assert loops[0]._worker.episode is loops[1]._worker.episode
    assert loops[0]._worker.episode is not loops[2]._worker.episode


async def test_a_tokenizer_need_not_have_the_markers_of_the_model_s_family():
    """verl 0.9.1 tells the family; its own loops ask a Qwen model's tokenizer for <|im_end|>."""
    config = composed("actor_rollout_ref.agent.enable_agent=false")
    tokenizer = make_tokenizer()
    loop = VerlToolAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=ScriptedEngine(tokenizer, "42"),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        hf_model_type="qwen2",
    )
    output = await loop.run({}, raw_prompt=[{"role": "user", "content": "6*7?"}])
    assert tokenizer.decode(output.response_ids) == "42"


async def test_nothing_of_the_gold_answer_reaches_the_server():
    """The server is nobody here: what matters is the request that the client would send, seen in the record."""
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(tokenizer, "<request><calculator>6*7<call>")
    loop = make_loop(
        tokenizer,
        engine,
        "actor_rollout_ref.agent.action_stop_tokens=['<call>']",
        "actor_rollout_ref.agent.tool_server_url=http://127.0.0.1:9",
        "actor_rollout_ref.agent.tool_call_max_retries=0",
    )
    row = {"reward_model": {"ground_truth": "SECRET"}, "extra_info": {"solution": "SECRET"}}
    output = await loop.run({}, raw_prompt=[{"role": "user", "content": "6*7?"}], tools_kwargs={"unit": "m"}, **row)
    record = output.extra_fields["trajectory"].to_json()
    assert "SECRET" not in record
    assert '"stop":"fault"' in record
    assert output.extra_fields["excluded_from_group"] is True
    assert not any(output.response_mask)
    written = len("<request><calculator>6*7<call>")
    assert [sum(output.extra_fields[name]) for name in ("action_mask", "turn_ids")] == [written, written]


async def test_a_row_and_a_validation_have_their_own_limits(servers: LiveServers):
    server = await servers.start(load_tools("calculator"))
    tokenizer, call = make_tokenizer(), "<request><calculator>6*7<call>"
    engine = ScriptedEngine(tokenizer, *[call] * 20)
    limits = ("max_turns=1", "val_max_turns=2", "val_max_response_length=200", "max_response_length=40")
    loop = make_loop(
        tokenizer,
        engine,
        "actor_rollout_ref.agent.action_stop_tokens=['<call>']",
        f"actor_rollout_ref.agent.tool_server_url={server.url}",
        *(f"actor_rollout_ref.agent.{limit}" for limit in limits),
    )

    async def calls(**row):
        output = await loop.run({}, raw_prompt=[{"role": "user", "content": "6*7?"}], **row)
        record = output.extra_fields["trajectory"]
        return len(record.calls), record.stop

    # A call and its answer are over 40 tokens of a byte each.
    assert await calls() == (1, StopReason.MAX_RESPONSE_LENGTH)
    assert await calls(max_turns=float("nan")) == (1, StopReason.MAX_RESPONSE_LENGTH)
    assert await calls(max_turns=0) == (0, StopReason.MAX_TURNS)
    assert await calls(**{VALIDATION: True}) == (2, StopReason.MAX_TURNS)
    assert await calls(max_turns=1, **{VALIDATION: True}) == (1, StopReason.MAX_TURNS)
    with pytest.raises(ConfigError, match="row 8 of the data: max_turns is -1"):
        await calls(max_turns=-1, index=8)


async def test_a_row_brings_files_and_its_verifier_judges_what_is_left(servers: LiveServers):
    server = await servers.start(load_tools("bash_terminal", shared={"workers": 1, "warm_modules": ()}))
    tokenizer = make_tokenizer()
    loop = make_loop(
        tokenizer,
        ScriptedEngine(tokenizer, "<bash>cat in.txt > out.txt</bash>", "done"),
        "actor_rollout_ref.agent.action_stop_tokens=['</bash>']",
        f"actor_rollout_ref.agent.tool_server_url={server.url}",
    )
    script = "cmp out.txt /tests/wanted && echo 1 > /logs/verifier/reward.txt"
    tests = pack_files({"test.sh": PackedFile(script.encode()), "wanted": PackedFile(b"7")})
    row = {
        "tools_kwargs": {"workspace_files": np.array([{"path": "in.txt", "text": "7", "base64": None}], dtype=object)},
        "reward_model": {
            "style": "workspace_verifier",
            "ground_truth": json.dumps({"files": tests, "timeout_seconds": 5}),
        },
    }
    output = await loop.run({}, raw_prompt=[{"role": "user", "content": "Copy it."}], **row)
    record = output.extra_fields["trajectory"]
    assert record.verdict is not None
    assert (record.verdict.reward, record.verdict.fault) == (1.0, None)
    for column, told in (
        ("tools_kwargs", "tools_kwargs.workspace_files"),
        ("reward_model", "the verification at files"),
    ):
        wrong = {
            "tools_kwargs": {"workspace_files": "%"},
            "reward_model": {"style": "workspace_verifier", "ground_truth": '{"files": "%"}'},
        }
        with pytest.raises(ConfigError, match=f"row 4 of the data: {told}"):
            await loop.run({}, raw_prompt=[{"role": "user", "content": "x"}], index=4, **{**row, column: wrong[column]})


async def test_a_row_begins_in_its_environment_which_judges_it(servers: LiveServers):
    server = await servers.start([GuessEnvironment()])
    tokenizer = make_tokenizer()
    config = composed(
        "data.max_response_length=64",
        "actor_rollout_ref.agent.enable_mtrl=true",
        f"actor_rollout_ref.agent.tool_server_url={server.url}",
    )
    config.tool_server.tools = as_setting([GuessEnvironment().describe()])
    loop = loop_of(config, tokenizer, ScriptedEngine(tokenizer, "4", "7"))
    row = {
        "raw_prompt": [{"role": "system", "content": "Be brief."}],
        "tools_kwargs": {"environment": json.dumps({"secret": 7, "below": 9})},
        "reward_model": {"style": "environment", "ground_truth": ""},
    }
    output = await loop.run({}, **row)
    record = output.extra_fields["trajectory"]
    assert "below 9" in tokenizer.decode(output.prompt_ids)
    assert [call.observation for call in record.turn_calls] == ["No.", "Right!"]
    assert (record.stop, record.verdict.score) == (StopReason.TOOL_DONE, 1.0)
    assert sum(output.response_mask) == sum(len(s.tokens) for s in record.segments if s.author is Author.MODEL)
    with pytest.raises(ConfigError, match=r"row 4 of the data: tools_kwargs.environment is '\[1\]'"):
        await loop.run({}, **{**row, "tools_kwargs": {"environment": "[1]"}}, index=4)


def test_versions_are_noted_over_all_turns():
    use = EngineUse()
    for version in (4, 5, 7):
        use.update(TokenOutput(token_ids=[1], extra_fields={"min_global_steps": version, "max_global_steps": version}))
    assert (use.first_version, use.last_version) == (4, 7)


def test_a_trajectory_without_tokens_still_fills_a_row():
    empty = Trajectory("t", (Segment(Author.PROMPT, (1,)),), StopReason.FAULT, excluded=Excluded.FAULT)
    [output] = as_verl_outputs(empty, EngineUse(), ToyTokenizer())
    assert (len(output.response_ids), output.response_mask, output.response_logprobs) == (1, [0], [0.0])
    assert output.as_dict()["action_mask"].tolist() == output.as_dict()["turn_ids"].tolist() == [0]


@pytest.mark.parametrize("asked", [True, False])
def test_all_rows_of_a_batch_have_log_probs_or_none(asked):
    """verl joins the column by its first row, which may be a trajectory without any token."""
    prompt = Segment(Author.PROMPT, (1,))
    written = Segment(Author.MODEL, (2, 3), (-1.0, -1.0) if asked else None, "ab")
    outputs = [
        as_verl_outputs(
            Trajectory("t", segments, StopReason.ANSWERED), EngineUse(), ToyTokenizer(), with_log_probs=asked
        )[0]
        for segments in ((prompt,), (prompt, written), (prompt, Segment(Author.TOOL, (4,), text="x")))
    ]
    lengths = [None if output.response_logprobs is None else len(output.response_logprobs) for output in outputs]
    assert lengths == ([1, 2, 1] if asked else [None] * 3)


def test_the_mask_of_verl_is_that_of_the_loss():
    segments = (Segment(Author.PROMPT, (1,)), Segment(Author.MODEL, (2, 3), (-1.0, -1.0), "ab"))
    counted = Trajectory("t", segments, StopReason.ANSWERED)
    overlong = Trajectory("t", segments, StopReason.MAX_TURNS, excluded=Excluded.OVERLONG)
    assert as_verl_outputs(counted, EngineUse(), ToyTokenizer())[0].response_mask == [1, 1]
    [output] = as_verl_outputs(overlong, EngineUse(), ToyTokenizer())
    assert output.response_mask == [0, 0]
    # It stays in its group's baseline: the policy is to blame for it.
    assert output.extra_fields["excluded_from_group"] is False


def test_the_main_agents_row_is_the_last_and_carries_the_record():
    """It is so for a rollout that ended in a sub-agent, too."""

    def model(token: int, **place: int) -> Segment:
        return Segment(Author.MODEL, (token,), (-1.0,), "x", **place)

    prompt, contexts = Segment(Author.PROMPT, (1,)), (RowContext((7, 8), DELEGATED), RowContext((9,), DELEGATED))
    written = (model(2), model(3, row=1, agent=1), model(4), model(5, row=2, agent=2))
    rollout = Trajectory("t", (prompt, *written), StopReason.TOOL_DONE, contexts=contexts)
    outputs = as_verl_outputs(rollout, EngineUse(), ToyTokenizer())
    assert [output.prompt_ids for output in outputs] == [[7, 8], [9], [1]]
    assert [output.response_ids for output in outputs] == [[3], [5], [2, 4]]
    assert [output.extra_fields["turn_ids"] for output in outputs] == [[1], [2], [1, 2]]
    assert [output.extra_fields[RECORD_PLACES] for output in outputs] == [[(1, 1)], [(3, 1)], [(0, 1), (2, 1)]]
    assert [output.is_final for output in outputs] == ["trajectory" in output.extra_fields for output in outputs]
    assert [output.is_final for output in outputs] == [False, False, True]


def test_the_record_crosses_transfer_queue_as_it_is():
    segments = (Segment(Author.PROMPT, (1,)), Segment(Author.MODEL, (2, 3), (-1.0, -float("inf")), "ab"))
    rollout = Trajectory("t", segments, StopReason.ANSWERED)
    [output] = as_verl_outputs(rollout, EngineUse(), ToyTokenizer())
    assert output.extra_fields["trajectory"] == rollout
    [row] = decode(encode([output.as_dict()["extra_fields"]]))
    assert Trajectory.from_json(row["trajectory"]) == rollout
    assert not {"action_mask", "turn_ids"} & row.keys(), "they are columns, and slow as lists"


def rewards_of(outputs: Sequence[Any], told: dict[str, Any]) -> list[list[float]]:
    """Of each row the reward of each token, as verl stores a rollout with the reward 1."""
    for output in outputs:
        output.reward_score, output.extra_fields["reward_extra_info"] = 1.0, told
    return [output.as_dict()["rm_scores"].tolist() for output in outputs]


@pytest.mark.parametrize("validation", [False, True])
def test_rewards_of_rows_are_on_their_rows(validation: bool):
    def outputs() -> list[Any]:
        segments = (
            Segment(Author.PROMPT, (1,)),
            Segment(Author.MODEL, (2, 3), (-1.0, -1.0), "ab"),
            Segment(Author.MODEL, (4, 5), (-1.0, -1.0), "cd", row=1),
            Segment(Author.MODEL, (6,), (-1.0,), "e", row=2),
        )
        contexts = (RowContext((7, 8), "summarise"), RowContext((9,), "summarise"))
        rollout = Trajectory("t", segments, StopReason.ANSWERED, contexts=contexts)
        return as_verl_outputs(rollout, EngineUse(), ToyTokenizer(), validation=validation)

    whole = [[0.0, 0.0], [0.0, 0.0], [1.0]]
    assert rewards_of(outputs(), {"acc": 1.0}) == whole
    assert rewards_of(outputs(), {ROW_REWARDS: "[]"}) == whole
    by_row = [[0.0, 0.25], [0.0, -0.5], [1.25]]
    assert rewards_of(outputs(), {ROW_REWARDS: "[0.25, -0.5, 0.75]"}) == (whole if validation else by_row)


async def test_a_row_delegates_to_a_sub_agent_with_its_system_message():
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(tokenizer, "<delegate>count</delegate>", "seven", "done")
    settings = [
        "enable_mtrl=false",
        "subagents=true",
        "tool_schemas=none",
        "action_stop_tokens=['</delegate>']",
        "tool_server_url=http://127.0.0.1:9",
    ]
    loop = make_loop(tokenizer, engine, *(f"actor_rollout_ref.agent.{each}" for each in settings))
    asked = [{"role": "system", "content": "brief."}, {"role": "user", "content": "6*7?"}]
    child, main = await loop.run({"temperature": 1.0}, raw_prompt=asked, index=3)
    assert "brief." in tokenizer.decode(child.prompt_ids)
    assert "count" in tokenizer.decode(child.prompt_ids)
    assert "6*7?" not in tokenizer.decode(child.prompt_ids)
    assert tokenizer.decode(child.response_ids) == "seven"
    assert main.is_final

"""Other algorithms, and what a training outlives: real trainings, each with several modes in it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import mcp_run
import psutil
import pytest
from calculator_run import ACTOR, AGENT, ROLLOUT, SUMMARIES, TRAINS_ON_CPU, Calculator, Run, small_run
from safetensors.torch import load_file
from torch import Tensor, cat, equal, float32, no_grad, stack, tensor
from transformers import AutoModelForCausalLM
from turn_reference import row_of, share_within, written_out

from verl_tool.agent_loop.trajectory import Excluded, Trajectory, read_jsonl
from verl_tool.trainer.monitoring.metric_limits import FRESH_DIFF
from verl_tool.trainer.monitoring.token_records import tokens_of

pytestmark = [*TRAINS_ON_CPU, pytest.mark.e2e, pytest.mark.timeout(1500)]

SERVER = "verl_tool.servers.ray_serve"


def trajectories(run: Run, step: int) -> list[Trajectory]:
    return list(read_jsonl(run.folder / "trajectories" / f"step_{step}.jsonl"))


class TestInterrupted:
    """PPO with a critic (GAE), the actor trained by LoRA; stopped by Ctrl-C behind the first step, and gone on with."""

    @pytest.fixture(scope="class", params=["false", "true"], ids=["v0", "v1"])
    def run(
        self, request: pytest.FixtureRequest, calculator: Calculator, tmp_path_factory: pytest.TempPathFactory
    ) -> Run:
        model = "actor_rollout_ref.model"
        run = small_run(
            tmp_path_factory.mktemp("gae_lora"),
            calculator,
            *(
                f"trainer.use_v1={request.param}",
                "algorithm.adv_estimator=gae",
                f"critic.model.path={calculator.model}",
            ),
            *("critic.optim.lr=1e-3", "critic.ppo_micro_batch_size_per_gpu=64", "critic.ppo_mini_batch_size=8"),
            *(f"{model}.lora_rank=8", f"{model}.lora_alpha=16", f"{model}.target_modules=all-linear"),
            *(
                f"{ACTOR}.optim.lr=1e-2",
                "trainer.save_freq=1",
                "trainer.test_freq=-1",
                "trainer.val_before_train=false",
            ),
        )
        self.interrupt_behind_the_first_step(run)
        run.finish()
        return run

    def interrupt_behind_the_first_step(self, run: Run) -> None:
        metrics = run.folder / "metrics.jsonl"
        with run.started() as process:
            run.wait_until(lambda: metrics.exists() and 1 in run.steps(), process)
            assert run.interrupt(process) == 1
        assert "interrupted; run the same command again" in run.printed()
        assert run.processes() == {}

    def test_it_goes_on_where_it_was(self, run):
        latest = run.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
        assert latest.read_text() == "2"
        assert set(run.steps("metrics.1.jsonl")) == {1}
        assert set(run.steps()) == {2}

    def test_it_takes_up_the_data_where_it_was(self, run):
        """64 problems, 8 a step: the second step's are others."""
        first, second = ({t.extra["index"] for t in trajectories(run, step)} for step in (1, 2))
        assert len(first) == len(second) == 8
        assert not first & second

    def test_actor_and_critic_learn(self, run):
        for data in (run.steps("metrics.1.jsonl")[1], run.steps()[2]):
            assert data["actor/grad_norm"] > 0
            assert data["critic/grad_norm"] > 0
            assert data["critic/values/mean"] != 0

    def test_the_engine_has_the_adapter(self, run, calculator):
        """The second step's tokens were sampled with the adapter that came out of the first step's checkpoint."""
        saved = run.folder / "checkpoints" / "global_step_1" / "actor" / "huggingface"
        before, after = (load_file(folder / "model.safetensors") for folder in (calculator.model, saved))
        assert before.keys() == after.keys()
        grown = {name for name, weight in after.items() if not equal(weight, before[name])}
        assert "model.layers.0.self_attn.q_proj.weight" in grown
        assert "model.embed_tokens.weight" not in grown
        assert run.steps()[2]["training/rollout_probs_diff_max"] < 1e-4


class TestToolsOfAnMcpServer:
    """GRPO in chat mode on verl's newer trainer; the only tool is that of an MCP server in the sandbox."""

    ASKED = re.compile(
        r'<tool_call>\n{"name": "mcp__numbers__double", "arguments": {"number": ([1-9]\d{0,5})}}\n</tool_call>'
    )

    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        folder = tmp_path_factory.mktemp("mcp")
        with pytest.MonkeyPatch.context() as patch:
            start = mcp_run.prepare(folder, patch)
            run = small_run(folder / "run", start, *mcp_run.OVERRIDES, "trainer.use_v1=true")
            run.finish()
        return run

    def test_it_trains_on_its_answers(self, run):
        trained = run.steps()
        assert set(trained) == {1, 2}
        for data in trained.values():
            assert data["actor/grad_norm"] > 0
            assert data["training/rollout_probs_diff_max"] < 1e-4
            assert data["agent/tool_calls/mean"] > 0.2
            assert data["agent/tool_calls/faults"] == data["agent/faulted"] == 0

    def test_calls_are_answered_by_the_server(self, run):
        calls = [call for step in (1, 2) for t in trajectories(run, step) for call in t.calls]
        asked = [(int(n), call.observation) for call in calls for n in self.ASKED.findall(call.action)]
        assert len(asked) > 16
        assert all(str(2 * number) in answer for number, answer in asked)

    def test_nothing_is_left_running(self, run):
        assert run.processes() == {}
        assert not [p for p in psutil.process_iter(["cmdline"]) if str(run.folder.parent) in str(p.info["cmdline"])]


LENGTHS = """
from dataclasses import replace

from verl_tool.agent_workers.reward_manager.calculator import CalculatorRewardManager


class Lengths(CalculatorRewardManager):
    by_rows = True

    async def grade(self, sample):
        rows = tuple(len(row.response_ids) % 2 / 4 for row in sample.trajectory.rows)
        return replace(await super().grade(sample), score=len(sample.text) % 3 / 2, row_rewards=rows)
"""


def by_length(folder: Path) -> tuple[str, ...]:
    """Overrides for rewards, of rows too, that a tiny model's cut rollouts differ in."""
    manager = folder / "lengths.py"
    manager.write_text(LENGTHS)
    return (
        *("reward.reward_manager.source=importlib", "reward.reward_manager.name=Lengths"),
        f"reward.reward_manager.module.path={manager}",
    )


ASYNC_STEPS = 6
VERSIONS = "training/off_policy/trajectory_staleness_worst"


class TestAsynchronous:
    """Sampling ahead, few trajectories at once, so that some are interrupted; stopped by Ctrl-C behind the second step,
    and gone on with."""

    @pytest.fixture(scope="class", params=["colocate_async", "separate_async", "colocate_async, summaries"])
    def run(
        self, request: pytest.FixtureRequest, calculator: Calculator, tmp_path_factory: pytest.TempPathFactory
    ) -> Run:
        mode, _, summaries = request.param.partition(", ")
        folder = tmp_path_factory.mktemp(mode)
        run = small_run(
            folder / "run",
            calculator,
            *((*SUMMARIES, *by_length(folder)) if summaries else ()),
            *("trainer.use_v1=true", f"trainer.v1.trainer_mode={mode}", "algorithm.adv_estimator=grpo"),
            *(
                f"{AGENT}.max_concurrent_trajectories=24",
                f"{ROLLOUT}.max_num_seqs=16",
                f"{ACTOR}.optim.lr=1e-4",
            ),
            *(f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=32"),
            *(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32", f"trainer.total_training_steps={ASYNC_STEPS}"),
            *("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null", "trainer.val_before_train=false"),
            *("trainer.test_freq=-1", "max_staleness=2"),
        )
        metrics = run.folder / "metrics.jsonl"
        with run.started() as process:
            run.wait_until(lambda: metrics.exists() and 2 in run.steps(), process)
            assert run.interrupt(process) == 1
        run.finish()
        return run

    def steps(self, run: Run) -> dict[int, dict[str, float]]:
        return run.steps("metrics.1.jsonl") | run.steps()

    def test_it_trains_within_the_bound_and_corrects(self, run):
        trained = self.steps(run)
        assert set(trained) == set(range(1, ASYNC_STEPS + 1))
        for data in trained.values():
            assert data["actor/grad_norm"] > 0
            assert 0 <= data[f"{VERSIONS}/mean"] <= data[f"{VERSIONS}/max"] <= 2
            assert 0 < data["rollout_corr/rollout_is_eff_sample_size"] <= 1 + 1e-5
            assert data["rollout_corr/rollout_is_max"] <= 2
            assert data.get(f"{FRESH_DIFF}_max", 0) < 1e-4
        assert max(data[f"{VERSIONS}/max"] for data in trained.values()) > 0
        assert any(f"{FRESH_DIFF}_max" in data for data in trained.values())

    def test_each_token_has_the_probability_of_the_weights_that_its_record_names(self, run, calculator):
        """The checkpoints are asked. A token of an interrupted trajectory is one of those of its span."""
        models = Versions(run, calculator)
        spans, newest_versions = set(), set()
        for step in range(1, ASYNC_STEPS + 1):
            for line, record in enumerate(trajectories(run, step)):
                oldest, newest = record.extra["versions"]
                spans.add(newest - oldest)
                newest_versions.add(newest)
                mask = tensor(record.loss_mask).bool()
                sampled = tensor(record.response_log_probs)[mask]
                known = stack([models.log_probs(v, record)[mask] for v in range(oldest, newest + 1)])
                assert (known - sampled).abs().min(dim=0).values.max() < 1e-3
                trained = tensor(tokens_of(run.folder / "trajectories" / f"step_{step}.jsonl", line)["log_probs"])
                assert (models.log_probs(step - 1, record) - trained)[mask].abs().max() < 1e-3
        assert len(newest_versions) > 1
        # Separate engines may have finished all that they were given when their weights change.
        assert max(spans) > 0 or "trainer.v1.trainer_mode=separate_async" in run.overrides

    def test_groups_are_whole(self, run):
        for step in range(1, ASYNC_STEPS + 1):
            groups = [record.extra["group"] for record in trajectories(run, step)]
            assert {groups.count(group) for group in groups} == {8}
            assert len(set(groups)) == 8

    def test_nothing_is_left_running(self, run):
        assert run.processes() == {}


class Versions:
    """The weights of a run by the number of steps before them."""

    def __init__(self, run: Run, start: Calculator) -> None:
        self._run, self._start = run, start
        self._models: dict[int, Any] = {}

    @no_grad()
    def log_probs(self, version: int, record: Trajectory) -> Tensor:
        """Of each token behind the prompt. [response_length]"""
        if version not in self._models:
            saved = self._run.folder / "checkpoints" / f"global_step_{version}" / "actor" / "huggingface"
            # verl names bfloat16 in the config of a checkpoint, whatever its weights are.
            folder = saved if version else self._start.model
            self._models[version] = AutoModelForCausalLM.from_pretrained(folder, dtype=float32)
        return cat([self._of_row(self._models[version], row) for row in record.rows])

    @staticmethod
    def _of_row(model: Any, row: Trajectory) -> Tensor:
        ids = tensor([[*row.prompt_ids, *row.response_ids]])
        logits = model(ids).logits[0, len(row.prompt_ids) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0]


class TestTurns:
    """MT-GRPO on both of verl's trainers, with a reward manager of a user's own that rewards turns."""

    MANAGER = """
from dataclasses import replace

from verl_tool.agent_workers.reward_manager.calculator import CalculatorRewardManager


class Turns(CalculatorRewardManager):
    by_turns = True

    async def grade(self, sample):
        turns = tuple(len(call.action) % 3 / 2 for call in sample.trajectory.turn_calls)
        return replace(await super().grade(sample), turn_rewards=turns)
"""

    @pytest.fixture(scope="class", params=["false", "true"], ids=["v0", "v1"])
    def run(
        self, request: pytest.FixtureRequest, calculator: Calculator, tmp_path_factory: pytest.TempPathFactory
    ) -> Run:
        folder = tmp_path_factory.mktemp(f"turns_{request.param}")
        manager = folder / "turns.py"
        manager.write_text(self.MANAGER)
        run = small_run(
            folder / "run",
            calculator,
            *(f"trainer.use_v1={request.param}", "algorithm.adv_estimator=mt_grpo", "algorithm.mt_grpo.discount=0.5"),
            *("reward.reward_manager.source=importlib", "reward.reward_manager.name=Turns"),
            *(f"reward.reward_manager.module.path={manager}", "trainer.val_before_train=false"),
            *("trainer.save_freq=-1", "trainer.test_freq=-1"),
        )
        run.finish()
        return run

    def test_it_trains(self, run):
        trained = run.steps()
        assert set(trained) == {1, 2}
        for data in trained.values():
            assert data["actor/grad_norm"] > 0
            assert data["training/rollout_probs_diff_max"] < 1e-4

    def test_the_advantages_are_those_of_the_equation(self, run):
        """As far as a metric made from the trainer's own tensor tells: it would be 0 were they alike in all turns."""
        for step, data in run.steps().items():
            records = trajectories(run, step)
            rewards = [json.loads(t.extra["reward_extra_info"]["turn_rewards"]) for t in records]
            rows = [row_of(*each) for each in zip(records, rewards, strict=True)]
            expected = share_within(rows, written_out(rows, discount=0.5))
            assert expected > 0.01
            assert data["agent/turn_advantage/variance_share"] == pytest.approx(expected, abs=1e-3)
            first = [turns[0] for turns in rewards if turns]
            assert data["agent/turn_reward/1"] == pytest.approx(sum(first) / len(rows))


class TestRowsPerRollout:
    """A model that summarises its context: rollouts of several rows, with GRPO and with a critic."""

    @pytest.fixture(scope="class", params=["grpo", "gae"])
    def run(
        self, request: pytest.FixtureRequest, calculator: Calculator, tmp_path_factory: pytest.TempPathFactory
    ) -> Run:
        folder = tmp_path_factory.mktemp(f"rows_{request.param}")
        run = small_run(
            folder / "run",
            calculator,
            *by_length(folder),
            *(f"algorithm.adv_estimator={request.param}", "trainer.use_v1=true", "trainer.val_before_train=false"),
            *SUMMARIES,
            *(f"critic.model.path={calculator.model}", "critic.ppo_micro_batch_size_per_gpu=8"),
            *("critic.ppo_mini_batch_size=${actor_rollout_ref.actor.ppo_mini_batch_size}", "token_records_every=1"),
            *("trainer.save_freq=-1", "trainer.test_freq=-1"),
        )
        run.finish()
        return run

    def test_it_trains_rollouts_of_several_rows(self, run):
        trained = run.steps()
        assert set(trained) == {1, 2}
        assert max(data.get("training/rows_per_rollout/max", 1) for data in trained.values()) > 1
        for data in trained.values():
            assert data["actor/grad_norm"] > 0
            assert data["training/rollout_probs_diff_max"] < 1e-4

    def test_each_rollout_is_one_record_whose_tokens_are_known(self, run):
        several = 0
        for step in run.steps():
            records = trajectories(run, step)
            for line, record in enumerate(records):
                known = tokens_of(run.folder / "trajectories" / f"step_{step}.jsonl", line)
                assert len(known["advantages"]) == len(record.response_ids)
                assert known["mask"].tolist() == record.loss_mask
                # What the trainer makes of a row's context is what the engine sampled from.
                ours = [p for p, m in zip(known["log_probs"], record.response_mask, strict=True) if m]
                engine = [p for p, m in zip(record.response_log_probs or (), record.response_mask, strict=True) if m]
                assert ours == pytest.approx(engine, abs=1e-3)
                several += len(record.rows) > 1
                told = record.extra["reward_extra_info"]
                assert len(json.loads(told["row_rewards"])) == len(record.rows)
                assert record.reward == pytest.approx(told["base_score"] + sum(json.loads(told["row_rewards"])))
        assert several


class TestSubagents:
    """Each call of the model starts a sub-agent, whose turns are a row of their own."""

    FORMAT = """
from verl_tool.formats import Call


class Delegating:
    name, stop, observation = "delegating", ("<call>",), None

    def markers(self):
        return ("<call>",)

    def find_calls(self, text):
        task, mark, _ = text.partition("<call>")
        return [Call("delegate", task, 0, len(task + mark), self)] if mark else []

    def render(self, output, call=None):
        return output

    def usage(self, tools):
        return ""


FORMAT = Delegating()
"""

    @pytest.fixture(scope="class")
    def run(self, calculator: Calculator, tmp_path_factory: pytest.TempPathFactory) -> Run:
        folder = tmp_path_factory.mktemp("subagents")
        written = folder / "delegating.py"
        written.write_text(self.FORMAT)
        run = small_run(
            folder / "run",
            calculator,
            *by_length(folder),
            *("algorithm.adv_estimator=grpo", "trainer.use_v1=true", "trainer.val_before_train=false"),
            *(f"{AGENT}.subagents=true", f"{AGENT}.formats=['{written}']", f"{AGENT}.tool_schemas=none"),
            *(f"{AGENT}.max_subagents=1", f"{AGENT}.action_stop_tokens=['<call>']", "token_records_every=1"),
            "doctor=false",  # it refuses a format in which no tool is called
            *("trainer.save_freq=-1", "trainer.test_freq=2"),
        )
        run.finish()
        return run

    def test_it_trains(self, run):
        for data in run.steps().values():
            assert data["actor/grad_norm"] > 0
            assert data["training/rows_per_rollout/max"] > 1
            assert data["training/rollout_probs_diff_max"] < 1e-4

    def test_a_sub_agents_row_is_trained_with_its_rollout(self, run):
        agents = set()
        for step in run.steps():
            for line, record in enumerate(trajectories(run, step)):
                advantages = tokens_of(run.folder / "trajectories" / f"step_{step}.jsonl", line)["advantages"]
                written = [a for a, m in zip(advantages, record.response_mask, strict=True) if m]
                # The estimator gives all tokens of a rollout one advantage, whoever wrote them.
                assert written == pytest.approx([written[0]] * len(written), abs=1e-5)
                agents |= {segment.agent for segment in record.segments}
        assert agents == {0, 1}


class TestServerKilled:
    """REINFORCE++ on verl's newer trainer, groups without signal filtered out; the tool server killed meanwhile."""

    @pytest.fixture(scope="class")
    def run(self, calculator: Calculator, tmp_path_factory: pytest.TempPathFactory) -> Run:
        run = small_run(
            tmp_path_factory.mktemp("reinforce"),
            calculator,
            *("trainer.use_v1=true", "algorithm.adv_estimator=reinforce_plus_plus"),
            *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"),
            *("algorithm.filter_groups.max_num_gen_batches=20", "trainer.val_before_train=false"),
            *(f"{AGENT}.tool_call_timeout=180", f"{AGENT}.tool_call_max_retries=20", f"{ACTOR}.optim.lr=1e-4"),
        )
        with run.started() as process:
            run.wait_until((run.folder / "trajectories" / "step_1.jsonl").exists, process)
            kill(server_of(run))
            assert process.wait(900) == 0, run.printed()[-8000:]
        return run

    def test_it_trains_to_the_end(self, run):
        trained = run.steps()
        assert set(trained) == {1, 2}
        for data in trained.values():
            assert data["actor/grad_norm"] > 0
            assert data["training/rollout_probs_diff_max"] < 1e-4

    def test_only_groups_with_a_signal_are_trained_on(self, run):
        for step in (1, 2):
            groups: dict[int, list[Trajectory]] = {}
            for trajectory in trajectories(run, step):
                groups.setdefault(trajectory.extra["index"], []).append(trajectory)
            assert len(groups) == 8
            for group in groups.values():
                assert len({t.reward for t in group}) > 1 or any(t.fault for t in group)

    def test_the_server_was_started_again(self, run):
        assert "the tool server died (signal 9); starting it again" in run.printed()

    def test_what_faulted_is_left_out(self, run):
        for trajectory in trajectories(run, 1) + trajectories(run, 2):
            assert (trajectory.fault is not None) == (trajectory.excluded is Excluded.FAULT)
        assert run.steps()[2]["agent/faulted"] < 0.5

    def test_nothing_is_left_running(self, run):
        assert run.processes() == {}


def server_of(run: Run) -> psutil.Process:
    """The process that the training watches."""
    found = [psutil.Process(pid) for pid, command in run.processes().items() if f"-m {SERVER}" in command]
    pids = {process.pid for process in found}
    (server,) = (process for process in found if process.ppid() not in pids)
    return server


def kill(process: psutil.Process) -> None:
    """At once, and all that it started."""
    for one in [process, *process.children(recursive=True)]:
        os.kill(one.pid, signal.SIGKILL)

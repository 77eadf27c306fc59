"""What a config names is looked at before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from verl_loop import composed  # noqa: E402

from verl_tool.agent_loop.options import EpisodeOptions  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.trainer import config_validation  # noqa: E402
from verl_tool.trainer.config_validation import check_parts, missing_files  # noqa: E402
from verl_tool.trainer.ppo.turns import mt_grpo  # noqa: E402, F401 - registers its estimator

pytestmark = pytest.mark.slow

OPTIONS = EpisodeOptions(enable_mtrl=True)
REWARD = "reward.reward_manager"
ROLLOUT = "actor_rollout_ref.rollout"

BROKEN_TOOL = """
from verl_tool.servers.tools.base import Tool, ToolResult

class Broken(Tool):
    name = "broken"
    description = "Cannot be made."

    def __init__(self, **options):
        raise RuntimeError("no key in TOOL_KEY")

    async def run(self, call, context):
        return ToolResult()
"""
OWN_REWARD = """
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager

class Mine(GradingRewardManager):
    async def grade(self, sample):
        ...

class AsksTheTokenizer(Mine):
    def __init__(self, config, tokenizer, **kwargs):
        super().__init__(config, tokenizer, **kwargs)
        self.size = len(tokenizer.get_vocab())
"""


def problems(*overrides: str) -> str:
    """What stands in the way of a config, or nothing."""
    config = composed("platform=cpu", f"{REWARD}.name=gsm8k", *overrides)
    try:
        check_parts(config, OPTIONS)
    except ConfigError as error:
        return str(error)
    return ""


def test_nothing_stands_in_the_way_of_a_config_that_is_right():
    settings = ["trainer.save_freq=0", "actor_rollout_ref.actor.optim.lr=0", f"{ROLLOUT}.top_k=0"]
    assert problems("tool_server.start='calculator,finish'", "tool_server.args=[--num_replicas,'2']", *settings) == ""


@pytest.mark.parametrize(
    ("batch", "mini", "n", "ranks", "micro", "told"),
    [
        (8, 4, 2, 2, 4, ""),
        (8, 3, 2, 1, 1, "train_batch_size=8 is no multiple of actor_rollout_ref.actor.ppo_mini_batch_size=3"),
        (8, 4, 1, 3, 1, "cannot be shared equally by 3 data-parallel ranks"),
        (8, 4, 2, 2, 3, "the 4 rows .* no multiple of .*ppo_micro_batch_size_per_gpu=3"),
    ],
)
def test_rows_that_cannot_be_cut_up_evenly_are_named(batch, mini, n, ranks, micro, told):
    actor = "actor_rollout_ref.actor"
    sizes = [f"data.train_batch_size={batch}", f"{actor}.ppo_mini_batch_size={mini}", f"{ROLLOUT}.n={n}"]
    cut = [f"trainer.n_gpus_per_node={ranks}", f"{actor}.ppo_micro_batch_size_per_gpu={micro}"]
    problem = problems("trainer.use_v1=false", *sizes, *cut)
    assert re.search(told, problem)
    assert bool(problem) == bool(told)


def test_all_problems_are_told_at_once():
    assert len(problems("tool_server.start=pyton_code", f"{REWARD}.name=gsm9k").splitlines()) == 2


@pytest.mark.parametrize(
    ("start", "args", "told"),
    [
        ("pyton_code", "[]", "tool 'pyton_code' is unknown; known: audio_crop, bash_terminal"),
        ("no/such_tool.py", "[]", "no/such_tool.py"),
        ("calculator", "[--num_replica,'1']", "No such option: --num_replica"),
        ("calculator", "[--state_ttl,'0']", "Invalid value for '--state_ttl': "),
        ("calculator", "[--tool_config,no/such.json]", "no/such.json"),
        ("''", "[--mcp,no/such.json]", "no/such.json"),
    ],
)
def test_the_server_s_tools_are_looked_for(start, args, told):
    assert told in problems(f"tool_server.start={start}", f"tool_server.args={args}")


def test_a_retriever_that_does_not_answer_is_told_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("RETRIEVER_URL", "http://127.0.0.1:9")
    told = problems("tool_server.start='search_retrieval,finish'")
    assert re.search(r"http://127\.0\.0\.1:9: no connection: .*start a server with .* or RETRIEVER_URL$", told)
    index = f'tool_server.args=[--tool_config,\'{{"tools": [{{"name": "search_retrieval", "index": "{tmp_path}"}}]}}\']'
    assert f"there is no index in {tmp_path}" in problems("tool_server.start=search_retrieval", index)


def test_before_a_recipe_has_made_what_its_tools_read_the_numbers_are_looked_at_alone():
    wrong = ["tool_server.start=pyton_code", f"{REWARD}.name=gsm9k"]
    check_parts(composed("platform=cpu", *wrong), OPTIONS, tool_data_is_there=False)
    with pytest.raises(ConfigError, match=r"quantization='fp7' is unknown[^\n]*$"):
        check_parts(composed("platform=cpu", *wrong, f"{ROLLOUT}.quantization=fp7"), OPTIONS, tool_data_is_there=False)


def test_a_tool_of_one_s_own_is_made(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN_TOOL)
    assert "RuntimeError: no key in TOOL_KEY" in problems(f"tool_server.start={tmp_path}/broken.py")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([f"{REWARD}.name=gsm9k"], "Unknown reward manager: gsm9k; known: acecoder, by_source, calculator"),
        (["++reward.reward_kwargs.colour=red"], "reward.reward_kwargs.colour: Extra inputs"),
        (["++reward.reward_kwargs.timeout_seconds=-3"], "reward.reward_kwargs.timeout_seconds"),
        (["++reward.reward_kwargs.shaping.turns.weight=1"], "reward.reward_kwargs.shaping.turns.limit"),
    ],
)
def test_the_reward_manager_is_made_with_its_options(overrides, told):
    assert told in problems(*overrides)


@pytest.mark.parametrize(
    ("name", "told"), [("Mine", ""), ("AsksTheTokenizer", ""), ("Other", "reward.reward_manager.name=Other")]
)
def test_a_reward_manager_of_one_s_own_is_found(tmp_path, name, told):
    (tmp_path / "own_reward.py").write_text(OWN_REWARD)
    own = [f"{REWARD}.source=importlib", f"{REWARD}.name={name}", f"{REWARD}.module.path={tmp_path}/own_reward.py"]
    problem = problems(*own)
    assert told in problem
    assert bool(problem) == bool(told)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("gsm8k", [], "mt_grpo needs a reward for each turn, and the reward manager gives none"),
        ("search_f1", [], "turn_rewards={}"),
        ("search_f1", ["++reward.reward_kwargs.turn_rewards={}"], ""),
        ("search_f1", ["++reward.reward_kwargs.turn_rewards.weight=1"], "counts them twice"),
        ("mt_torl", [], "counts them twice"),
        ("mt_torl", ["++reward.reward_kwargs.turn_weight=0"], ""),
    ],
)
def test_estimator_and_reward_manager_must_agree_on_turns(name, options, told):
    problem = problems(f"{REWARD}.name={name}", "algorithm.adv_estimator=mt_grpo", f"{ROLLOUT}.n=2", *options)
    assert told in problem
    assert bool(problem) == bool(told)


@pytest.mark.parametrize(("there", "address", "refused"), [(0, "", True), (1, "", False), (0, "auto", False)])
def test_a_missing_gpu_is_named_unless_a_cluster_is_joined(monkeypatch, there, address, refused):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setenv("RAY_ADDRESS", address)
    problem = problems("platform=gpu", "trainer.device=cuda", "trainer.n_gpus_per_node=1")
    assert ("this machine has 0 GPUs" in problem) == refused


@pytest.mark.parametrize(("there", "refused"), [(4, True), (5, False)])
def test_gpus_that_only_sample_are_counted_too(monkeypatch, there, refused):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr("verl_tool.trainer.preflight.packages.is_installed", lambda name: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    mode = ["trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.tensor_model_parallel_size=1"]
    of_their_own = f"{ROLLOUT}.n_gpus_per_node=3"
    problem = problems("platform=gpu", "trainer.device=cuda", "trainer.n_gpus_per_node=2", *mode, of_their_own)
    assert ("needs 5 GPUs: 2 (trainer) + 3 (actor_rollout_ref.rollout), and this machine" in problem) == refused


def test_a_missing_package_of_the_way_of_the_weights_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 16)
    monkeypatch.setattr("verl_tool.trainer.preflight.packages.is_installed", lambda name: name != "cupy")
    mode = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.name=vllm")
    problem = problems("platform=gpu", "trainer.device=cuda", *mode)
    assert "checkpoint_engine.backend=nccl needs the Python package cupy" in problem


def test_files_and_models_that_are_not_there_are_named(tmp_path):
    (tmp_path / "train.parquet").touch()
    files = f"data.train_files=[{tmp_path}/train.parquet,{tmp_path}/no.parquet,hdfs://a/b.parquet]"
    found = list(
        missing_files(composed(files, "data.val_files=null", "actor_rollout_ref.model.path=outputs/run/model"))
    )
    assert [each.split(";")[0] for each in found] == [
        f"data.train_files: there is no file {tmp_path}/no.parquet",
        "actor_rollout_ref.model.path: there is no folder outputs/run/model",
    ]
    there = [f"data.train_files={tmp_path}/train.parquet", "data.val_files=[]"]
    assert list(missing_files(composed(*there, "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"))) == []


def test_a_model_that_the_hub_cannot_give_is_refused_but_for_a_cluster_whose_nodes_may_have_it(monkeypatch, caplog):
    monkeypatch.setattr(config_validation, "why_not_loaded", lambda model: f"is not here, and {model} is nowhere")
    alone = ["data.train_files=[]", "data.val_files=null", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"]
    with pytest.raises(ConfigError, match=r"is nowhere; download it .*\(hf download Qwen/Qwen2.5-0.5B-Instruct\)"):
        config_validation.check_files(composed(*alone))
    config_validation.check_files(composed(*alone, "+ray_kwargs.ray_init.address=10.0.0.1:6379"))
    assert "is nowhere; download it" in caplog.text


DRY_RUN = """
import sys
from verl_loop import composed
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.trainer.config_validation import check_parts

config = composed("platform=cpu", "reward.reward_manager.name=torl", "tool_server.start=python_code")
check_parts(config, EpisodeOptions(enable_mtrl=True))
import ray
print(sorted({"vllm", "sglang"} & set(sys.modules)), ray.is_initialized())
"""


@pytest.mark.timeout(300)
def test_neither_vllm_nor_ray_is_touched():
    helpers = Path(__file__).parents[1] / "helpers"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(helpers)!r})\n{DRY_RUN}"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["[] False"], done.stderr[-2000:]

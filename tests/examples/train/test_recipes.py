"""Every recipe in both profiles: its whole config, checked by verl's validator, on a machine without a GPU."""

from __future__ import annotations

import copy
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from script_module import load_script

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from omegaconf import DictConfig, OmegaConf, open_dict  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from quick_compose import quick_compose  # noqa: E402
from rich.console import Console  # noqa: E402
from verl.experimental.reward_loop import reward_manager  # noqa: E402
from verl.trainer.config.algorithm import RolloutCorrectionConfig  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.config import McoreActorConfig  # noqa: E402
from verl_loop import reference_config  # noqa: E402

from verl_tool.agent_loop.verl.config import options_in  # noqa: E402
from verl_tool.agent_workers.reward_manager.base import options_in as reward_options_in  # noqa: E402
from verl_tool.agent_workers.reward_manager.by_source import BySourceOptions  # noqa: E402
from verl_tool.agent_workers.reward_manager.grading.shaping import Shaping  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.gateway.program.container_program import ContainerOptions  # noqa: E402
from verl_tool.platforms import attention  # noqa: E402
from verl_tool.trainer import main_ppo  # noqa: E402
from verl_tool.trainer.composition import leaves  # noqa: E402
from verl_tool.trainer.config_validation import tools_of  # noqa: E402
from verl_tool.trainer.main_ppo import quoted  # noqa: E402
from verl_tool.trainer.recipe import commands, make_tool_data  # noqa: E402

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[3] / "examples" / "train"
SCRIPTS = sorted(str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/train*.sh"))
PROFILES = ("gpu", "cpu")
WITH_AGENT = "unmodified_agent/train.sh"
ACTOR, ROLLOUT, AGENT = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "agent"))
VARIABLES = dict(re.findall(r"^ {4}([A-Z_]+) +([a-z][\w.]+)$", (RECIPES / "launch.sh").read_text(), re.MULTILINE))
"""The options that variables of the environment set."""


def launched(script: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """The script's end, with `settings` in its environment and nothing there that could change its config."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return subprocess.run(
        ["bash", str(RECIPES / script), "trainer.log_val_generations=3"],
        env=kept | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )


def composed(script: str | Path, *overrides: str, **settings: str) -> DictConfig:
    """The config as Hydra composes it from the command line that the script runs. `overrides` come last."""
    return copy.deepcopy(_composed(script, overrides, tuple(settings.items())))


@functools.cache
def _composed(script: str | Path, overrides: tuple[str, ...], settings: tuple[tuple[str, str], ...]) -> DictConfig:
    done = launched(script, DRY_RUN="command", **dict(settings))
    assert done.returncode == 0, done.stderr
    _, folder, _, name, *options = done.stdout.splitlines()
    return quick_compose(folder, name, [quoted(option) for option in [*options, *overrides]])


def completed(script: str | Path, *overrides: str, **settings: str) -> DictConfig:
    """The config after all checks that a training makes."""
    config = composed(script, *overrides, **settings)
    if script == WITH_AGENT:
        config.gateway.program.install = str(RECIPES)  # any folder: nothing is started
    main_ppo.complete(config)
    return config


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """`complete` names files in the environment."""
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)


def test_all_recipes_are_there():
    assert set(SCRIPTS) == {
        *("acecoder/train.sh", "acecoder/train_mini.sh", "acecoder/train_no_tool.sh", "calculator/train.sh"),
        *("function_calling/train.sh", "gsm8k/train.sh", "math_tir/train.sh", "mathcoder/train.sh"),
        *(
            "long_document/train.sh",
            "miniwob/train.sh",
            "multi_tool/train.sh",
            "pixel_reasoner/train.sh",
            "search_r1/train.sh",
        ),
        "ask_the_user/train.sh",
        *("skysql/train.sh", "swe/train.sh", "terminal/train.sh", "toolgrpo/train.sh", "unmodified_agent/train.sh"),
        "text_game/train.sh",
    }


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_config_is_valid(script, profile):
    config = completed(script, PROFILE=profile)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    manager = reward_manager.get_reward_manager_cls(config.reward.reward_manager.name)
    manager.Options.model_validate(OmegaConf.to_container(config.reward.reward_kwargs))
    assert config.trainer.device == ("cpu" if profile == "cpu" else "cuda")
    assert config.trainer.log_val_generations == 3
    options = options_in(config)
    assert options.enable_agent == ("no_tool" not in script and script != WITH_AGENT)
    url = None if script == WITH_AGENT else f"http://127.0.0.1:{config.tool_server.port}"
    assert options.tool_server_url == url
    rollout, tokens = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    assert tokens <= rollout.max_model_len <= min(tokens + 16, rollout.max_num_batched_tokens)
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= tokens
    check_batches(config)


def check_batches(config: DictConfig) -> None:
    """What verl asserts when a step's batch is cut up, minutes into a training."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    assert actor.ppo_mini_batch_size * rollout.n % gpus == 0
    if not actor.use_dynamic_bsz:
        assert actor.ppo_mini_batch_size * rollout.n // gpus % actor.ppo_micro_batch_size_per_gpu == 0
        samples = config.data.train_batch_size * rollout.n // gpus
        assert samples % rollout.log_prob_micro_batch_size_per_gpu == 0


@pytest.mark.parametrize("profile", ["megatron", "megatron_moe"])
def test_math_with_megatron_is_valid_and_every_variable_sets_an_option(profile):
    config = completed("math_tir/train.sh", PROFILE=profile)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    reference = reference_config(config)
    assert isinstance(actor, McoreActorConfig)
    assert isinstance(reference, McoreActorConfig)
    # The class of the critic reads its model.
    assert config.critic._target_ == "verl.workers.config.McoreCriticConfig"
    assert omega_conf_to_dataclass(config.critic.megatron).strategy == "megatron"
    omega_conf_to_dataclass(config.critic.optim)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        assert getattr(reference.megatron, size) == getattr(actor.megatron, size)
    check_batches(config)
    there = leaves(OmegaConf.to_container(config))
    # Megatron's own name for that is context_parallel_size.
    assert set(VARIABLES.values()) - set(there) == {VARIABLES["ULYSSES"]}
    assert (actor.megatron.expert_model_parallel_size == 8) == (profile == "megatron_moe")
    assert config.run_dir.endswith(f"outputs/math_tir/{profile}")


def test_offload_is_the_engine_s():
    for profile, group in (("gpu", "fsdp_config"), ("megatron", "megatron")):
        for value in (True, False):
            config = composed("math_tir/train.sh", PROFILE=profile, OFFLOAD=str(value).lower())
            actor, reference = config.actor_rollout_ref.actor[group], config.actor_rollout_ref.ref[group]
            assert actor.param_offload == actor.optimizer_offload == reference.param_offload == value


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_recipe_for_gpus_takes_megatron_or_says_what_of_it_is_fsdp_s(script):
    refusals = {
        "calculator/train.sh": "optim.lr_scheduler_type, actor_rollout_ref.actor.optim.min_lr_ratio: FSDP's",
        "pixel_reasoner/train.sh": "actor.strategy='fsdp2' with model_engine=megatron",
        "toolgrpo/train.sh": "LoRA adapter",
    }
    if script in refusals:
        with pytest.raises(ConfigError, match=re.escape(refusals[script])):
            completed(script, "model_engine=megatron", PROFILE="gpu")
        return
    config = completed(script, "model_engine=megatron", PROFILE="gpu")
    assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.actor), McoreActorConfig)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ACTOR}.strategy=fsdp2", "critic.strategy=fsdp2"],
        [f"{ACTOR}.ulysses_sequence_parallel_size=2"],
        [f"{ROLLOUT}.quantization=fp8"],
        [f"{ROLLOUT}.name=sglang"],
        ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2.0"],
    ],
)
def test_the_option_lines_of_the_page_about_backends_are_valid_in_a_recipe(overrides, monkeypatch):
    monkeypatch.setattr(attention, "_why_not", lambda *_: None)  # flash attention is there
    page = (RECIPES.parents[1] / "assets/docs/backends.md").read_text()
    assert all(override in page for override in overrides)
    config = completed("math_tir/train.sh", *overrides, PROFILE="gpu")
    omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_variable_sets_an_option_of_both_profiles(script):
    for profile in PROFILES:
        config = composed(script, PROFILE=profile)
        there = set(leaves(OmegaConf.to_container(config)))
        assert set(VARIABLES.values()) <= there
        # The agent's tasks for GPUs have verifiers, and the small ones answers.
        same = () if script == WITH_AGENT else ("reward.reward_manager.name",)
        for name in (*same, "tool_server.start", "trainer.use_v1"):
            assert OmegaConf.select(config, name) == OmegaConf.select(composed(script, PROFILE="gpu"), name)


@pytest.mark.parametrize("mode", ["colocate", "separate"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_sampling_may_be_asynchronous(script, mode):
    given = {"ASYNC": mode, "STALENESS": "2", "N_GPUS": "4", "ROLLOUT_GPUS": "3", "ROLLOUT_NNODES": "2"}
    if (script, mode) == ("toolgrpo/train.sh", "separate"):
        with pytest.raises(ConfigError, match=r"adapter \(LoRA\).*model.lora.merge=true"):
            completed(script, PROFILE="gpu", **given)
    merged = ["actor_rollout_ref.model.lora.merge=true"] if script == "toolgrpo/train.sh" else []
    config = completed(script, *merged, PROFILE="gpu", **given)
    v1, rollout = config.trainer.v1, config.actor_rollout_ref.rollout
    assert v1.trainer_mode == f"{mode}_async"
    assert (v1.sampler.max_off_policy_threshold, v1.sampler.max_off_policy_strategy) == (3, "wait")
    correction = omega_conf_to_dataclass(config.algorithm.rollout_correction, RolloutCorrectionConfig)
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2.0)
    assert not correction.bypass_mode
    assert (rollout.nnodes, rollout.n_gpus_per_node, config.trainer.n_gpus_per_node) == (2, 3, 4)
    assert rollout.checkpoint_engine.backend == {"colocate": "naive", "separate": "nccl"}[mode]
    if mode == "separate":
        updates = v1.separate_async.parameter_sync_step
        assert updates * config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size


def test_on_a_cpu_separate_sampling_takes_gloo_and_a_place_more():
    # A Ray that others run on this machine would be joined.
    own = "++ray_kwargs.ray_init.address=local"
    config = completed("calculator/train.sh", own, PROFILE="cpu", ASYNC="separate")
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "gloo"
    assert config.ray_kwargs.ray_init.num_gpus == 2


def test_an_unknown_way_of_sampling_is_refused():
    done = launched("calculator/train.sh", PROFILE="cpu", ASYNC="true", DRY_RUN="command")
    assert done.returncode == 2
    assert "ASYNC is 'true'; it must be colocate or separate" in done.stderr


def test_variables_win_over_a_recipe_and_arguments_over_all():
    given = {"MODEL": "some/model", "N": "4", "ALGORITHM": "rloo", "KL_LOSS_COEF": "0.1", "LORA_RANK": "8"}
    config = completed("acecoder/train.sh", "data.train_batch_size=256", PROFILE="gpu", BATCH_SIZE="128", **given)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.actor_rollout_ref.model.path, config.algorithm.adv_estimator) == ("some/model", "rloo")
    assert (actor.use_kl_loss, actor.kl_loss_coef, rollout.n, rollout.load_format) == (True, 0.1, 4, "safetensors")
    assert config.data.train_batch_size == 256


def test_the_small_form_of_acecoder_is_the_one_that_its_seeds_were_run_with():
    config = composed("acecoder/train.sh", PROFILE="cpu")
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, config.recipe.warm_up) == (32, 16, 0.9)
    assert (actor.optim.lr, actor.optim.lr_warmup_steps) == (2.5e-4, 4)
    assert (trainer.total_training_steps, trainer.test_freq) == (22, 11)
    assert config.actor_rollout_ref.model.path == "outputs/acecoder/cpu/model"


def test_a_calculator_model_that_is_given_sees_solved_problems_in_longer_prompts():
    tiny, given = (composed("calculator/train.sh", PROFILE="cpu", **model) for model in ({}, {"MODEL": "some/model"}))
    assert (tiny.data.max_prompt_length, given.data.max_prompt_length) == (32, 256)
    assert (tiny.actor_rollout_ref.actor.optim.lr, given.actor_rollout_ref.actor.optim.lr) == (1e-4, 1e-6)
    assert "--few-shot" not in commands(tiny, "make_data")[0]
    assert commands(given, "make_data")[0][-1] == "--few-shot"


def test_function_calls_are_trained_as_the_warm_up_makes_them():
    warmup = load_script("function_calling_warmup_options", RECIPES / "function_calling" / "warmup.py")
    small, large = (options_in(completed("function_calling/train.sh", PROFILE=each)) for each in ("cpu", "gpu"))
    for name in warmup.OPTIONS.model_fields_set:
        assert getattr(small, name) == getattr(warmup.OPTIONS, name), name
    assert small.describes_tools
    assert large.describes_tools


def test_pictures_are_looked_at_as_the_warm_up_looks_at_them(monkeypatch):
    pytest.importorskip("torchvision")
    monkeypatch.syspath_prepend(str(RECIPES / "pixel_reasoner"))
    warmup = load_script("pixel_reasoner_warmup_options", RECIPES / "pixel_reasoner" / "warmup.py")
    small = completed("pixel_reasoner/train.sh", PROFILE="cpu")
    for name in warmup.OPTIONS.model_fields_set:
        assert getattr(options_in(small), name) == getattr(warmup.OPTIONS, name), name
    assert small.tool_server.start == warmup.TOOLS


@pytest.mark.parametrize("coordinates", ["auto", "thousandths"])
def test_the_tool_of_pixel_reasoner_is_told_how_the_model_points(coordinates):
    config = completed("pixel_reasoner/train.sh", f"recipe.coordinates={coordinates}", PROFILE="gpu")
    tools = tools_of(config)
    assert {tool.name for tool in tools} == {"zoom_in", "select_frames"}
    assert {tool.options.coordinates for tool in tools} == {coordinates}


def test_the_other_scaffold_of_swe_is_an_agent_in_the_image_of_a_row():
    config = composed("swe/train.sh", "scaffold=mini_swe_agent", "recipe.engine=podman", PROFILE="gpu")
    config.gateway.program.install = str(RECIPES)  # any folder: nothing is started
    main_ppo.complete(config)
    program = config.gateway.program
    found = (program.preset, program.container.engine, program.container.workdir)
    assert found == ("mini_swe_agent", "podman", "/testbed")
    assert config.tool_server.start is None
    assert not options_in(config).enable_agent
    assert (config.gateway.session.max_turns, config.actor_rollout_ref.rollout.max_model_len) == (100, 65536)


@pytest.mark.parametrize(("backend", "image"), [("sandbox", ""), ("podman", "local/debian:1")])
def test_the_small_form_of_swe_runs_in_the_sandbox_or_in_containers(monkeypatch, backend, image):
    monkeypatch.setenv("ENGINE", backend)
    monkeypatch.setenv("IMAGE", image or "any")
    config = completed("swe/train.sh", PROFILE="cpu")
    tools = tools_of(config)
    assert {(tool.options.backend, tool.options.image) for tool in tools} == {(backend, image)}
    assert {tool.options.timeout_seconds for tool in tools} == {3}


@pytest.mark.parametrize("script", ["terminal/train.sh", "swe/train.sh"])
def test_the_step_that_makes_an_image_is_done_once(monkeypatch, tmp_path, script):
    monkeypatch.setenv("ENGINE", "sandbox")
    config = composed(script, f"run_dir={tmp_path}", PROFILE="cpu")
    with (tmp_path / "console").open("w") as file:
        made = [make_tool_data(config, Console(file=file)) for _ in range(2)]
    assert made == [True, False]
    assert (tmp_path / "image" / "image.txt").read_text() == "none: sandbox\n"


@pytest.mark.parametrize(("profile", "image", "writable"), [("gpu", "", True), ("cpu", "a:1", False)])
def test_tasks_of_the_terminal_recipe_run_in_containers(monkeypatch, profile, image, writable):
    variables = {"ENGINE": "podman", "IMAGE": "a:1", "TASK_BASE_IMAGE": "*=b:1", "TASK_NETWORK": "--network"}
    for name, value in {**variables, "ALLOWED_HOSTS": '["pypi.org"]', "TASK_MEMORY_MB": "4096"}.items():
        monkeypatch.setenv(name, value)
    config = completed("terminal/train.sh", PROFILE=profile)
    options = [tool.options for tool in tools_of(config)]
    assert {(each.backend, each.image, each.writable) for each in options} == {("podman", image, writable)}
    [command] = [command for command in commands(config, "make_data") if "--tasks" in command]
    assert {"--backend=podman", "--base_image=*=b:1", "--network", "--skip_unsupported"} <= set(command)
    assert ("--images" in command) == (profile == "gpu")
    if profile == "gpu":
        assert {(each.allowed_hosts, each.max_memory_mb) for each in options} == {(("pypi.org",), 4096)}
        assert {(each.max_row_cpus, each.max_row_memory_mb, each.trust_image) for each in options} == {
            (8.0, 16384, False)
        }


@pytest.mark.parametrize(("engine", "image"), [("", None), ("podman", "python:3.12")])
def test_the_agent_s_tasks_run_where_their_images_are_built(monkeypatch, tmp_path, engine, image):
    for name, value in {"ENGINE": engine or "sandbox", "ALLOWED_HOSTS": '["*.pypi.org:443"]', "TASK_CPUS": "2"}.items():
        monkeypatch.setenv(name, value)
    config = composed("unmodified_agent/train.sh", f"gateway.program.install={tmp_path}", PROFILE="gpu")
    main_ppo.complete(config)
    program = config.gateway.program
    options = ContainerOptions.model_validate(OmegaConf.to_container(program.container, resolve=True))
    assert (options.allowed_hosts, options.cpus) == (("*.pypi.org:443",), 2.0)
    assert (options.max_row_cpus, options.max_row_memory_mb) == (8.0, 16384)
    assert (program.image, program.container.engine) == (image, engine or "docker")
    assert program.container.writable == bool(engine)
    [command] = commands(config, "make_data")
    assert f"--backend={engine}" in command


@pytest.mark.parametrize("profile", PROFILES)
def test_tool_and_reward_of_skysql_look_into_the_same_databases(profile):
    config = completed("skysql/train.sh", PROFILE=profile)
    kind = reward_manager.get_reward_manager_cls("sqlcoder")
    [tool] = tools_of(config)
    assert tool.options.root == reward_options_in(config, kind.Options, "sqlcoder").root
    assert str(tool.options.root) == {"cpu": f"{config.run_dir}/databases", "gpu": "data/skysql/databases"}[profile]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_tools_of_multi_tool_look_into_its_world_and_each_kind_of_question_has_its_own_shaping(profile):
    config = completed("multi_tool/train.sh", PROFILE=profile)
    world = {"cpu": f"{config.run_dir}/world", "gpu": "data/multi_tool_world"}[profile]
    tools = {tool.name: tool for tool in tools_of(config)}
    assert list(tools) == ["calculator", "python_code", "search_retrieval", "sql"]
    assert str(tools["search_retrieval"].options.index) == f"{world}/index"
    assert str(tools["sql"].options.root) == f"{world}/databases"
    managers = reward_options_in(config, BySourceOptions, "by_source").managers
    assert sorted(managers) == ["calculator", "python", "search", "sql"]
    for entry in managers.values():
        cost = Shaping.model_validate(entry.kwargs["shaping"]).tool_cost
        assert cost.weight == -0.02
        # By none of its names is a tool cheaper than by another.
        for name, price in {"calculator": 1.0, "python_code": 2.0, "search_retrieval": 1.0, "sql": 1.0}.items():
            assert {cost.costs.get(each, cost.default) for each in tools[name].call_names} == {price}


@pytest.mark.parametrize(
    ("script", "published"),
    [
        (
            "long_document/train.sh",  # MemAgent's run_memory_7B.sh
            {
                **{"data.train_batch_size": 128, "algorithm.norm_adv_by_std_in_grpo": False, f"{ACTOR}.optim.lr": 1e-6},
                **{f"{ACTOR}.ppo_mini_batch_size": 8, f"{ACTOR}.kl_loss_coef": 0.001, f"{ACTOR}.entropy_coeff": 0},
                **{f"{ACTOR}.kl_loss_type": "low_var_kl", f"{ACTOR}.use_kl_loss": True, f"{ROLLOUT}.n": 16},
                **{f"{ACTOR}.optim.lr_warmup_steps": 20, f"{ACTOR}.loss_agg_mode": "token-mean"},
                **{f"{ROLLOUT}.temperature": 1.0, f"{ROLLOUT}.top_p": 1, f"{ROLLOUT}.max_model_len": 8192},
                **{f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ROLLOUT}.val_kwargs.n": 4, f"{AGENT}.summary_tokens": 1024},
                **{f"{ROLLOUT}.gpu_memory_utilization": 0.6, "trainer.total_epochs": 30},
                **{"trainer.save_freq": 10, "trainer.test_freq": 5},
            },
        ),
        (
            "search_r1/train.sh",  # verl-tool's examples/train/search_r1/train_3b.sh
            {
                **{"data.train_batch_size": 512, "data.max_prompt_length": 4096, "data.max_response_length": 4096},
                **{f"{ACTOR}.ppo_mini_batch_size": 64, f"{ACTOR}.kl_loss_coef": 0.0001, f"{ACTOR}.entropy_coeff": 0},
                **{f"{ACTOR}.kl_loss_type": "low_var_kl", f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.optim.lr": 1e-6},
                **{f"{ACTOR}.optim.lr_warmup_steps": 10, f"{ROLLOUT}.n": 16, f"{ROLLOUT}.temperature": 1.0},
                **{f"{ROLLOUT}.top_p": 1, f"{ROLLOUT}.max_num_seqs": 512, f"{ROLLOUT}.gpu_memory_utilization": 0.6},
                **{f"{AGENT}.max_turns": 2, f"{AGENT}.max_action_length": 2048, f"{AGENT}.max_obs_length": 1024},
                **{f"{AGENT}.additional_eos_token_ids": [151645], "trainer.total_training_steps": 1005},
                **{"trainer.total_epochs": 15, "trainer.save_freq": 10, "trainer.test_freq": 20},
            },
        ),
        (
            "math_tir/train.sh megatron",  # verl-tool's examples/train/math_tir/train_7b_grpo_megatron.sh
            {
                **{
                    "recipe.model": "Qwen/Qwen2.5-Math-7B",
                    "data.train_batch_size": 128,
                    "data.max_prompt_length": 1024,
                },
                **{"data.max_response_length": 3072, f"{ACTOR}.ppo_mini_batch_size": 128, f"{ACTOR}.optim.lr": 1e-6},
                **{f"{ACTOR}.optim.lr_warmup_steps": 10, f"{ACTOR}.kl_loss_coef": 0, f"{ACTOR}.entropy_coeff": 0},
                **{f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{ACTOR}.megatron.param_offload": False},
                **{f"{ACTOR}.megatron.pipeline_model_parallel_size": 2},
                **{f"{ACTOR}.megatron.optimizer_offload": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1},
                **{
                    f"{ROLLOUT}.n": 16,
                    f"{ROLLOUT}.temperature": 1.0,
                    f"{ROLLOUT}.top_p": 1,
                    f"{ROLLOUT}.max_num_seqs": 512,
                },
                **{f"{ROLLOUT}.gpu_memory_utilization": 0.7, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8},
                **{f"{ROLLOUT}.tensor_model_parallel_size": 1, f"{AGENT}.max_turns": 1, f"{AGENT}.max_obs_length": 512},
                **{f"{AGENT}.max_action_length": 2048, "trainer.total_training_steps": 200, "trainer.save_freq": 10},
            },
        ),
        (
            "swe/train.sh",  # rLLM's train_deepswe_32b.sh, with the window of its evaluation and SkyRL-Agent's batch
            {
                **{"recipe.model": "Qwen/Qwen3-32B", "algorithm.adv_estimator": "rloo", f"{ACTOR}.optim.lr": 1e-6},
                **{f"{ACTOR}.clip_ratio_high": 0.28, f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.entropy_coeff": 0},
                **{f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum", f"{AGENT}.mask_overlong_loss": True},
                **{f"{ROLLOUT}.n": 8, f"{ROLLOUT}.temperature": 1.0, f"{ROLLOUT}.val_kwargs.temperature": 0},
                **{f"{ROLLOUT}.max_model_len": 65536, f"{AGENT}.max_turns": 100, "data.train_batch_size": 64},
            },
        ),
        (
            "skysql/train.sh",  # verl-tool's examples/train/skysql/train_7b.sh
            {
                **{"data.train_batch_size": 256, "data.max_prompt_length": 4096, "data.max_response_length": 4096},
                **{f"{ACTOR}.ppo_mini_batch_size": 256, f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.entropy_coeff": 0},
                **{f"{ACTOR}.optim.lr": 1e-6, f"{ACTOR}.optim.lr_warmup_steps": 10, f"{ROLLOUT}.n": 5},
                **{f"{ROLLOUT}.temperature": 0.6, f"{ROLLOUT}.top_p": 0.95, f"{ROLLOUT}.max_num_seqs": 512},
                **{f"{ROLLOUT}.gpu_memory_utilization": 0.8, f"{AGENT}.max_turns": 5, f"{AGENT}.max_obs_length": 1024},
                **{f"{AGENT}.max_action_length": 2048, "trainer.total_epochs": 30, "trainer.save_freq": 5},
                **{"trainer.test_freq": 10},
            },
        ),
        (
            "pixel_reasoner/train.sh",  # verl-tool's examples/train/pixel_reasoner/train_qwen25vl.sh
            {
                **{"data.train_batch_size": 128, "data.max_prompt_length": 16384, "data.max_response_length": 16384},
                **{"data.filter_overlong_prompts": False, "data.dataloader_num_workers": 4},
                **{f"{ACTOR}.strategy": "fsdp2", f"{ACTOR}.ppo_mini_batch_size": 128, f"{ACTOR}.optim.lr": 1e-6},
                **{f"{ACTOR}.optim.lr_warmup_steps": 10, f"{ACTOR}.kl_loss_coef": 0, f"{ACTOR}.entropy_coeff": 0},
                **{f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.fsdp_config.param_offload": False},
                **{f"{ACTOR}.ppo_max_token_len_per_gpu": 32768, f"{ROLLOUT}.tensor_model_parallel_size": 2},
                **{f"{ROLLOUT}.n": 8, f"{ROLLOUT}.temperature": 1.0, f"{ROLLOUT}.top_p": 1.0},
                **{f"{ROLLOUT}.gpu_memory_utilization": 0.8, f"{ROLLOUT}.enforce_eager": True},
                **{f"{ROLLOUT}.max_num_seqs": 512, f"{AGENT}.max_turns": 3, f"{AGENT}.max_action_length": 2048},
                **{f"{AGENT}.max_obs_length": 8192, f"{AGENT}.enable_mtrl": True},
                **{f"{AGENT}.additional_eos_token_ids": [151645], f"{AGENT}.action_stop_tokens": ["</tool_call>"]},
                **{"reward.reward_manager.name": "pixel_reasoner", "trainer.total_training_steps": 100},
                **{"trainer.total_epochs": 10, "trainer.save_freq": 10, "trainer.test_freq": 10},
            },
        ),
    ],
)
def test_the_values_for_gpus_are_the_published_ones(script, published):
    script, _, profile = script.partition(" ")
    config = completed(script, PROFILE=profile or "gpu")
    assert {name: OmegaConf.select(config, name) for name in published} == published


def test_ppo_gets_a_critic_from_the_same_model():
    config = composed("acecoder/train.sh", PROFILE="gpu", MODEL="some/model", ALGORITHM="gae")
    assert config.critic.model.path == config.actor_rollout_ref.model.path == "some/model"


def test_several_nodes_take_their_cluster_s_resources_and_a_tool_replica_each():
    for profile in PROFILES:
        config = composed("acecoder/train.sh", PROFILE=profile, NNODES="2", RAY_ADDRESS="10.0.0.1:6379")
        with open_dict(config):
            config.ray_kwargs.ray_init.address = "10.0.0.1:6379"
        main_ppo.complete(config)
        ray = config.ray_kwargs.ray_init
        assert config.trainer.nnodes == 2
        check_batches(config)
        assert list(config.tool_server.args) == ["--num_replicas", 2]
        assert (ray.num_cpus, ray.get("num_gpus"), ray.get("object_store_memory")) == (None, None, None)


def test_the_tool_server_of_a_small_form_needs_no_ray():
    assert list(composed("acecoder/train.sh", PROFILE="cpu").tool_server.args) == ["--embedded"]
    assert list(composed("acecoder/train.sh", PROFILE="gpu").tool_server.args) == ["--num_replicas", 1]


def test_a_running_tool_server_is_used():
    config = completed("gsm8k/train.sh", PROFILE="cpu", TOOL_SERVER_URL="http://10.0.0.1:5000")
    assert config.tool_server.start is None
    assert options_in(config).tool_server_url == "http://10.0.0.1:5000"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"PROFILE": "tpu"}, "PROFILE is 'tpu'"),
        ({"PROFILE": "megatron"}, "there is no megatron.yaml"),
        ({"PROFILE": "cpu", "NNODES": "2"}, "RAY_ADDRESS names no cluster"),
        ({"PROFILE": "cpu", "USE_TOOL": "no"}, "USE_TOOL is 'no'"),
        ({"PROFILE": "cpu", "DRY_RUN": "yes"}, "DRY_RUN is 'yes'"),
    ],
)
def test_wrong_settings_are_named(settings, words):
    done = launched("acecoder/train.sh", **settings)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_checks_can_fail():
    with pytest.raises(ValueError, match="must be >="):
        completed("acecoder/train.sh", PROFILE="cpu", MINI_BATCH_SIZE="64")
    options = reward_manager.get_reward_manager_cls("torl").Options
    with pytest.raises(ValidationError):
        options.model_validate({"rigth": 3})


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_tools_no_prompt_tells_of_any(script):
    if script.startswith("calculator"):
        pytest.skip("its prompts are the question alone")
    if script.startswith(("terminal", "swe")):
        pytest.skip("its tasks ask for a change of files, which nothing but a tool can make")
    if script.startswith("long_document"):
        pytest.skip("its documents are read by a tool alone")
    if script.startswith("ask_the_user"):
        pytest.skip("its user is at the tool server")
    if script.startswith("miniwob"):
        pytest.skip("its pages are in a browser")
    if script.startswith("text_game"):
        pytest.skip("its games are at the tool server")
    if script == WITH_AGENT:
        pytest.skip("its agent has its own tools")
    config = completed(script, PROFILE="gpu", USE_TOOL="false")
    assert not options_in(config).enable_agent
    for command in commands(config, "make_data"):
        assert "--add_execution_prompt" not in command
        assert command[0].endswith("acecoder.py") or "--no-tool" in command


def test_a_critic_is_checked_when_its_model_is_there(tmp_path):
    """A tiny model is made behind the checks of the config; any other must be there."""
    config = completed("calculator/train.sh", PROFILE="cpu", ALGORITHM="gae", RUN=str(tmp_path))
    assert config.critic.model.path == f"{tmp_path}/model"
    with pytest.raises(ConfigError, match="verl refuses the config"):
        completed("calculator/train.sh", PROFILE="cpu", ALGORITHM="gae", RUN=str(tmp_path), MODEL=f"{tmp_path}/none")


@pytest.mark.parametrize("profile", PROFILES)
def test_runs_with_and_without_tools_share_neither_checkpoints_nor_data(profile):
    with_tools = composed("math_tir/train.sh", PROFILE=profile)
    without = composed("math_tir/train.sh", PROFILE=profile, USE_TOOL="false")
    for name in ("run_dir", "data.train_files", "data.val_files"):
        assert OmegaConf.select(with_tools, name) != OmegaConf.select(without, name)


OWN = """
defaults: [recipe, _self_]
recipe:
  model: some/model
  seed: 7
  size: ${oc.env:SIZE,3}
  make_data: ["${recipe.folder}/make.py ${recipe.data} ${recipe.size} ${recipe.tool_flag}"]
run_dir: ${recipe.folder}/run
data: {max_prompt_length: 8, max_response_length: 8}
trainer: {project_name: own}
"""


@pytest.fixture
def own(tmp_path):
    """A recipe of one's own, in a folder of its own: what a user writes."""
    folder = tmp_path / "my recipe"
    folder.mkdir()
    (folder / "gpu.yaml").write_text(OWN)
    (folder / "train.sh").write_text(f'#!/usr/bin/env bash\nexec bash "{RECIPES}/launch.sh" "$0" "$@"\n')
    return folder / "train.sh"


def test_a_recipe_s_own_folders_and_seed_hold_unless_the_environment_names_others(own, tmp_path):
    def told(**settings):
        config = composed(own, PROFILE="gpu", **settings)
        return config.run_dir, config.data.train_files[0], config.data.seed

    assert told() == (f"{own.parent}/run", "data/own/train.parquet", 7)
    assert told(RUN="/a", SEED="1", USE_TOOL="false") == ("/a", "data/own-no_tool/train.parquet", 1)
    assert told(DATA="/d") == (f"{own.parent}/run", "/d/train.parquet", 7)


def test_its_commands_hold_a_path_with_spaces_as_one_word(own, monkeypatch):
    monkeypatch.setenv("SIZE", "4")
    config = composed(own, PROFILE="gpu", DATA="/my data", USE_TOOL="false")
    assert commands(config, "make_data") == [[f"{own.parent}/make.py", "/my data", "4", "--no-tool"]]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_script_s_own_dry_run_prints_the_config_and_leaves_nothing(tmp_path):
    settings = {"VERL_TOOL_VENV": sys.prefix, "VERL_TOOL_SKIP_INSTALL": "1"}
    settings |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path / "hub")}
    done = launched("toolgrpo/train.sh", DRY_RUN="1", PROFILE="gpu", RUN=str(tmp_path / "run"), **settings)
    # GPUs and model need not be there; what cannot be checked without them is told, once.
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning: not checked: the training needs 1 GPUs: 1 (trainer), and this machine has 0 GPUs" in done.stderr
    assert done.stderr.count("path: Qwen/Qwen2.5-0.5B-Instruct is not on this machine, and the hub cannot be") == 1
    assert done.stderr.count("https://") <= 1
    config = OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    assert config.actor_rollout_ref.model.lora_rank == 128
    assert not (tmp_path / "run").exists()
    assert config.dry_run

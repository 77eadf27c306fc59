"""The config, and what is refused before anything starts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from omegaconf import DictConfig, OmegaConf  # noqa: E402
from ray.exceptions import RayTaskError  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from verl_loop import composed  # noqa: E402

from verl_tool.agent_loop.options import TOOL_CONFIG_ALIASES, EpisodeOptions  # noqa: E402
from verl_tool.agent_loop.verl.config import options_in  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.trainer import config_completion, config_validation, main_ppo, ray_launch  # noqa: E402
from verl_tool.trainer.preflight import ray_resources, resources  # noqa: E402
from verl_tool.trainer.preflight.checks import Preflight  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="torch is built for an accelerator"),
]

AGENT = "actor_rollout_ref.agent"
STOPS = f"{AGENT}.action_stop_tokens=['<call>']"


SIZES = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    *(f"actor_rollout_ref.{part}.log_prob_micro_batch_size_per_gpu=8" for part in ("rollout", "ref")),
)


N = "actor_rollout_ref.rollout.n=2"


def prepared(tmp_path: Path, *overrides: str) -> DictConfig:
    """A config after all checks."""
    config = composed("platform=cpu", f"run_dir={tmp_path}", "algorithm.adv_estimator=grpo", N, *SIZES, *overrides)
    main_ppo.prepare(config, Console())
    return config


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """`prepare` names files in the environment."""
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)


def test_the_file_lists_every_option_with_its_default():
    config = composed()
    own = OmegaConf.to_container(config.actor_rollout_ref.agent, resolve=False)
    assert set(own.pop("tool_config")) == set(TOOL_CONFIG_ALIASES)
    from_elsewhere = {"max_prompt_length", "max_response_length", "max_model_len"}
    defaults = {name: field.default for name, field in EpisodeOptions.model_fields.items()}
    assert set(own) == set(defaults)
    # null stands for the default where an option has two names: else one that was set would not show.
    own |= {name: defaults[name] for name in TOOL_CONFIG_ALIASES.values() if own[name] is None}
    told = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    assert {n: v for n, v in told.items() if n not in from_elsewhere} == {
        n: v for n, v in defaults.items() if n not in from_elsewhere
    }


def test_options_reach_the_loop():
    config = composed(STOPS, f"{AGENT}.max_turns=3", f"{AGENT}.tool_config.timeout=7", "data.max_response_length=99")
    options = options_in(config)
    assert options.action_stop_tokens == ("<call>",)
    assert options.max_turns == 3
    assert options.tool_call_timeout == 7
    assert options.max_response_length == 99


@pytest.mark.parametrize(
    ("option", "alias"),
    [
        ("max_turns=10", "max_tool_turns=5"),
        ("enable_agent=true", "enabled=false"),
        ("tool_call_timeout=60", "timeout=7"),
    ],
)
def test_one_option_set_under_two_names_is_refused_even_at_its_default(option, alias):
    config = composed(STOPS, f"{AGENT}.{option}", f"{AGENT}.tool_config.{alias}")
    with pytest.raises(ConfigError, match="set the same option; give just one of them"):
        options_in(config)


def test_a_separator_needs_no_role_taken_back():
    """The file names a default role, which must not count as one that the user chose."""
    config = composed(f"{AGENT}.enable_mtrl=true", f"{AGENT}.mtrl_sep='<tool>{{obs}}</tool>'")
    assert options_in(config).mtrl_sep == "<tool>{obs}</tool>"


@pytest.mark.parametrize(
    ("argument", "hydra_s"),
    [
        ("tool_server.start=python_code,calculator", "tool_server.start='python_code,calculator'"),
        ("tool_server.start='a,b'", "tool_server.start='a,b'"),
        ("tool_server.start=calculator", "tool_server.start=calculator"),
        ("data.train_files=[a,b]", "data.train_files=[a,b]"),
        ("trainer.logger=a,b", "trainer.logger=a,b"),
        ("reward.reward_kwargs.shaping.a.weight=-1", "++reward.reward_kwargs.shaping.a.weight=-1"),
        ("+reward.reward_kwargs.right=3", "+reward.reward_kwargs.right=3"),
    ],
)
def test_arguments_become_hydra_s(argument, hydra_s):
    assert main_ppo.quoted(argument) == hydra_s


def leaves(config: dict, prefix: str = "") -> set[str]:
    """Names of all settings, dotted."""
    names = set()
    for name, value in config.items():
        names |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}"}
    return names


# Passed on as they are, to a model's config, to PyTorch, to Ray; or in verl's class of the config, not in its file.
FREE = ("override_config.", "mixed_precision.", "ray_kwargs.ray_init.", "rollout.enable_sleep_mode")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_platform_sets_nothing_that_verl_does_not_have(platform):
    file = Path(main_ppo.__file__).parent / f"config/platform/{platform}.yaml"
    known = leaves(OmegaConf.to_container(composed("~platform")))
    wanted = leaves(OmegaConf.to_container(OmegaConf.load(file)))
    assert {name for name in wanted - known if not any(free in name for free in FREE)} == set()


def test_a_server_of_our_own_gets_a_port_and_everybody_its_address(tmp_path):
    config = prepared(tmp_path, STOPS, "tool_server.start='calculator,finish'")
    assert config.tool_server.port > 1024
    assert options_in(config).tool_server_url == f"http://127.0.0.1:{config.tool_server.port}"


def test_the_run_s_folder_holds_its_config(tmp_path):
    config = prepared(tmp_path, STOPS, "tool_server.start=calculator", "data.max_response_length=77")
    main_ppo.take_over_folder(config, Console())
    saved = OmegaConf.load(tmp_path / "config.yaml")
    assert options_in(saved).max_response_length == 77
    assert saved.trainer.default_local_dir == str(tmp_path / "checkpoints")


def test_the_same_command_goes_on_and_another_is_refused(tmp_path):
    command = (STOPS, "tool_server.start=calculator", "actor_rollout_ref.actor.optim.lr=1e-6")
    main_ppo.take_over_folder(prepared(tmp_path, *command), Console())
    (tmp_path / "checkpoints/global_step_3/actor").mkdir(parents=True)
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    prepared(tmp_path, *command)  # a port of the tool server's own each time
    with pytest.raises(ConfigError, match=r"other settings: \S+optim.lr=2e-06 \(was 1e-06\)\. Give"):
        prepared(tmp_path, *command[:2], "actor_rollout_ref.actor.optim.lr=2e-6")


@pytest.mark.parametrize(
    "refused_by", ["prepare_inputs", "check_data", "attach_tool_descriptions", "run_preflight_checks", None]
)
def test_a_start_that_is_refused_leaves_an_earlier_one_as_it_was(tmp_path, monkeypatch, refused_by):
    """Only `prepare` and what moves the folder are real here: nothing starts."""
    steps = ("prepare_inputs", "check_data", "attach_tool_descriptions", "run_preflight_checks", "check_versions")
    for step in steps:
        monkeypatch.setattr(main_ppo, step, lambda *_args, **_kwargs: None)

    def refuse(*_args, **_kwargs):
        raise ConfigError("refused")

    if refused_by is not None:
        monkeypatch.setattr(main_ppo, refused_by, refuse)
    monkeypatch.setattr(main_ppo, "tool_server", lambda *_: contextlib.nullcontext(lambda: None))
    monkeypatch.setattr(main_ppo, "patched_modules", lambda _: contextlib.nullcontext(lambda: None))
    monkeypatch.setattr(main_ppo, "preloaded", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(main_ppo, "train", lambda _config, _options, _console, wait_for_tools: wait_for_tools())
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/global_step_3/data.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("earlier: 1\n")
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    anew = (f"run_dir={tmp_path}", "trainer.resume_mode=disable", f"{AGENT}.enable_agent=false", "console=all")
    config = composed("platform=cpu", "algorithm.adv_estimator=grpo", N, *SIZES, *anew)
    with pytest.raises(ConfigError, match="refused") if refused_by else contextlib.nullcontext():
        main_ppo.train_in_folder(config)
    kept = tmp_path if refused_by else tmp_path / "earlier/1"
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/global_step_3/data.pt"):
        assert (kept / name).read_text() == "earlier: 1\n"
    assert (tmp_path / "earlier").exists() == (refused_by is None)


@pytest.mark.parametrize("which", ["train_files", "val_files"])
def test_a_row_that_cannot_be_used_is_named_before_anything_starts(tmp_path, which):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    model = f"actor_rollout_ref.model.path={tmp_path}"
    both = ["data.train_files=[hdfs://a/b.parquet]", "data.val_files=null", model]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": [{"role": "user", "content": "a"}], "shots": ["a.png"], "data_source": "", "reward_model": {}}'
    )
    with pytest.raises(ConfigError, match=r"row 0 of .*rows.jsonl has content in 'shots'.*reads text only"):
        main_ppo.check_data(composed(*both, f"data.{which}={rows}", "data.image_key=shots"))
    main_ppo.check_data(composed(*both))
    with pytest.raises(ConfigError, match=r"there is no file /no/such.parquet"):
        main_ppo.check_data(composed(*both, f"data.{which}=[/no/such.parquet]"))


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("actor_rollout_ref.model.use_fused_kernels=true", r"use_fused_kernels=true with .*, which reads images"),
        ("algorithm.adv_estimator=gae", r"adv_estimator=gae needs a critic, and verl makes none for .*reads images"),
    ],
)
def test_what_does_not_work_with_images_is_refused_for_models_that_read_them(tmp_path, override, cause):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    files = ("data.train_files=[hdfs://a/b.parquet]", "data.val_files=null")
    model = f"actor_rollout_ref.model.path={tmp_path}"
    main_ppo.check_data(composed(*files, model, "algorithm.adv_estimator=grpo"))
    with pytest.raises(ConfigError, match=cause):
        main_ppo.check_data(composed(*files, model, "algorithm.adv_estimator=grpo", override))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    main_ppo.check_data(composed(*files, model, "algorithm.adv_estimator=grpo", override))


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        ([STOPS], "no tool server"),
        ([STOPS, "tool_server.start=calculator", f"{AGENT}.tool_server_url=http://h:1"], "give just one"),
        ([STOPS, "tool_server.start=calculator", f"{AGENT}.tool_config.server_url=http://h:1"], "give just one"),
        ([], "inline actions need action_stop_tokens"),
        ([STOPS, "tool_server.start=calculator", f"{AGENT}.max_prompt_length=9999"], "max_prompt_length=9999"),
        ([STOPS, "tool_server.start=calculator", "actor_rollout_ref.actor.strategy=megatron"], "megatron"),
    ],
)
def test_what_cannot_work_is_refused_at_once(tmp_path, overrides, cause):
    with pytest.raises(ConfigError, match=cause):
        prepared(tmp_path, *overrides)


@pytest.mark.parametrize("problem", [None, "on node a it is missing"])
def test_the_attention_of_a_cluster_is_chosen_when_it_is_joined(tmp_path, monkeypatch, problem):
    monkeypatch.setattr(resources, "joins_cluster", lambda _config: True)
    monkeypatch.setattr(ray_resources, "import_problem_of_nodes", lambda _module, _config: problem)
    config = composed(f"run_dir={tmp_path}", "trainer.device=cuda", "actor_rollout_ref.rollout.name=vllm")
    overrides = config.actor_rollout_ref.model.override_config
    config_completion.choose_attention(config)
    assert overrides.get("attn_implementation") is None
    config_completion.choose_attention(config, cluster_joined=True)
    assert overrides.get("attn_implementation") == (None if problem is None else "sdpa")


def test_a_dry_run_prints_the_config_then_what_would_be_refused_and_leaves_nothing(tmp_path, capsys):
    run, files = tmp_path / "run", [f"data.train_files={tmp_path}/no.parquet", "data.val_files=null"]
    wrong = ["tool_server.start=pyton_code", "reward.reward_manager.name=gsm9k"]
    config = composed("platform=cpu", f"run_dir={run}", "algorithm.adv_estimator=grpo", STOPS, *SIZES, *files, *wrong)
    with pytest.raises(ConfigError, match=r"pyton_code' is unknown; known: audio_crop, .*\n.*gsm9k"):
        main_ppo.dry_run(config)
    printed = capsys.readouterr()
    assert OmegaConf.create(printed.out[printed.out.index("actor_rollout_ref:") :]).tool_server.start == "pyton_code"
    assert f"not there yet: data.train_files: there is no file {tmp_path}/no.parquet" in printed.err
    assert not run.exists()


def test_a_dry_run_prints_what_it_warns_of_and_the_estimate_of_memory(tmp_path, capsys, monkeypatch):
    found = Preflight(warnings=["little room"], memory=Table("phase", "total"))
    monkeypatch.setattr(config_validation, "run_preflight", lambda *_: found)
    monkeypatch.setattr(main_ppo, "run_preflight_checks", lambda *_args, **_kwargs: None)
    files = [f"data.train_files={tmp_path}/no.parquet", "data.val_files=null", "tool_server.start=calculator"]
    reward = "reward.reward_manager.name=gsm8k"
    main_ppo.dry_run(composed("platform=cpu", "algorithm.adv_estimator=grpo", STOPS, *SIZES, *files, reward))
    printed = capsys.readouterr().err
    assert "warning: little room" in printed
    assert printed.index("phase") < printed.index("total")


def test_the_tool_server_is_started_with_its_isolation():
    args = ["tool_server.start=python_code", "tool_server.args=[--num_replicas,'2']"]
    assert config_validation.args_of(composed(*args)) == ["--num_replicas", "2"]
    weaker = composed(*args, "tool_server.isolation=none")
    assert config_validation.args_of(weaker) == ["--num_replicas", "2", "--isolation", "none"]
    assert config_validation.tools_of(weaker)[0].options.isolation == "none"


def test_metrics_of_an_earlier_start_are_kept(tmp_path):
    for text in ("first", "second"):
        (tmp_path / "metrics.jsonl").write_text(text)
        main_ppo.set_aside(tmp_path / "metrics.jsonl")
    main_ppo.set_aside(tmp_path / "metrics.jsonl")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"metrics.1.jsonl": "first", "metrics.2.jsonl": "second"}


def test_without_tools_no_server_is_needed(tmp_path):
    config = prepared(tmp_path, f"{AGENT}.enable_agent=false")
    assert options_in(config).tool_server_url is None


class TestRayThatIsLate:
    """Ray gives its own processes a time to come up, which a busy machine may not keep."""

    @pytest.fixture
    def tries(self, monkeypatch):
        """What `run_ppo` does at each try, in order; the tries left when it is over."""
        planned: list[Exception | None] = []

        def run_ppo(config, task_runner_class):
            error = planned.pop(0)
            if error is not None:
                raise error

        monkeypatch.setattr("verl.trainer.main_ppo.run_ppo", run_ppo)
        return planned

    def test_it_is_started_again(self, tries, capsys):
        tries += [Exception("timed out during startup"), None, None]
        ray_launch.run_in_ray(None, None)
        assert len(tries) == 1
        assert "trying again: timed out during startup" in capsys.readouterr().err

    def test_not_for_ever(self, tries):
        tries += [Exception("timed out during startup")] * ray_launch.RAY_START_TRIES
        with pytest.raises(ray_launch.RayStartError, match=r"Ray did not start.*during startup\. Its logs"):
            ray_launch.run_in_ray(None, None)
        assert not tries

    def test_an_error_of_the_training_is_not_tried_again(self, tries):
        tries += [RuntimeError("no memory"), None]
        with pytest.raises(RuntimeError, match="no memory"):
            ray_launch.run_in_ray(None, None)
        assert len(tries) == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_a_worker_is_told_with_its_traceback_through_however_many_processes_it_came(processes, monkeypatch):
    error: Exception = ConfigError("too small")
    for number in range(processes):
        error = RayTaskError(f"call_{number}", "ConfigError: too small", error).as_instanceof_cause()
    monkeypatch.setattr(main_ppo.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main_ppo, "dry_run", lambda config: (_ for _ in ()).throw(error))
    train = main_ppo.train_as_configured.__wrapped__
    with pytest.raises(SystemExit) as ended:
        train(OmegaConf.create({"dry_run": True}))
    assert str(ended.value).endswith("ConfigError: too small\nerror: the training ended: too small")


@pytest.mark.parametrize(("actor", "critic", "probes"), [("/models/q", None, 0), ("/m", "o/q", 1), ("Qwen/q", None, 1)])
def test_a_hub_is_probed_only_for_a_name_on_it(actor, critic, probes, monkeypatch):
    asked = []
    monkeypatch.setattr(main_ppo.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main_ppo, "dry_run", lambda config: None)
    monkeypatch.setattr(main_ppo, "go_offline_without_hub", lambda: asked.append(1))
    models = {"actor_rollout_ref": {"model": {"path": actor}}, "critic": {"model": {"path": critic}}}
    main_ppo.train_as_configured.__wrapped__(OmegaConf.create({"dry_run": True, **models}))
    assert len(asked) == probes


def test_a_full_disk_ends_a_run_with_one_line_that_says_how_to_go_on(tmp_path, monkeypatch):
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "global_step_4/actor").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    full = RayTaskError("save", "Traceback: No space left on device", RuntimeError("No space left on device"))
    monkeypatch.setattr(main_ppo.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main_ppo, "dry_run", lambda config: (_ for _ in ()).throw(full.as_instanceof_cause()))
    places = {"run_dir": str(tmp_path), "trainer": {"default_local_dir": str(checkpoints)}}
    with pytest.raises(SystemExit) as ended:
        main_ppo.train_as_configured.__wrapped__(OmegaConf.create({"dry_run": True, **places}))
    [line] = str(ended.value).splitlines()
    assert line.startswith("error: the training ended: a disk is full (")
    assert f" GB left at {tmp_path}" in line
    assert line.endswith(f"it goes on from {checkpoints}/global_step_4 (RuntimeError: No space left on device)")


@pytest.mark.parametrize("name", ["max_response_length", "val_max_response_length"])
def test_a_limit_above_what_verls_batches_hold_is_refused(tmp_path, name):
    limits = ("data.max_response_length=64", f"{AGENT}.{name}=65", f"{AGENT}.enable_agent=false")
    with pytest.raises(ConfigError, match=rf"agent\.{name}=65 and data\.max_response_length=64"):
        prepared(tmp_path, *limits)

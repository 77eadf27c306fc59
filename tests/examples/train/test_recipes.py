"""Every recipe in both profiles: its whole config, checked by verl's validator, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from verl.experimental.reward_loop import reward_manager  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402

from verl_tool.agent_loop.verl.config import options_in  # noqa: E402
from verl_tool.trainer import main_ppo  # noqa: E402

RECIPES = Path(__file__).parents[3] / "examples" / "train"
SCRIPTS = sorted(
    str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/train*.sh") if path.parent.name != "calculator"
)
PROFILES = ("gpu", "cpu")


def launched(script: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The script's end, with `settings` in its environment and nothing there that could change its knobs."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return subprocess.run(
        ["bash", str(RECIPES / script), "trainer.log_val_generations=3"],
        env=kept | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )


def command(script: str, **settings: str) -> list[str]:
    """The options that the script gives to the trainer."""
    done = launched(script, DRY_RUN="command", **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def completed(options: list[str]) -> DictConfig:
    """The config after all checks that a training makes."""
    with initialize_config_dir(str(Path(main_ppo.__file__).parent / "config"), version_base=None):
        config = compose("agent_ppo_trainer", overrides=[main_ppo.quoted(option) for option in options])
    main_ppo.complete(config)
    return config


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """`complete` names files in the environment."""
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)


def test_all_recipes_are_there():
    assert set(SCRIPTS) == {
        *("acecoder/train.sh", "acecoder/train_mini.sh", "acecoder/train_no_tool.sh"),
        *("gsm8k/train.sh", "math_tir/train.sh", "mathcoder/train.sh", "toolgrpo/train.sh"),
    }


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_config_is_valid(script, profile):
    config = completed(command(script, PROFILE=profile))
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    manager = reward_manager.get_reward_manager_cls(config.reward.reward_manager.name)
    manager.Options.model_validate(OmegaConf.to_container(config.reward.reward_kwargs))
    assert config.trainer.device == ("cpu" if profile == "cpu" else "cuda")
    assert config.trainer.log_val_generations == 3
    options = options_in(config)
    assert options.enable_agent == ("no_tool" not in script)
    assert options.tool_server_url == f"http://127.0.0.1:{config.tool_server.port}"
    rollout, tokens = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    assert rollout.max_model_len == tokens <= rollout.max_num_batched_tokens
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_both_profiles_set_the_same_options(script):
    """The same trainer, loop and reward manager: only values differ."""
    gpu, cpu = (dict(option.split("=", 1) for option in command(script, PROFILE=profile)) for profile in PROFILES)
    assert set(cpu) <= set(gpu) <= set(cpu) | {"actor_rollout_ref.rollout.load_format"}
    for name in ("reward.reward_manager.name", "algorithm.adv_estimator", "tool_server.start", "trainer.use_v1"):
        assert gpu.get(name) == cpu.get(name)
    assert cpu["platform"] == "cpu"


def test_variables_win_over_knobs_and_arguments_over_all():
    options = command("acecoder/train.sh", PROFILE="gpu", MODEL="some/model", N="4", ALGORITHM="rloo")
    config = completed([*options, "actor_rollout_ref.rollout.n=2"])
    assert (config.actor_rollout_ref.model.path, config.algorithm.adv_estimator) == ("some/model", "rloo")
    assert "actor_rollout_ref.rollout.n=4" in options
    assert config.actor_rollout_ref.rollout.n == 2


def test_ppo_gets_a_critic_from_the_same_model():
    options = command("acecoder/train.sh", PROFILE="gpu", MODEL="some/model", ALGORITHM="gae")
    assert {"critic.model.path=some/model", "actor_rollout_ref.model.path=some/model"} <= set(options)


def test_several_nodes_take_their_cluster_s_resources_and_a_tool_replica_each():
    for profile in PROFILES:
        config = completed(command("acecoder/train.sh", PROFILE=profile, NNODES="2", RAY_ADDRESS="auto"))
        ray = config.ray_kwargs.ray_init
        assert config.trainer.nnodes == 2
        check_batches(config)
        assert list(config.tool_server.args) == ["--num_replicas", "2"]
        assert (ray.num_cpus, ray.get("num_gpus"), ray.get("object_store_memory")) == (None, None, None)


def test_a_running_tool_server_is_used():
    config = completed(command("gsm8k/train.sh", PROFILE="cpu", TOOL_SERVER_URL="http://10.0.0.1:5000"))
    assert config.tool_server.start is None
    assert options_in(config).tool_server_url == "http://10.0.0.1:5000"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"PROFILE": "tpu"}, "PROFILE is 'tpu'"),
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
        completed(command("acecoder/train.sh", PROFILE="cpu", MINI_BATCH_SIZE="64"))
    options = reward_manager.get_reward_manager_cls("torl").Options
    with pytest.raises(ValidationError):
        options.model_validate({"rigth": 3})


def commands_for_data(script: str, **settings: str) -> list[str]:
    """The command lines by which the recipe makes its data."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    text = f'source "{RECIPES / script}" >/dev/null; python() {{ echo "$*"; }}; make_data'
    given = {"DRY_RUN": "command"} | settings
    return subprocess.run(
        ["bash", "-c", text], env=kept | given, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_tools_no_prompt_tells_of_any(script):
    for line in commands_for_data(script, PROFILE="gpu", USE_TOOL="false"):
        assert "--add_execution_prompt" not in line
        assert "acecoder.py" in line or "--no-tool" in line


@pytest.mark.parametrize("profile", PROFILES)
def test_runs_with_and_without_tools_share_neither_checkpoints_nor_data(profile):
    with_tools = command("math_tir/train.sh", PROFILE=profile)
    without = command("math_tir/train.sh", PROFILE=profile, USE_TOOL="false")
    for name in ("run_dir=", "data.train_files=", "data.val_files="):
        assert [o for o in with_tools if o.startswith(name)] != [o for o in without if o.startswith(name)]


OWN = """
source {launcher} own
knob RUN "{folder}/run"
knob SEED 7
knob SIZE 3
knob MODEL some/model
make_data() {{ mkdir -p "$DATA"; echo "$SIZE $(tool_flag)" >"$DATA/train.parquet"; }}
knob USE_TOOL true
make "$DATA" train.parquet make_data
echo "$RUN $DATA $SEED"
"""


def own_recipe(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """A recipe of one's own that names its folder, as far as its data."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    text = OWN.format(launcher=RECIPES / "launch.sh", folder=folder)
    given = {"PROFILE": "cpu"} | settings
    return subprocess.run(["bash", "-c", text], env=kept | given, capture_output=True, text=True, timeout=60)


def test_a_recipe_s_own_folders_and_seed_hold_unless_the_environment_names_others(tmp_path):
    assert own_recipe(tmp_path).stdout == f"{tmp_path}/run {tmp_path}/run/data 7\n"
    assert own_recipe(tmp_path, RUN=f"{tmp_path}/a", SEED="1").stdout == f"{tmp_path}/a {tmp_path}/a/data 1\n"
    assert own_recipe(tmp_path, DATA=f"{tmp_path}/d").stdout == f"{tmp_path}/run {tmp_path}/d 7\n"
    assert own_recipe(tmp_path, PROFILE="gpu", DATA=f"{tmp_path}/e").stdout == f"{tmp_path}/run {tmp_path}/e 7\n"


@pytest.mark.parametrize("changed", [{"SIZE": "4"}, {"USE_TOOL": "false"}, {}])
def test_data_made_with_other_settings_are_refused(tmp_path, changed):
    assert own_recipe(tmp_path).returncode == 0
    again = own_recipe(tmp_path, SEED="9", **changed)
    assert again.returncode == (2 if changed else 0), again.stderr
    for name, value in changed.items():
        assert f"and now {name}={value};" in again.stderr


def test_data_of_one_s_own_are_taken_as_they_are(tmp_path):
    (tmp_path / "train.parquet").write_text("mine")
    assert own_recipe(tmp_path, DATA=str(tmp_path), SIZE="5").returncode == 0
    assert (tmp_path / "train.parquet").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_s_own_dry_run_prints_the_config_and_leaves_nothing(tmp_path):
    settings = {"VERL_TOOL_VENV": sys.prefix, "VERL_TOOL_SKIP_INSTALL": "1"}
    done = launched("toolgrpo/train.sh", DRY_RUN="1", PROFILE="gpu", RUN=str(tmp_path / "run"), **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    config = OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    assert config.actor_rollout_ref.model.lora_rank == 128
    assert not (tmp_path / "run").exists()
    assert config.dry_run

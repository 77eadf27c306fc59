"""Repeat one update of a training from its stored trajectories, and compare its metrics with the stored ones."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from rich.table import Table

from eval_service.model.run_config import run_config
from verl_tool.agent_loop.verl.stored_step import StoredStep, stored_steps
from verl_tool.errors import ConfigError
from verl_tool.trainer.monitoring.run_metrics import entries, read_metrics
from verl_tool.trainer.preflight.parallelism import has_critic
from verl_tool.util.parent_death import signalled_with_parent

CONFIG = "retrain"
LOG = "printed.log"
NEEDED = ("actor/loss", "actor/grad_norm")
EXIT_SECONDS = 60.0
"""Time for an interrupted training to exit."""
_CHECKPOINT = re.compile(r"global_step_(\d+)")
_COMPARED = re.compile(r"(actor|critic)/(?!perf/)")
_REMOVED_VARIABLES = ("VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "WANDB_DIR")
"""Environment variables that would redirect the new training's files."""


@dataclass(frozen=True)
class MetricChange:
    name: str
    then: float
    now: float
    same: bool

    def to_json(self) -> str:
        return json.dumps({"where": self.name, "was": self.then, "now": self.now})


@dataclass
class RetrainReport:
    step: int
    tolerance: float
    metrics: list[MetricChange]
    without_row: list[str] = field(default_factory=list)

    @property
    def different(self) -> list[MetricChange]:
        return [metric for metric in self.metrics if not metric.same]

    def summary(self) -> str:
        return (
            f"step {self.step} repeated: {len(self.different)} of {len(self.metrics)} metrics of the update differ "
            f"by more than {self.tolerance:g}"
        )

    def lines(self) -> list[str]:
        return [metric.to_json() for metric in self.different]

    def unexpected_count(self, known: Collection[tuple[str, object]], *, reward_changed: bool = False) -> int:
        """Count the differences that are not in `known`: pairs of a metric and its new value."""
        return sum((metric.name, metric.now) not in known for metric in self.different)

    def tables(self) -> list[Table]:
        """Tabulate the required metrics and all that differ."""
        table = Table("metric", "then", "now", "difference", "")
        for metric in self.metrics:
            if metric.name in NEEDED or not metric.same:
                numbers = f"{metric.then:.7g}", f"{metric.now:.7g}", f"{metric.now - metric.then:.1e}"
                table.add_row(metric.name, *numbers, "" if metric.same else "differs")
        return [table]


def retrain(run: Path, step: int, folder: Path, tolerance: float) -> RetrainReport:
    """Repeat the update of a step in `folder`, and compare its metrics with the run's. Raises ConfigError if it cannot
    be repeated or fails."""
    folder = folder.resolve()
    config, then = make_retrain_config(run, step, folder), _read_step_metrics(run, step)
    _write_config(config, folder)
    _train(folder)
    # Only the metrics of this start, since the folder may have those of another run.
    now = _select_step({entry["step"]: entry["data"] for entry in entries(folder / "metrics.jsonl")}, step, folder)
    return RetrainReport(step, tolerance, list(compare_metrics(then, now, tolerance)))


def compare_metrics(then: Mapping[str, float], now: Mapping[str, float], tolerance: float) -> Iterator[MetricChange]:
    """Compare the update's metrics that both have. `tolerance` is relative; near 0, a hundredth of it is absolute."""
    for name in sorted({*then, *now}, key=lambda name: (name not in NEEDED, name)):
        if _COMPARED.match(name) and name in then and name in now:
            a, b = float(then[name]), float(now[name])
            same = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance / 100) or (math.isnan(a) and math.isnan(b))
            yield MetricChange(name, a, b, same)


def make_retrain_config(run: Path, step: int, folder: Path) -> DictConfig:
    """Return the config of a training that repeats a step of `run` and writes its files to `folder`. Raises ConfigError
    if the step cannot be repeated."""
    config = run_config(run)
    _check_folder(folder, run.resolve())
    if not config.get("trajectories_dir"):
        raise ConfigError(f"{run} has stored no trajectories (trajectories_dir=null)")
    _check_step(config, step)
    stored = StoredStep(Path(config.trajectories_dir), step, int(config.actor_rollout_ref.rollout.n))
    rows = int(config.data.train_batch_size) * int(config.actor_rollout_ref.rollout.n)
    if not config.trainer.use_v1 and len(stored) != rows:
        raise ConfigError(f"{stored.path} has {len(stored)} trajectories, but a step of the run has {rows}")
    weights = {"resume_mode": "disable"} if step == 1 else _find_weights(config, step)
    with open_dict(config):
        config.merge_with(_make_overrides(config, step, folder))
        config.trainer.update(weights)
    return config


def _check_folder(folder: Path, run: Path) -> None:
    """Raise ConfigError if the folder belongs to a training that was not started by `retrain`."""
    if folder.is_relative_to(run):
        raise ConfigError(f"{folder} lies in the folder of the run, which must not change; give another --run_dir")
    left = folder / "config.yaml"
    if left.is_file() and OmegaConf.select(OmegaConf.load(left), "actor_rollout_ref.replay_step") is None:
        raise ConfigError(f"{folder} is the folder of another training, which must not change; give another --run_dir")


def _make_overrides(config: DictConfig, step: int, folder: Path) -> dict[str, Any]:
    trainer: dict[str, Any] = {
        "default_local_dir": str(folder / "checkpoints"),
        "logger": ["file"],
        "save_freq": -1,
        "test_freq": -1,
        "val_before_train": False,
        "val_only": False,
        "del_local_ckpt_after_load": False,
        "rollout_data_dir": None,
    }
    data = {}
    if config.trainer.use_v1:
        # Trajectories sampled in advance are stored with the step that used them, without those that were filtered out.
        trainer["v1"] = {"trainer_mode": "sync", "sampler": {"sync_refill_failed_groups": False}}
        data = {"gen_batch_size": None}
    return {
        "dry_run": False,
        "doctor": False,
        "recipe": None,
        "save_last": False,
        "run_dir": str(folder),
        "trajectories_dir": str(folder / "trajectories"),
        "actor_rollout_ref": {"replay": str(config.trajectories_dir), "replay_step": step},
        # No tool is called: the config keeps the server's address, but no server needs to run.
        "tool_server": {"start": None},
        "data": data,
        "algorithm": {"filter_groups": {"enable": False}},
        "reward": {"num_workers": 1},
        "trainer": trainer,
    }


def _check_step(config: DictConfig, step: int) -> None:
    """Raise ConfigError if no step of this training, or not this one, can be repeated."""
    if config.trainer.use_v1 and config.trainer.v1.trainer_mode == "separate_async":
        raise ConfigError("a step of trainer.v1.trainer_mode=separate_async has several batches; it cannot be repeated")
    if config.algorithm.adv_estimator == "remax":
        raise ConfigError("algorithm.adv_estimator=remax needs baseline answers, which are not part of the batch")
    if OmegaConf.select(config, "distillation.enabled") or OmegaConf.select(config, "reward.reward_model.enable"):
        raise ConfigError("a run with a second model (distillation, reward.reward_model) cannot be repeated")
    if step == 1 and _has_random_weights(config):
        raise ConfigError(
            "step 1 began with random weights (an adapter's, a critic's) that are not stored; give a later step with a "
            "checkpoint before it"
        )


def _has_random_weights(config: DictConfig) -> bool:
    """Whether the training began with random weights."""
    return has_critic(config) or int(config.actor_rollout_ref.model.get("lora_rank") or 0) > 0


def _checkpoint_steps(config: DictConfig) -> list[int]:
    """Return the steps whose checkpoints have weights. verl leaves an empty folder of a checkpoint that it removes."""
    parts = ("actor", "critic") if has_critic(config) else ("actor",)
    folders = Path(config.trainer.default_local_dir).glob("global_step_*/")
    found = [(_CHECKPOINT.fullmatch(path.name), all((path / part).is_dir() for part in parts)) for path in folders]
    return sorted(int(name.group(1)) for name, complete in found if name and complete)


def _find_weights(config: DictConfig, step: int) -> dict[str, str]:
    """Return settings that resume from the checkpoint before `step`. Raises ConfigError if it does not exist."""
    saved = set(config.actor_rollout_ref.actor.checkpoint.save_contents)
    if missing := {"model", "optimizer", "extra"} - saved:
        raise ConfigError(
            f"the run's checkpoints lack {', '.join(sorted(missing))} "
            "(actor_rollout_ref.actor.checkpoint.save_contents); only step 1 can be repeated"
        )
    folder = Path(config.trainer.default_local_dir)
    checkpoints = _checkpoint_steps(config)
    if step - 1 not in checkpoints:
        stored = stored_steps(Path(config.trajectories_dir))
        first = [] if _has_random_weights(config) else [1]
        repeatable = ", ".join(
            str(number) for number in [*first, *(before + 1 for before in checkpoints)] if number in stored
        )
        raise ConfigError(
            f"step {step} began with the weights of global_step_{step - 1}, which {folder} lacks. Steps that can be "
            f"repeated: {repeatable or 'none'}. With trainer.save_freq=1 trainer.max_actor_ckpt_to_keep=null a run "
            "keeps the weights before each step (a critic's: trainer.max_critic_ckpt_to_keep=null)"
        )
    return {"resume_mode": "resume_path", "resume_from_path": str(folder / f"global_step_{step - 1}")}


def _read_step_metrics(run: Path, step: int) -> dict[str, float]:
    """Return the metrics of one step. Raises ConfigError if those of the actor's update are missing."""
    try:
        metrics = dict(read_metrics(run))
    except FileNotFoundError:
        raise ConfigError(f"{run} has no metrics.jsonl to compare with (its trainer.logger lacks file)") from None
    return _select_step(metrics, step, run)


def _select_step(metrics_by_step: Mapping[int, dict[str, float]], step: int, run: Path) -> dict[str, float]:
    metrics = metrics_by_step.get(step, {})
    if missing := [name for name in NEEDED if name not in metrics]:
        raise ConfigError(f"the metrics of {run} lack {' and '.join(missing)} of step {step}")
    return metrics


def _write_config(config: DictConfig, folder: Path) -> None:
    """Write the config on top of the trainer's defaults, since the run may predate some settings."""
    folder.mkdir(parents=True, exist_ok=True)
    defaults = OmegaConf.create({"defaults": ["agent_ppo_trainer", "_self_"]})
    OmegaConf.save(OmegaConf.merge(defaults, config), folder / f"{CONFIG}.yaml", resolve=True)


def _train(folder: Path) -> None:
    """Run the training, limited by the run's `stall_timeout`. Raises ConfigError with its error."""
    command = [sys.executable, "-m", "verl_tool.trainer.main_ppo", f"--config-path={folder}", f"--config-name={CONFIG}"]
    environment = {name: value for name, value in os.environ.items() if name not in _REMOVED_VARIABLES}
    log = folder / LOG
    with log.open("wb") as output:
        # A new session: only we interrupt the training, once, and it stops its own children.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=signalled_with_parent(signal.SIGTERM),
        )
        try:
            code = process.wait()
        finally:
            _interrupt(process)
    if code:
        lines = log.read_text("utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error:")] or lines or ["no output"]
        raise ConfigError(f"the repeated training exited with code {code}: {errors[-1]} (log: {log})")


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

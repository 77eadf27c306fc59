"""One update of a training made again from its stored trajectories, and what came out otherwise."""

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
SECONDS_TO_END = 60.0
"""For a training that is interrupted."""
_CHECKPOINT = re.compile(r"global_step_(\d+)")
_COMPARED = re.compile(r"(actor|critic)/(?!perf/)")
_NOT_PROVIDED = ("VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "WANDB_DIR")
"""Variables that would lead the new training's files elsewhere."""


@dataclass(frozen=True)
class Compared:
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
    metrics: list[Compared]
    without_row: list[str] = field(default_factory=list)

    @property
    def different(self) -> list[Compared]:
        return [metric for metric in self.metrics if not metric.same]

    def words(self) -> str:
        return (
            f"step {self.step} made again: {len(self.different)} of {len(self.metrics)} metrics of the update differ "
            f"by more than {self.tolerance:g}"
        )

    def lines(self) -> list[str]:
        return [metric.to_json() for metric in self.different]

    def unexpected_count(self, known: Collection[tuple[str, object]], *, asked: bool = False) -> int:
        """How many differences are not `known` (metric, and its value now)."""
        return sum((metric.name, metric.now) not in known for metric in self.different)

    def tables(self) -> list[Table]:
        """The metrics that decide, and all that differ."""
        table = Table("metric", "then", "now", "difference", "")
        for metric in self.metrics:
            if metric.name in NEEDED or not metric.same:
                numbers = f"{metric.then:.7g}", f"{metric.now:.7g}", f"{metric.now - metric.then:.1e}"
                table.add_row(metric.name, *numbers, "" if metric.same else "differs")
        return [table]


def retrain(run: Path, step: int, folder: Path, tolerance: float) -> RetrainReport:
    """Make the update of a step again in `folder`, and compare its metrics with the run's. Raises ConfigError if it
    cannot be made again, or ends in an error."""
    folder = folder.resolve()
    config, then = retraining(run, step, folder), _metrics(run, step)
    _write(config, folder)
    _train(folder)
    # Of this start alone: an earlier one may have been another run's.
    now = _updated({entry["step"]: entry["data"] for entry in entries(folder / "metrics.jsonl")}, step, folder)
    return RetrainReport(step, tolerance, list(compared(then, now, tolerance)))


def compared(then: Mapping[str, float], now: Mapping[str, float], tolerance: float) -> Iterator[Compared]:
    """The metrics of the update that both tell; `tolerance` is relative, and near 0 a hundredth of it absolute."""
    for name in sorted({*then, *now}, key=lambda name: (name not in NEEDED, name)):
        if _COMPARED.match(name) and name in then and name in now:
            a, b = float(then[name]), float(now[name])
            same = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance / 100) or (math.isnan(a) and math.isnan(b))
            yield Compared(name, a, b, same)


def retraining(run: Path, step: int, folder: Path) -> DictConfig:
    """The config of a training that makes a step of `run` again, and leaves in `folder` what a training leaves. Raises
    ConfigError if that step cannot be made again."""
    config = run_config(run)
    _reject_folder(folder, run.resolve())
    if not config.get("trajectories_dir"):
        raise ConfigError(f"{run} has stored no trajectories (trajectories_dir=null)")
    _reject(config, step)
    stored = StoredStep(Path(config.trajectories_dir), step, int(config.actor_rollout_ref.rollout.n))
    rows = int(config.data.train_batch_size) * int(config.actor_rollout_ref.rollout.n)
    if not config.trainer.use_v1 and len(stored) != rows:
        raise ConfigError(f"{stored.path} has {len(stored)} trajectories, and a step of the run has {rows}")
    weights = {"resume_mode": "disable"} if step == 1 else _before(config, step)
    with open_dict(config):
        config.merge_with(_changes(config, step, folder))
        config.trainer.update(weights)
    return config


def _reject_folder(folder: Path, run: Path) -> None:
    """Raises ConfigError for the folder of a training that is not one of ours."""
    if folder.is_relative_to(run):
        raise ConfigError(f"{folder} lies in the run's own folder, which is left as it is; give another --run_dir")
    left = folder / "config.yaml"
    if left.is_file() and OmegaConf.select(OmegaConf.load(left), "actor_rollout_ref.replay_step") is None:
        raise ConfigError(f"{folder} is the folder of another training, which is left as it is; give another --run_dir")


def _changes(config: DictConfig, step: int, folder: Path) -> dict[str, Any]:
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
        # Batches that were sampled ahead are stored with the step that was made of them, without what was filtered out.
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
        # Nothing is called: the server's address stands in the config, and need not answer.
        "tool_server": {"start": None},
        "data": data,
        "algorithm": {"filter_groups": {"enable": False}},
        "reward": {"num_workers": 1},
        "trainer": trainer,
    }


def _reject(config: DictConfig, step: int) -> None:
    """Raises ConfigError that tells why no step of this training, or not this one, can be made again."""
    if config.trainer.use_v1 and config.trainer.v1.trainer_mode == "separate_async":
        raise ConfigError("a step of trainer.v1.trainer_mode=separate_async is no one batch; it cannot be made again")
    if config.algorithm.adv_estimator == "remax":
        raise ConfigError("algorithm.adv_estimator=remax compares with answers that are no part of the batch")
    if OmegaConf.select(config, "distillation.enabled") or OmegaConf.select(config, "reward.reward_model.enable"):
        raise ConfigError("a run with a second model (distillation, reward.reward_model) cannot be made again")
    if step == 1 and _begins_drawn(config):
        raise ConfigError(
            "step 1 began with weights that were drawn at random (an adapter's, a critic's) and are in no file; "
            "give a later step, before which there is a checkpoint"
        )


def _begins_drawn(config: DictConfig) -> bool:
    """Whether the first weights were drawn at random."""
    return has_critic(config) or int(config.actor_rollout_ref.model.get("lora_rank") or 0) > 0


def _stored_steps(config: DictConfig) -> list[int]:
    """Steps behind which the weights are kept. Of a checkpoint that it removes verl leaves a folder without them."""
    parts = ("actor", "critic") if has_critic(config) else ("actor",)
    folders = Path(config.trainer.default_local_dir).glob("global_step_*/")
    found = [(_CHECKPOINT.fullmatch(path.name), all((path / part).is_dir() for part in parts)) for path in folders]
    return sorted(int(name.group(1)) for name, whole in found if name and whole)


def _before(config: DictConfig, step: int) -> dict[str, str]:
    """Settings by which the training begins with the checkpoint before `step`. Raises ConfigError if there is none."""
    saved = set(config.actor_rollout_ref.actor.checkpoint.save_contents)
    if missing := {"model", "optimizer", "extra"} - saved:
        raise ConfigError(
            f"the run's checkpoints hold no {', '.join(sorted(missing))} "
            "(actor_rollout_ref.actor.checkpoint.save_contents); only step 1 can be made again"
        )
    folder = Path(config.trainer.default_local_dir)
    retained = _stored_steps(config)
    if step - 1 not in retained:
        stored = stored_steps(Path(config.trajectories_dir))
        first = [] if _begins_drawn(config) else [1]
        repeatable = ", ".join(
            str(number) for number in [*first, *(before + 1 for before in retained)] if number in stored
        )
        raise ConfigError(
            f"step {step} began with the weights of global_step_{step - 1}, and {folder} has none. Steps that can be "
            f"made again: {repeatable or 'none'}. With trainer.save_freq=1 trainer.max_actor_ckpt_to_keep=null a run "
            "keeps the weights before each step (a critic's: trainer.max_critic_ckpt_to_keep=null)"
        )
    return {"resume_mode": "resume_path", "resume_from_path": str(folder / f"global_step_{step - 1}")}


def _metrics(run: Path, step: int) -> dict[str, float]:
    """Of one step. Raises ConfigError if those of an update of the actor are not there."""
    try:
        metrics = dict(read_metrics(run))
    except FileNotFoundError:
        raise ConfigError(
            f"{run} has no metrics.jsonl (trainer.logger without file): nothing to compare with"
        ) from None
    return _updated(metrics, step, run)


def _updated(told: Mapping[int, dict[str, float]], step: int, run: Path) -> dict[str, float]:
    metrics = told.get(step, {})
    if missing := [name for name in NEEDED if name not in metrics]:
        raise ConfigError(f"the metrics of {run} tell no {' and no '.join(missing)} of step {step}")
    return metrics


def _write(config: DictConfig, folder: Path) -> None:
    """Over the trainer's defaults: the run may be of a version that lacked some setting."""
    folder.mkdir(parents=True, exist_ok=True)
    defaults = OmegaConf.create({"defaults": ["agent_ppo_trainer", "_self_"]})
    OmegaConf.save(OmegaConf.merge(defaults, config), folder / f"{CONFIG}.yaml", resolve=True)


def _train(folder: Path) -> None:
    """Raises ConfigError that quotes the training's error. Its own limit is the run's `stall_timeout`."""
    command = [sys.executable, "-m", "verl_tool.trainer.main_ppo", f"--config-path={folder}", f"--config-name={CONFIG}"]
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PROVIDED}
    log = folder / LOG
    with log.open("wb") as output:
        # In a session of its own: it is interrupted once, by us, and ends what it has started.
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
            _end(process)
    if code:
        lines = log.read_text("utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error:")] or lines or ["nothing was printed"]
        raise ConfigError(f"the training that makes it again ended with code {code}: {errors[-1]} (more in {log})")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

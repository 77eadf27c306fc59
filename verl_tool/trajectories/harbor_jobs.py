"""The trajectories of a run as jobs of Harbor 0.26, which ``harbor view`` opens.

A file of records is a job, a row of the data set a task, and a trajectory a trial::

    JOBS/NAME.step_3/config.json, result.json
    JOBS/NAME.step_3/TRIAL/config.json, result.json, agent/trajectory.json, verifier/reward.json
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from yaml import YAMLError

from verl_tool.agent_loop.trajectory import REWARD_FAULT, StopReason, Trajectory
from verl_tool.errors import ConfigError
from verl_tool.trajectories import atif
from verl_tool.trajectories.files import documents, trajectories_in
from verl_tool.trajectories.turns import Json

_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_ENVIRONMENT = {"import_path": "verl_tool"}
"""Harbor's place for an environment that is not one of its own."""


@dataclass(frozen=True)
class RunTrajectory:
    """A trajectory, and where it is stored: line `line` of ``FILE.jsonl``."""

    file: str
    line: int
    trajectory: Trajectory


def read_run(source: Path, lost: Counter[str]) -> Iterator[RunTrajectory]:
    """Yield the trajectories of a run, an evaluation or a file; what has none is counted in `lost`. Raises ConfigError
    that names the file and the line."""
    for where, document in documents(source):
        try:
            read = trajectories_in(document, None)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if read is None:
            lost["answers without a trajectory"] += 1
            continue
        lost.update(read.not_carried)
        name, _, line = where.rpartition(":")
        trajectory = read.result
        if "trajectory" in document:  # an evaluation's record has the row and the grading next to the trajectory
            extra = {"index": document.get("index"), REWARD_FAULT: document.get("reward_fault") or ""}
            trajectory = replace(trajectory, reward=document.get("score"), extra=trajectory.extra | extra)
        yield RunTrajectory(Path(name).stem, int(line), trajectory)


@dataclass
class _Job:
    """What a job's own files say of its trials."""

    folder: Path
    model: str | None
    time: datetime
    """Of the conversion: Harbor requires dates, and records have durations only."""
    tokens: Counter[str] = field(default_factory=Counter)
    evals: dict[str, Json] = field(default_factory=dict)
    """Rewards and failures by Harbor's name of agent, model and data set."""
    count: int = 0

    @property
    def agent(self) -> Json:
        return {"name": atif.AGENT} | ({"model_name": self.model} if self.model else {})

    def write_trial(self, stored: RunTrajectory, document: Json) -> None:
        trajectory = stored.trajectory
        source = str(trajectory.row.get("data_source") or "rows")
        task = _ODD.sub("_", f"{source}-{_row_name(trajectory)}")
        name = f"{task[-48:]}__{stored.line}"
        folder, totals = self.folder / name, document["final_metrics"]
        reward, problem = trajectory.reward, _failure(trajectory)
        started = self.time - timedelta(seconds=trajectory.timings.total)
        times = {"started_at": started.isoformat(), "finished_at": self.time.isoformat()}
        config = {"task": {"path": task}, "trial_name": name, "trials_dir": str(self.folder), "agent": self.agent}
        config["environment"] = _ENVIRONMENT
        result: Json = {
            "id": _id(folder),
            "task_name": task,
            "trial_name": name,
            "trial_uri": folder.resolve().as_uri(),
            "task_id": {"path": task},
            "source": source,
            "task_checksum": hashlib.sha256(repr(trajectory.prompt_ids).encode()).hexdigest(),
            "config": config,
            "agent_info": {"name": atif.AGENT, "version": version("verl-tool")},
            "agent_result": {
                "n_input_tokens": totals["total_prompt_tokens"],
                "n_output_tokens": totals["total_completion_tokens"],
                "metadata": {
                    "stored_at": f"{stored.file}:{stored.line}",
                    "stop": trajectory.stop.value,
                    "excluded": trajectory.excluded and trajectory.excluded.value,
                },
            },
            "agent_execution": times,
            **times,
        }
        if self.model:
            result["agent_info"]["model_info"] = {"name": self.model}
        stats = self._stats(source)
        if problem is not None:
            kind, message = problem
            result["exception_info"] = {
                "exception_type": kind,
                "exception_message": message,
                "exception_traceback": "",
                "occurred_at": self.time.isoformat(),
            }
            stats["n_errors"] += 1
            stats["exception_stats"].setdefault(kind, []).append(name)
        elif reward is not None and math.isfinite(reward):
            result["verifier_result"] = {"rewards": {"reward": reward}}
            stats["n_trials"] += 1
            stats["reward_stats"]["reward"].setdefault(reward, []).append(name)
            _write(folder / "verifier/reward.json", json.dumps({"reward": reward}))
        _write(folder / "agent/trajectory.json", json.dumps(document, ensure_ascii=False))
        _write(folder / "config.json", json.dumps(config))
        _write(folder / "result.json", json.dumps(result))
        self.count += 1
        self.tokens.update(input=totals["total_prompt_tokens"], output=totals["total_completion_tokens"])

    def _stats(self, source: str) -> Json:
        name = "__".join([atif.AGENT, *([self.model] if self.model else []), source])
        new: Json = {"n_trials": 0, "n_errors": 0, "reward_stats": {"reward": {}}, "exception_stats": {}}
        return self.evals.setdefault(name, new)

    def close(self) -> None:
        """Write the job's own files."""
        for stats in self.evals.values():
            total = sum(reward * len(names) for reward, names in stats["reward_stats"]["reward"].items())
            stats["metrics"] = [{"mean": total / stats["n_trials"]}] if stats["n_trials"] else []
        result = {
            "id": _id(self.folder),
            "started_at": self.time.isoformat(),
            "finished_at": self.time.isoformat(),
            "n_total_trials": self.count,
            "stats": {
                "n_completed_trials": self.count,
                "n_errored_trials": sum(stats["n_errors"] for stats in self.evals.values()),
                "evals": self.evals,
                "n_input_tokens": self.tokens["input"],
                "n_output_tokens": self.tokens["output"],
            },
        }
        config = {"job_name": self.folder.name, "jobs_dir": str(self.folder.parent), "agents": [self.agent]}
        _write(self.folder / "config.json", json.dumps(config | {"environment": _ENVIRONMENT}))
        _write(self.folder / "result.json", json.dumps(result))


def write_jobs(
    trajectories: Iterable[RunTrajectory], folder: Path, name: str, model: str | None, lost: Counter[str]
) -> int:
    """Write a job for each file of `trajectories`, which are grouped by file; what is not carried is counted in `lost`.
    Returns the number of trajectories. Raises ConfigError if a job's folder exists."""
    job, file, count = None, None, 0
    for stored in trajectories:
        if job is None or stored.file != file:
            if job is not None:
                job.close()
            job, file = _new_job(folder / f"{_ODD.sub('_', name)}.{_ODD.sub('_', stored.file)}", model), stored.file
        written = atif.write(stored.trajectory, model)
        lost.update(written.not_carried)
        job.write_trial(stored, written.result)
        count += 1
    if job is not None:
        job.close()
    return count


def _new_job(folder: Path, model: str | None) -> _Job:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; remove it, or choose another --name") from None
    return _Job(folder, model, datetime.now(timezone.utc))


def _row_name(trajectory: Trajectory) -> str:
    """The index of the row, or a name by which trajectories with the same prompt are one task."""
    index = trajectory.row["index"]
    return str(index) if index is not None else hashlib.sha256(repr(trajectory.prompt_ids).encode()).hexdigest()[:8]


def _failure(trajectory: Trajectory) -> tuple[str, str] | None:
    """Why a trajectory counts as an error, which it does if it has no reward through no fault of the model."""
    if trajectory.fault is not None:
        return "ToolFault", f"{trajectory.fault.kind.value}: {trajectory.fault.message}"
    if trajectory.stop is StopReason.ABORTED:
        return "Aborted", "the generator aborted it"
    problem = trajectory.extra.get(REWARD_FAULT)
    return ("GradingError", str(problem)) if problem else None


def _id(folder: Path) -> str:
    return str(uuid5(NAMESPACE_URL, folder.resolve().as_uri()))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def model_of(source: Path) -> str | None:
    """The name of the model that a run or an evaluation was of; None if its folder does not say. Raises ConfigError if
    what it says cannot be read."""
    from omegaconf import OmegaConf  # slow imports

    from eval_service.evaluation.record import ABOUT
    from eval_service.model.run_config import CONFIG_FILES, run_config

    about = source / ABOUT
    try:
        if about.is_file():
            name = json.loads(about.read_text(encoding="utf-8")).get("model")
        elif any((source / each).is_file() for each in CONFIG_FILES):
            name = OmegaConf.select(run_config(source), "actor_rollout_ref.model.path")
        else:
            return None
    except (ValueError, YAMLError) as error:
        raise ConfigError(f"{source} does not say which model it is of ({error}); give --model") from error
    return Path(str(name)).name if name else None

"""Trainings of a tiny calculator model from the command line, with real verl, vLLM and tool server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from listeners import Listeners

pytest.importorskip("verl")
pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

TRAINS_ON_CPU = (
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="for machines without accelerator"),
)
"""Pytest marks of all tests that train."""
RECIPE = Path(__file__).parents[2] / "examples" / "train" / "calculator"
ROLLOUT, ACTOR, AGENT = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "agent"))
SUMMARIES = (
    *(f"{AGENT}.context=summarise", f"{AGENT}.context_tokens=24", f"{AGENT}.summary_tokens=4"),
    *(f"{AGENT}.summary_prompt=go", f"{AGENT}.summary_continuation=on"),
)
"""A model that summarises its context: rollouts of several rows."""
MARK = "VERL_TOOL_TEST_RUN"
"""A variable that every process of a run inherits. It identifies processes that are left over."""


@dataclass(frozen=True)
class Calculator:
    """Inputs of trainings: problems, and a model that is right often enough to learn from."""

    data: Path
    model: Path


def prepare(folder: Path) -> Calculator:
    """Make both. The model is right about a third of the time, because a step without right answers teaches nothing."""
    source, model, data = folder / "source", folder / "model", folder / "data"
    script = RECIPE.parents[1] / "data_preprocess" / "calculator.py"
    _finish(script, "--local_dir", source, "--train_size", "64", "--test_size", "16", seconds=200)
    _finish(RECIPE / "warmup.py", "--output", model, "--target", "0.3", "--tool_share", "1", seconds=400)
    _finish(RECIPE / "rows_for_run.py", "--data", source, "--out", data, seconds=200)
    return Calculator(data, model)


@dataclass(frozen=True)
class Run:
    """A training and its folder."""

    folder: Path
    overrides: tuple[str, ...]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def finish(self, seconds: float = 900.0) -> str:
        """Train to the end and return the output."""
        with self.started() as process:
            code = process.wait(seconds)
        assert code == 0, self.printed()[-8000:]
        return self.printed()

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run a training in a process group of its own, as in a terminal. It is killed at the end of the block.

        No process of it may listen on an address that others can reach, at any moment.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "verl_tool.trainer.main_ppo", *self.overrides],
                env=_environment() | {MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with Listeners(process.pid) as listeners:
                    yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    _killed_after(process, 60.0)
            assert listeners.on_loopback
            assert listeners.open_to_others == []

    def interrupt(self, process: subprocess.Popen[bytes], seconds: float = 200.0) -> int:
        """Send Ctrl-C's signal to every process of the group. Returns the exit code."""
        os.killpg(process.pid, signal.SIGINT)
        return process.wait(seconds)

    def wait_until(self, condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 900) -> None:
        """Wait for a condition on the training."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert process.poll() is None, self.printed()[-8000:]
            assert time.monotonic() < deadline, self.printed()[-8000:]
            time.sleep(0.2)

    def steps(self, name: str = "metrics.jsonl") -> dict[int, dict[str, Any]]:
        """Return the metrics of each step that trained the model."""
        lines = [json.loads(line) for line in (self.folder / name).read_text().splitlines()]
        return {line["step"]: line["data"] for line in lines if "actor/grad_norm" in line["data"]}

    def printed(self) -> str:
        """Return the output of the last start of the training."""
        return self._log.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Return the running processes of this run: command lines by process id."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            if f"{MARK}={self.mark}".encode() in _read(path / "environ"):
                found[int(path.name)] = _read(path / "cmdline").replace(b"\0", b" ").decode(errors="replace")
        return found

    @property
    def _log(self) -> Path:
        return self.folder / "printed.log"


def small_run(folder: Path, calculator: Calculator, *overrides: str) -> Run:
    """Make a training of two steps of 64 trajectories with one checkpoint at the end. `overrides` come last."""
    return Run(
        folder,
        (
            *("platform=cpu", f"run_dir={folder}", "tool_server.start=calculator,finish"),
            *("tool_server.start_timeout=400", "stall_timeout=600", f"actor_rollout_ref.model.path={calculator.model}"),
            *(f"data.train_files={calculator.data}/train.parquet", f"data.val_files={calculator.data}/test.parquet"),
            *("data.train_batch_size=8", "data.max_prompt_length=32", "data.max_response_length=48"),
            *(f"{AGENT}.action_stop_tokens=['<call>','<submit>']", f"{AGENT}.max_turns=4"),
            *(f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=64", f"{ACTOR}.optim.lr=1e-3"),
            *(f"{ACTOR}.use_kl_loss=false", f"{ROLLOUT}.n=8", f"{ROLLOUT}.max_model_len=96"),
            *(f"{ROLLOUT}.max_num_seqs=64", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64"),
            *("reward.reward_manager.name=calculator", "trainer.total_training_steps=2", "trainer.total_epochs=9"),
            *("trainer.logger=[console,file]", "trainer.save_freq=2", "trainer.test_freq=2"),
            *overrides,
        ),
    )


def _finish(*command: str | Path, seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=_environment(), capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _environment() -> dict[str, str]:
    """Return the environment: with a cache of bytecode, since imports in a dozen processes take minutes, and without
    another run's variables."""
    dropped = ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "TQDM_DISABLE")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return kept | {"OMP_NUM_THREADS": "1"}


def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""

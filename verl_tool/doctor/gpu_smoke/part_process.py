"""One part in processes of its own: with a deadline, its memory measured, and nothing of it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from verl_tool.doctor.gpu_smoke.part import Part, PartContext, PartResult
from verl_tool.util.parent_death import signalled_with_parent

MARK = "VERL_TOOL_SMOKE_PART"
"""A variable that all processes of a part inherit, by which those that outlive it are found."""
GRACE_SECONDS = 20.0
"""Behind SIGTERM; then everything that carries the mark is killed."""
SAMPLE_SECONDS = 0.5
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled", "VLLM_NO_USAGE_STATS": "1"}


def run_part(part: Part, context: PartContext, deadline_seconds: float) -> PartResult:
    """Run `part`. What it prints is in ``logs/NAME.log`` of the folder.

    A crash, a hang and a lack of memory are failures of this part alone. On an exception, KeyboardInterrupt included,
    all of its processes are ended before it goes on.
    """
    result = context.folder / "results" / f"{part.name}.json"
    log = context.folder / "logs" / f"{part.name}.log"
    for file in (result, log):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
    memory = MemoryPeak(context.device)
    started = time.monotonic()
    with _started(part, context, result, log) as (process, mark):
        while process.poll() is None and time.monotonic() - started < deadline_seconds:
            memory.sample(mark)
            try:
                process.wait(SAMPLE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        code = process.poll()
    seconds = time.monotonic() - started
    answer = _read(result, code, deadline_seconds, log)
    result_of_part = PartResult(part.name, **answer, seconds=round(seconds, 1))
    result_of_part.peak_device_bytes, result_of_part.peak_host_bytes = memory.peaks()
    return result_of_part


@contextmanager
def _started(
    part: Part, context: PartContext, result: Path, log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "verl_tool.doctor.gpu_smoke.part_main", part.function, context.device]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(context.folder), str(result)],
            env=os.environ | _OFFLINE | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=signalled_with_parent(signal.SIGTERM),
        )
        try:
            yield process, mark
        finally:
            end_processes(process, mark)


def end_processes(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the part's process, and kill what it has left behind, in whatever session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    # One that is being killed may have started another.
    for _ in range(20):
        found = marked_processes(mark)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        if not found:
            break
        time.sleep(0.1)


def marked_processes(mark: str) -> list[int]:
    """Ids of the processes that carry the mark, zombies left out."""
    variable = f"{MARK}={mark}".encode()
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if variable in _read_bytes(path / "environ")]


class MemoryPeak:
    """Largest use of host and device memory over samples."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._device_before = device_bytes() if self._on_gpu else None
        self._device, self._host = self._device_before, 0

    def sample(self, mark: str) -> None:
        """Look at the part's processes, and at the device."""
        self._host = max(self._host, sum(map(_proportional_bytes, marked_processes(mark))))
        if self._on_gpu and (used := device_bytes()) is not None:
            self._device = max(self._device or 0, used)

    def peaks(self) -> tuple[int | None, int]:
        """Device, less what was in use before, and host."""
        before, peak = self._device_before, self._device
        return (None if before is None or peak is None else peak - before), self._host


def device_bytes() -> int | None:
    """Memory in use on the fullest of the visible GPUs, by nvidia-smi; None if it does not tell."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = ["-i", devices] if devices else []
    command = ["nvidia-smi", *chosen, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return max(int(line) for line in done.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _proportional_bytes(pid: int) -> int:
    for line in _read_bytes(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _read(result: Path, code: int | None, deadline_seconds: float, log: Path) -> dict[str, Any]:
    if result.is_file():
        return json.loads(result.read_text())
    if code is None:
        return {"status": "failed", "reason": f"not done after {deadline_seconds:.0f} s; see logs/{log.name}"}
    ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return {"status": "failed", "reason": f"its process {ending}: {last[:300]}"}

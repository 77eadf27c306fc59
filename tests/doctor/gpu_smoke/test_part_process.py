"""A part that crashes, hangs or leaves something behind costs itself only; real processes, no doubles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from verl_tool.doctor.gpu_smoke.part import Part, PartContext, PartResult
from verl_tool.doctor.gpu_smoke.part_process import MARK, marked_processes, run_part

pytestmark = pytest.mark.slow

HELPERS = Path(__file__).parents[2] / "helpers"


OF_THIS_TEST = "VERL_TOOL_SMOKE_TEST"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts find their checks, and all that a test starts can be told from what else runs on this machine."""
    monkeypatch.setenv(OF_THIS_TEST, uuid.uuid4().hex)
    monkeypatch.setenv("PYTHONPATH", f"{HELPERS}{os.pathsep}{Path(__file__).parents[3]}")


def result_of(function: str, folder: Path, deadline: float = 60.0) -> PartResult:
    return run_part(Part(function, "", f"odd_parts:{function}", ()), PartContext("cpu", folder), deadline)


def test_figures_time_and_memory_are_measured(tmp_path):
    result = result_of("measure", tmp_path)
    assert (result.status, result.reason) == ("passed", "")
    assert result.figures == {"device": "cpu", "bytes": 200 << 20}
    assert result.seconds >= 2
    assert result.peak_host_bytes > 200 << 20
    assert result.peak_device_bytes is None


def test_a_part_may_say_that_there_is_nothing_to_check(tmp_path):
    result = result_of("skip", tmp_path)
    assert (result.status, result.reason) == ("skipped", "nothing to see")


def test_a_failed_check_reports_its_reason_and_logs_the_traceback(tmp_path):
    result = result_of("fail", tmp_path)
    assert (result.status, result.reason) == ("failed", "2 is not 3")
    assert "Traceback" in (tmp_path / "logs" / "fail.log").read_text()


def test_a_crash_reports_the_signal_and_the_last_output(tmp_path):
    result = result_of("crash", tmp_path)
    assert (result.status, result.reason) == ("failed", "its process was killed by SIGKILL: about to crash")


def test_a_part_that_cannot_be_imported_fails(tmp_path):
    result = result_of("no_such_check", tmp_path)
    assert result.status == "failed"
    assert "no_such_check" in result.reason


def test_a_result_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path):
    for stale in ("measure", "crash"):
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / "results" / f"{stale}.json").write_text('{"status": "passed"}')
    assert result_of("crash", tmp_path).status == "failed"


def started() -> set[int]:
    """All processes that the test has started, but for zombies."""
    mark = f"{OF_THIS_TEST}={os.environ[OF_THIS_TEST]}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_hanging_part_is_ended_with_all_that_it_started(tmp_path):
    result = result_of("hang_with_a_child", tmp_path, deadline=6.0)
    assert result.status == "failed"
    assert result.reason.startswith("not done after 6 s")
    assert started() == set()


def test_what_a_part_leaves_behind_is_killed(tmp_path):
    assert result_of("leave_a_child", tmp_path).status == "passed"
    assert started() == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_the_driver_leaves_no_process(tmp_path, number):
    script = (
        "import pathlib, signal, sys\n"
        "from verl_tool.doctor.gpu_smoke.part import Part, PartContext\n"
        "from verl_tool.doctor.gpu_smoke.part_process import run_part\n"
        "from verl_tool.doctor.gpu_smoke.smoke_cli import _interrupt\n"
        "signal.signal(signal.SIGTERM, _interrupt)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells ignore it for what runs in the background
        "part = Part('hang', '', 'odd_parts:hang_with_a_child', ())\n"
        "run_part(part, PartContext('cpu', pathlib.Path(sys.argv[1])), 60)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "hangs").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(started()) == 3  # the driver, the part, and the part's child
        driver.send_signal(number)
        assert driver.wait(60) != 0
    finally:
        driver.kill()
    assert started() == set()


def test_marked_processes_are_found_in_any_session():
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: "some-mark"}, start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while marked_processes("some-mark") != [child.pid] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marked_processes("some-mark") == [child.pid]
        assert marked_processes("another-mark") == []
    finally:
        child.kill()
        child.wait()

"""Run tests against a solution inside the sandbox and print a verdict for each. The program that `/run_code` receives
calls `main`, with the folder of this file first in its path.

Stdin is one JSON object, see `Judge`. Stdout has lines of ``<token> <json>``, and the first says that the judge is
ready. The solution runs in other processes (`processes`), which cannot reach this process: its tests, memory, stdin or
stdout.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from types import SimpleNamespace

from guard import Guard
from link import LINE, MAX_MESSAGE_BYTES, PeerExitedError
from output_equality import is_equal_output
from processes import LATE, MAX_PROGRAMS, MODULE, UNCAUGHT, UNSTARTED, Spawner, hide
from remote import JudgeLink
from testcase import BEFORE, EQUAL, HELD, NOTE, PRESENT, TEXT, TestCase, is_equal, is_present
from values import ValueRejected

FOLDER = os.getcwd()
START_SECONDS = 15.0
"""Time limit for the start of the process that starts the solution's processes."""
MAX_DETAIL_CHARS = 200
"""Maximum length of a verdict's detail."""
MAX_VALUE_CHARS = 600
"""Maximum length of one value in a verdict."""
MAX_STDERR_BYTES = 1 << 14
"""Only so much of the end of a program's stderr is read."""


GRACE_SECONDS = 1.0
"""Time for the judge to notice the end of the time of a test. It is killed after that."""


class TestDeadline:
    """A timer that kills this process unless it is moved in time, even while a C function runs or the process is
    stopped. So a solution cannot cost the judge more than the time of one test. See timer_create(2)."""

    def __init__(self):
        libc = ctypes.CDLL(None, use_errno=True)
        self._library = libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)
        self._timer = ctypes.c_void_p()
        event = (ctypes.c_int * 16)(0, 0, signal.SIGKILL)  # a struct sigevent: value, signal, SIGEV_SIGNAL
        if self._library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create failed")

    def move(self, seconds):
        """Set the deadline to so many seconds from now."""
        whole, fraction = divmod(seconds, 1)
        times = (ctypes.c_long * 4)(0, 0, int(whole), int(fraction * 1e9))
        if self._library.timer_settime(self._timer, 0, times, None):
            raise OSError(ctypes.get_errno(), "timer_settime failed")


class OutOfTime(BaseException):
    """The time of a test is over. It is not an Exception, so that no test catches it."""


def restrict_import_path():
    """Prevent the judge from importing a file that the solution has written."""
    prefixes = tuple(f"{prefix}{os.sep}" for prefix in (sys.base_prefix, sys.prefix))
    sys.path[:] = [path for path in sys.path if path.startswith(prefixes)]


def detach_streams():
    """Return a file on stdout, and redirect stdin and stdout of tests to nowhere. A test must not break the line of a
    verdict in two, and a link that the solution leaves must not lead a test to the data on stdin."""
    verdicts = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return verdicts


def can_inspect_processes():
    """Whether this user may read the memory of any process (root, CAP_SYS_PTRACE), so that nothing can be hidden."""
    with open("/proc/self/status", encoding="ascii") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 19 & 1)


def connect(spawner, evaluator=None):
    """Start a process that serves a module, and return the judge's link to it. For `evaluator` see `JudgeLink`."""
    local, theirs = socket.socketpair()
    with theirs:
        spawner.start(MODULE, [theirs.fileno()])
    return JudgeLink(local, evaluator)


class Judge:
    """Judge of one solution. `job` has ``token``, ``solution``, ``tests`` (Python texts), ``programs`` (pairs of stdin
    and expected stdout), ``prelude`` (whether imports and a recursion limit precede the solution), ``strict`` (a
    program must print exactly the expected output, and exit with 0), ``test_seconds``, ``total_seconds`` and
    ``max_display_chars`` (of all values in the verdicts; 0: none)."""

    def __init__(self, spawner, evaluation_spawner, job, report):
        """`evaluation_spawner` starts processes that never run the solution. It is None if no test evaluates text."""
        self._spawner = spawner
        self._evaluation_spawner = evaluation_spawner
        self._deadline = TestDeadline()
        self._job = job
        self._report = report
        self._link = None
        self._is_late = False
        self._is_timed = False
        self._guard = Guard()
        self._remaining_chars = job.max_display_chars
        self._values = []
        self._end_time = time.monotonic() + job.total_seconds
        signal.signal(signal.SIGALRM, self._raise_out_of_time)

    def run(self):
        """Report a verdict for each test, then for each program."""
        if (self._job.programs or self._job.prelude) and not self._prepare():
            for number in range(len(self._job.tests) + len(self._job.programs)):
                self._report_verdict(number, "budget", "the imports used up the time for all tests")
            return
        for number, test in enumerate(self._job.tests):
            self._judge_test(number, test)
        self._discard_process()
        programs = list(enumerate(self._job.programs, len(self._job.tests)))
        while programs:
            self._run_programs(programs[:MAX_PROGRAMS])
            programs = programs[MAX_PROGRAMS:]
        self._spawner.stop()

    def _prepare(self):
        """Import what all tests need once, within the time of all tests. Return whether any of that time is left."""
        solution, seconds = self._job.solution, max(self._end_time - time.monotonic(), 0.1)
        try:
            self._spawner.prepare(solution, self._job.prelude, _find_libraries(solution), seconds)
        except TimeoutError:
            return False
        return True

    def _raise_out_of_time(self, *_):
        if self._is_timed:
            self._is_late = True
            raise OutOfTime

    def _judge_test(self, number, test):
        seconds = min(self._job.test_seconds, self._end_time - time.monotonic())
        if seconds <= 0:
            self._report_verdict(number, *OUT_OF_BUDGET)
            return
        reason, detail = too_late = "time", f"did not finish within {seconds:.3g} s"
        self._deadline.move(seconds + GRACE_SECONDS)
        self._is_late = False
        self._values = []
        try:
            self._is_timed = True
            # Repeated, in case a test catches everything.
            signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
            try:
                reason, detail = self._run_test(test)
            finally:
                self._is_timed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except OutOfTime:
            # It may have been raised in a `finally`, and be raised again.
            self._is_timed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._guard.end()
        if self._is_late:
            reason, detail = too_late
            self._discard_process()
        self._report_verdict(number, reason, detail, self._values)

    def _report_verdict(self, number, reason, detail, values=()):
        """Report a verdict, with those of `values` that still fit if the verdict is about values."""
        seen = []
        for name, value in values if reason in ("assertion", "output", "error") else ():
            if len(name) + len(value) <= self._remaining_chars:
                seen.append([name, value])
                self._remaining_chars -= len(name) + len(value)
        self._report(test=number, passed=reason == "passed", reason=reason, detail=detail[:MAX_DETAIL_CHARS], seen=seen)

    def _run_test(self, test):
        try:
            case = TestCase(test, notes=self._remaining_chars > 0)
        except (SyntaxError, ValueError, RecursionError) as error:
            return "error", _describe(error)
        try:
            link = self._link or self._load_solution()
        except Exception as error:  # noqa: BLE001  the verdict reports whatever the solution raises
            self._discard_process()
            return "load", _describe(error)
        except (PeerExitedError, SystemExit) as error:
            self._discard_process()
            why = _describe(error) if isinstance(error, SystemExit) else error
            return "load", f"the solution exited while it was loaded: {why}"
        try:
            self._execute(case, link)
        except AssertionError as error:
            reason, detail = "assertion", str(error)
        except OutOfTime:
            raise
        except ValueRejected as error:
            reason, detail = "refused", str(error)
        except PeerExitedError as error:
            reason, detail = "ended", f"the solution's process: {error}"
        except BaseException as error:  # noqa: BLE001  any error fails a test; those of pytest are no Exception
            reason, detail = "error", _describe(error)
        else:
            reason, detail = "passed", ""
        if link.peer_exited:  # even if the test has caught the error
            self._discard_process()
        if reason == "passed" and link.peer_exited:
            return "ended", "the solution's process exited, and the test caught the error"
        return ("refused", link.rejection) if link.rejection and reason == "passed" else (reason, detail)

    def _execute(self, case, link):
        """Run a test. Raises what it raises, and AssertionError if none of its assertions was reached and held."""
        link.begin(case)
        names = case.make_namespace(link)
        calls = {BEFORE: link.apply_changes, PRESENT: is_present, EQUAL: is_equal}
        calls |= {HELD: case.record_held, NOTE: case.note}
        if case.evaluates:
            calls[TEXT] = link.record_text
        names.update(calls)
        link.set_namespace(names)
        self._guard.begin(link, case.texts)
        try:
            exec(case.code, names)
        except AssertionError:
            link.is_formatting = True
            self._values = case.format_values(MAX_VALUE_CHARS)
            raise
        finally:
            link.is_formatting = False
            self._guard.end()
        if case.has_assertions and not case.has_held:
            raise AssertionError("no assertion of the test was reached and held")

    def _load_solution(self):
        link = connect(self._spawner, self._start_evaluator)
        link.load(self._job.solution)
        self._link = link
        return link

    def _start_evaluator(self):
        """Return the link to a fresh process that has neither run nor stored the solution."""
        return connect(self._evaluation_spawner)

    def _discard_process(self):
        """Stop the solution's process, so that the next test starts a new one."""
        self._link = None
        self._spawner.stop()

    def _run_programs(self, programs):
        with contextlib.ExitStack() as stack:
            files = [
                [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3 if self._remaining_chars > 0 else 2)]
                for _ in programs
            ]
            for (_, (stdin, _)), (inputs, *_) in zip(programs, files, strict=True):
                inputs.write(stdin.encode("utf-8", "surrogatepass"))
                inputs.flush()
                inputs.seek(0)
            descriptors = [[file.fileno() for file in each] for each in files]
            ends = self._spawner.run_programs(descriptors, self._job.test_seconds, self._end_time)
            # A program may stop this process, which is then killed. Before that the spawner kills late programs.
            self._deadline.move(self._job.test_seconds + PROGRAM_GRACE_SECONDS)
            for (number, (_, expected)), (_, *streams), end in zip(programs, files, ends, strict=True):
                self._deadline.move(self._job.test_seconds + PROGRAM_GRACE_SECONDS)
                self._report_verdict(number, *self._judge_program(expected, streams, *end))

    def _judge_program(self, expected, streams, outcome, code):
        if outcome == UNSTARTED:
            return OUT_OF_BUDGET
        if outcome == LATE:
            return "time", f"did not finish within {self._job.test_seconds:.3g} s"
        output, *errors = streams
        output.seek(0)
        text = output.read(MAX_MESSAGE_BYTES).decode("utf-8", "replace")
        seen = [["stdout", _shorten(text)]] + [["stderr", _read_stderr_end(file)] for file in errors]
        if code and (self._job.strict or code < 0 or code == UNCAUGHT):
            return "error", f"exit code {1 if code == UNCAUGHT else code}", seen
        if is_equal_output(text, expected, self._job.strict):
            return "passed", ""
        return "output", f"got {text[:80]!r}", seen


PROGRAM_GRACE_SECONDS = 3.0
"""Time for the spawner to end a late program, and for the judge to compare its output."""
OUT_OF_BUDGET = ("budget", "the time for all tests is used up")
_LIBRARIES = frozenset(["networkx", "numpy", "pandas", "scipy", "sklearn", "sortedcontainers", "sympy", "torch"])
"""Libraries that take long to import, and whose import runs no code of the solution's."""
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+)?import[ \t]+([^\n#;]*)", re.MULTILINE)


def _find_libraries(solution):
    """Return the full names of the modules of `_LIBRARIES` that the lines of a solution import."""
    found: dict[str, None] = {}
    for home, names in _IMPORT.findall(solution):
        parts = [part.split(" as ")[0].strip(" \t()") for part in names.split(",")]
        for name in [home, *(f"{home}.{part}" for part in parts)] if home else parts:
            if name.partition(".")[0] in _LIBRARIES and "__" not in name:
                found[name] = None
    return list(found)[:MAX_LIBRARIES]


MAX_LIBRARIES = 64


def _shorten(text):
    half = MAX_VALUE_CHARS // 2
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:half]}...{text[-half:]}"


def _read_stderr_end(file):
    """Return the end of a program's stderr, without the judge's own part of a traceback."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_STDERR_BYTES))
    text = file.read().decode("utf-8", "replace")
    return text[max(0, text.find('  File "solution.py"')) :][-MAX_VALUE_CHARS:]


def _describe(error):
    """Format the name and message of an error, and the line of the solution that raised it."""
    line = vars(error).get(LINE)
    return f"{type(error).__name__}: {error}{'' if line is None else f' (line {line} of the program)'}"


def main():
    """Judge the job on stdin."""
    hide()
    path = [path for path in sys.path if path != FOLDER]
    spawner = Spawner(FOLDER, path)
    restrict_import_path()
    protected = not can_inspect_processes()
    job = SimpleNamespace(**json.loads(sys.stdin.buffer.read()))

    verdict_file = detach_streams()

    def report(**fields):
        verdict_file.write(f"{job.token} {json.dumps(fields)}\n")
        verdict_file.flush()

    exec(compile("1 + 1", "test.py", "exec"), {})  # a policy that forbids it must fail before any verdict
    # The time of the first test must not include the start of an interpreter on a busy machine.
    spawner.wait_until_ready(START_SECONDS)
    evaluation_spawner = prepare_evaluation() if any("eval" in test for test in job.tests) else None
    report(ready=True, protected=protected)
    Judge(spawner, evaluation_spawner, job, report).run()


def prepare_evaluation():
    """Return the spawner of processes that evaluate text. It must be ready before the solution runs: until it has
    hidden itself, its memory could be written to."""
    trusted = list(sys.path)
    sys.path.insert(0, FOLDER)
    import evaluation  # noqa: F401  cached for `testcase`; few tests need it

    sys.path[:] = trusted
    spawner = Spawner(FOLDER, trusted, hidden=True)
    spawner.wait_until_ready(START_SECONDS)
    return spawner

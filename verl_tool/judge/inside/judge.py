"""Runs tests against a solution inside the sandbox and prints a verdict for each. The program that `/run_code` is sent
calls `main`, with the folder of this file in front of its path.

Stdin: one JSON object, see `Job`. Stdout: lines of ``<token> <json>``; the first says that the judge is ready. The
solution runs in other processes (`processes`), which have no access to this one: its tests, memory, stdin or stdout.
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
from link import LINE, LONGEST_MESSAGE, PeerExitedError
from output_equality import equal_output
from processes import LATE, MAX_PROGRAMS, MODULE, UNCAUGHT, UNSTARTED, Spawner, hide
from remote import JudgeLink
from testcase import BEFORE, EQUAL, HELD, NOTE, PRESENT, TEXT, TestCase, equal, present
from values import ValueRejected

FOLDER = os.getcwd()
START_SECONDS = 15.0
"""For the start of the process that starts the solution's."""
DETAIL = 200
"""Characters of a verdict's detail."""
MAX_DISPLAYED = 600
"""Characters of one value that a verdict shows."""
LONGEST_STDERR = 1 << 14
"""Bytes of a program's stderr that are read, its last ones."""


GRACE_SECONDS = 1.0
"""For the judge to notice that a test's time is up. It is killed then."""


class TestDeadline:
    """Kills this process when it is not moved on in time, also while a function of C runs, or the process is stopped:
    so a solution can make the judge lose no more than a test's time. See timer_create(2)."""

    def __init__(self):
        libc = ctypes.CDLL(None, use_errno=True)
        self._library = libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)
        self._timer = ctypes.c_void_p()
        event = (ctypes.c_int * 16)(0, 0, signal.SIGKILL)  # a struct sigevent: value, signal, SIGEV_SIGNAL
        if self._library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create failed")

    def move(self, seconds):
        """To so many seconds from now."""
        whole, fraction = divmod(seconds, 1)
        times = (ctypes.c_long * 4)(0, 0, int(whole), int(fraction * 1e9))
        if self._library.timer_settime(self._timer, 0, times, None):
            raise OSError(ctypes.get_errno(), "timer_settime failed")


class OutOfTime(BaseException):
    """No test may catch it, so it is no Exception."""


def only_trusted_paths():
    """Keep the judge from importing a file that the solution has written."""
    prefixes = tuple(f"{prefix}{os.sep}" for prefix in (sys.base_prefix, sys.prefix))
    sys.path[:] = [path for path in sys.path if path.startswith(prefixes)]


def own_streams():
    """A file on what was stdout. A test reads and prints to nowhere: it must not break a verdict's line in two, and a
    link that the solution leaves must not lead it to the tests."""
    verdicts = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return verdicts


def may_look_into_others():
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
    """`job` has ``token``, ``solution``, ``tests`` (Python texts), ``programs`` (pairs of stdin and expected stdout),
    ``prelude`` (imports and a recursion limit before the solution), ``strict`` (a program must print exactly that, and
    exit with 0), ``test_seconds``, ``total_seconds``, ``max_display_chars`` (of a value in a verdict; 0: none).
    """

    def __init__(self, spawner, evaluating, job, report):
        """`evaluating`: the spawner of processes that never run the solution; None if no test evaluates a text."""
        self._spawner = spawner
        self._evaluating = evaluating
        self._deadline = TestDeadline()
        self._job = job
        self._report = report
        self._link = None
        self._late = False
        self._timed = False
        self._guard = Guard()
        self._room = job.max_display_chars
        self._seen = []
        self._ends = time.monotonic() + job.total_seconds
        signal.signal(signal.SIGALRM, self._out_of_time)

    def run(self):
        """Report a verdict for each test, then for each program."""
        if (self._job.programs or self._job.prelude) and not self._prepare():
            for number in range(len(self._job.tests) + len(self._job.programs)):
                self._report_verdict(number, "budget", "the imports took the time of all tests")
            return
        for number, test in enumerate(self._job.tests):
            self._judge_test(number, test)
        self._forget()
        programs = list(enumerate(self._job.programs, len(self._job.tests)))
        while programs:
            self._run_programs(programs[:MAX_PROGRAMS])
            programs = programs[MAX_PROGRAMS:]
        self._spawner.stop()

    def _prepare(self):
        """Pay for imports once and not once a test, and out of the time of all tests. Whether any of that is left."""
        modules = _libraries(self._job.solution)
        try:
            seconds = max(self._ends - time.monotonic(), 0.1)
            self._spawner.prepare(self._job.solution, self._job.prelude, modules, seconds)
        except TimeoutError:
            return False
        return True

    def _out_of_time(self, *_):
        if self._timed:
            self._late = True
            raise OutOfTime

    def _judge_test(self, number, test):
        seconds = min(self._job.test_seconds, self._ends - time.monotonic())
        if seconds <= 0:
            self._report_verdict(number, *OUT_OF_BUDGET)
            return
        reason, detail = too_late = "time", f"no end within {seconds:.3g} s"
        self._deadline.move(seconds + GRACE_SECONDS)
        self._late = False
        self._seen = []
        try:
            self._timed = True
            # Again and again, in case that a test catches everything.
            signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
            try:
                reason, detail = self._run_test(test)
            finally:
                self._timed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except OutOfTime:
            # It may have come in a `finally`, and come again.
            self._timed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._guard.end()
        if self._late:
            reason, detail = too_late
            self._forget()
        self._report_verdict(number, reason, detail, self._seen)

    def _report_verdict(self, number, reason, detail, values=()):
        """Report a verdict. One about values has those for which there are characters left."""
        fitting = []
        for name, value in values if reason in ("assertion", "output", "error") else ():
            if len(name) + len(value) <= self._room:
                fitting.append([name, value])
                self._room -= len(name) + len(value)
        self._report(test=number, passed=reason == "passed", reason=reason, detail=detail[:DETAIL], seen=fitting)

    def _run_test(self, test):
        try:
            case = TestCase(test, notes=self._room > 0)
        except (SyntaxError, ValueError, RecursionError) as error:
            return "error", _describe(error)
        try:
            link = self._link or self._load()
        except Exception as error:  # noqa: BLE001  whatever the solution raises is what is found out here
            self._forget()
            return "load", _describe(error)
        except (PeerExitedError, SystemExit) as error:
            self._forget()
            why = _describe(error) if isinstance(error, SystemExit) else error
            return "load", f"the solution ended while it was loaded: {why}"
        try:
            self._perform(case, link)
        except AssertionError as error:
            reason, detail = "assertion", str(error)
        except OutOfTime:
            raise
        except ValueRejected as error:
            reason, detail = "refused", str(error)
        except PeerExitedError as error:
            reason, detail = "ended", f"the solution's process: {error}"
        except BaseException as error:  # noqa: BLE001  whatever a test raises, it has failed; pytest's are no Exception
            reason, detail = "error", _describe(error)
        else:
            reason, detail = "passed", ""
        if link.gone:  # also if the test has caught what told of it
            self._forget()
        if reason == "passed" and link.gone:
            return "ended", "the solution's process ended, and the test caught that"
        return ("refused", link.refused) if link.refused and reason == "passed" else (reason, detail)

    def _perform(self, case, link):
        """Run a test. Raises whatever it raises, and AssertionError if none of its assertions was reached and held."""
        link.begin(case)
        names = case.namespace(link)
        calls = {BEFORE: link.apply_changes, HELD: case.held, PRESENT: present, EQUAL: equal, NOTE: case.note}
        if case.evaluates:
            calls[TEXT] = link.record_text
        names.update(calls)
        link.enter(names)
        self._guard.begin(link, case.texts)
        try:
            exec(case.code, names)
        except AssertionError:
            link.describing = True
            self._seen = case.seen(MAX_DISPLAYED)
            raise
        finally:
            link.describing = False
            self._guard.end()
        if case.expected_true and not case.any_held:
            raise AssertionError("no assertion of the test was reached and held")

    def _load(self):
        link = connect(self._spawner, self._evaluator)
        link.load(self._job.solution)
        self._link = link
        return link

    def _evaluator(self):
        """The link to a fresh process that has not run, and does not hold, the solution."""
        return connect(self._evaluating)

    def _forget(self):
        """The next test starts a process anew."""
        self._link = None
        self._spawner.stop()

    def _run_programs(self, programs):
        with contextlib.ExitStack() as stack:
            files = [
                [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3 if self._room > 0 else 2)]
                for _ in programs
            ]
            for (_, (stdin, _)), (inputs, *_) in zip(programs, files, strict=True):
                inputs.write(stdin.encode("utf-8", "surrogatepass"))
                inputs.flush()
                inputs.seek(0)
            descriptors = [[file.fileno() for file in each] for each in files]
            ends = self._spawner.run_programs(descriptors, self._job.test_seconds, self._ends)
            # A program may stop this process, which then is killed; the spawner ends late programs by itself before.
            self._deadline.move(self._job.test_seconds + PROGRAM_GRACE_SECONDS)
            for (number, (_, expected)), (_, *streams), end in zip(programs, files, ends, strict=True):
                self._deadline.move(self._job.test_seconds + PROGRAM_GRACE_SECONDS)
                self._report_verdict(number, *self._program_verdict(expected, streams, *end))

    def _program_verdict(self, expected, streams, how, code):
        if how == UNSTARTED:
            return OUT_OF_BUDGET
        if how == LATE:
            return "time", f"no end within {self._job.test_seconds:.3g} s"
        output, *errors = streams
        output.seek(0)
        text = output.read(LONGEST_MESSAGE).decode("utf-8", "replace")
        seen = [["stdout", _short(text)]] + [["stderr", _end_of(file)] for file in errors]
        if code and (self._job.strict or code < 0 or code == UNCAUGHT):
            return "error", f"exit code {1 if code == UNCAUGHT else code}", seen
        if equal_output(text, expected, self._job.strict):
            return "passed", ""
        return "output", f"got {text[:80]!r}", seen


PROGRAM_GRACE_SECONDS = 3.0
"""For the spawner to end a late program, and for the judge to compare what it printed."""
OUT_OF_BUDGET = ("budget", "the time for all tests is over")
_LIBRARIES = frozenset(["networkx", "numpy", "pandas", "scipy", "sklearn", "sortedcontainers", "sympy", "torch"])
"""Those that take their time to import, and run nothing of anybody's when they are."""
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+)?import[ \t]+([^\n#;]*)", re.MULTILINE)


def _libraries(solution):
    """Full names of the modules of `_LIBRARIES` that a solution imports, as far as its lines tell."""
    found: dict[str, None] = {}
    for home, names in _IMPORT.findall(solution):
        parts = [part.split(" as ")[0].strip(" \t()") for part in names.split(",")]
        for name in [home, *(f"{home}.{part}" for part in parts)] if home else parts:
            if name.partition(".")[0] in _LIBRARIES and "__" not in name:
                found[name] = None
    return list(found)[:MAX_LIBRARIES]


MAX_LIBRARIES = 64


def _short(text):
    return text if len(text) <= MAX_DISPLAYED else f"{text[: MAX_DISPLAYED // 2]}...{text[-MAX_DISPLAYED // 2 :]}"


def _end_of(file):
    """The end of what a program wrote to stderr, without the judge's own part of a traceback."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_STDERR))
    text = file.read().decode("utf-8", "replace")
    return text[max(0, text.find('  File "solution.py"')) :][-MAX_DISPLAYED:]


def _describe(error):
    """Its name and message, and the line of the solution that raised it."""
    line = vars(error).get(LINE)
    return f"{type(error).__name__}: {error}{'' if line is None else f' (line {line} of the program)'}"


def main():
    """Judge the job on stdin."""
    hide()
    path = [path for path in sys.path if path != FOLDER]
    spawner = Spawner(FOLDER, path)
    only_trusted_paths()
    protected = not may_look_into_others()
    job = SimpleNamespace(**json.loads(sys.stdin.buffer.read()))

    report_to = own_streams()

    def report(**fields):
        report_to.write(f"{job.token} {json.dumps(fields)}\n")
        report_to.flush()

    exec(compile("1 + 1", "test.py", "exec"), {})  # a sandbox whose policy forbids it must show before any verdict
    # The clock of the first test must not run while an interpreter starts on a busy machine.
    spawner.wait_until_ready(START_SECONDS)
    evaluating = prepare_evaluation() if any("eval" in test for test in job.tests) else None
    report(ready=True, protected=protected)
    Judge(spawner, evaluating, job, report).run()


def prepare_evaluation():
    """The spawner of processes that evaluate texts. It must be ready before the solution runs: until it has hidden
    itself, its memory could be written to."""
    trusted = list(sys.path)
    sys.path.insert(0, FOLDER)
    import evaluation  # noqa: F401  found by `testcase` later; few tests need it

    sys.path[:] = trusted
    spawner = Spawner(FOLDER, trusted, hidden=True)
    spawner.wait_until_ready(START_SECONDS)
    return spawner

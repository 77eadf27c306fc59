"""Run code of the workspace for a verifier, in a process that shares nothing with the verifier.

    from in_workspace import WorkspaceError, evaluate, run

    squares = evaluate("from solution import square; result = [square(x) for x in given]", [1, 2, 3])
    result = run(["python3", "main.py"], stdin="3\\n", seconds=5, read=["out.csv"])
    result.exit_code, result.stdout, result.files["out.csv"]

In a shell: ``echo 3 | in_workspace --seconds 5 python3 main.py``. The exit code is the command's, or 124 after a
timeout.

A command runs as the workspace's user, in the workspace as the trajectory left it, not in the verifier's copy. When it
exits, everything that it started is killed. Its output is truncated at the sandbox's limit. It gets its arguments, its
stdin and the sent files, and nothing else of the verifier. Treat its answer as a claim, and compare it with values that
were not sent.

This module is on the verifier's path, and needs only the standard library.
"""

import base64
import errno
import json
import os
import select
import sys
import uuid

FOLDER = os.environ.get("VERL_TOOL_CALLS", "/box/verifier/calls")
_ANSWER_SECONDS = 60.0
"""Time for the sandbox to start and to stop a command on an overloaded machine."""
_TIMED_OUT, _NOT_RUN = 124, 125
"""Exit codes of the command line, as for timeout(1)."""
_EVALUATE = """
import decimal, json, numbers, os, sys
def plain(value):
    if isinstance(value, numbers.Rational):
        return int(value) if value.denominator == 1 else value.numerator / value.denominator
    return float(value) if isinstance(value, decimal.Decimal) else value.tolist()
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
given = json.load(sys.stdin)
sys.path.insert(0, os.getcwd())
names = {"given": given, "__name__": "evaluation"}
exec(compile(sys.argv[1], "evaluation", "exec"), names)
text = json.dumps(names["result"], default=plain)
for stream in (sys.stdout, sys.stderr):
    try:
        stream.flush()
    except Exception:
        pass
answers.write(text)
answers.flush()
os._exit(0)
"""


class WorkspaceError(Exception):
    """A command in the workspace could not be run, or its code returned no valid answer."""


class Result:
    """Result of a command."""

    def __init__(self, answer):
        self.exit_code = answer["exit_code"]
        """None if a signal or a limit killed it."""
        self.limit_hit = answer["limit_hit"]
        """The limit that killed it, such as ``wall_seconds`` or ``memory_bytes``, or None."""
        self.stdout_bytes, self.stderr_bytes = _decode(answer["stdout"]), _decode(answer["stderr"])
        """Up to the limit."""
        self.truncated = answer["truncated"]
        """Whether it wrote more than the limit to stdout."""
        self.files = {path: None if data is None else _decode(data) for path, data in answer["files"].items()}
        """Content of the files in `read`; None for a file that is missing or not a regular file."""

    @property
    def stdout(self):
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self):
        return self.stderr_bytes.decode("utf-8", "replace")


def run(command, *, stdin="", files=None, read=(), env=None, cwd=".", seconds=20.0):
    """Run a command in the workspace.

    Args:
        command: list of arguments, or a line for ``bash -c``.
        stdin: text or bytes.
        files: text or bytes by path, written to the workspace first.
        read: paths of files in the workspace to return.
        env: additional environment variables.
        cwd: working directory, relative to the workspace.
        seconds: timeout, after which it is killed with everything that it started.

    Raises:
        WorkspaceError: it could not be run, for example because `files` exceed the workspace's disk.
    """
    request = {
        "command": command if isinstance(command, str) else [str(word) for word in command],
        "stdin": _encode(stdin),
        "files": {path: _encode(content) for path, content in (files or {}).items()},
        "read": list(read),
        "env": dict(env or {}),
        "cwd": str(cwd),
        "seconds": seconds,
    }
    answer = _request(json.dumps(request), seconds + _ANSWER_SECONDS)
    if "error" in answer:
        raise WorkspaceError(answer["error"])
    return Result(answer)


def _finite(text):
    number = float(text)
    if number - number != 0:
        raise ValueError(f"{text} is not a finite number")
    return number


def evaluate(code, given=None, *, seconds=20.0, **options):
    """Run Python code that reads the variable `given` and sets the variable ``result``; both are JSON. NumPy numbers
    and arrays, fractions and decimals become plain numbers and lists.

    Printed text is not mixed with the answer, which has only JSON's types, whatever the code does. For `options` see
    `run`. Raises WorkspaceError if there is no answer.
    """
    command = ["python3", "-I", "-c", _EVALUATE, code]
    result = run(command, stdin=json.dumps(given), seconds=seconds, **options)
    if result.exit_code != 0 or result.truncated:
        reason = result.limit_hit or f"exit code {result.exit_code}"
        raise WorkspaceError(f"the workspace's code gave no answer ({reason}): {result.stderr[-500:]}")
    try:
        # With NaN, a comparison like `not abs(a - b) > tolerance` would always succeed.
        return json.loads(result.stdout, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError, MemoryError):
        raise WorkspaceError(f"the workspace's code answered {result.stdout[:80]!r}, which is not JSON") from None


def _request(request, seconds):
    """Send one request and return its answer."""
    name = uuid.uuid4().hex
    path = os.path.join(FOLDER, name)
    with open(path + ".request", "w", encoding="ascii") as file:
        file.write(request)
    os.mkfifo(path + ".ready", 0o600)
    ready = os.open(path + ".ready", os.O_RDONLY | os.O_NONBLOCK)
    try:
        try:
            queue = os.open(os.path.join(FOLDER, "requests"), os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                raise
            raise WorkspaceError("in_workspace works only in a verifier's process") from None
        os.write(queue, (name + "\n").encode("ascii"))
        os.close(queue)
        waiting = select.poll()
        waiting.register(ready, select.POLLIN)
        if not waiting.poll(seconds * 1000):
            raise WorkspaceError(f"the sandbox did not answer within {seconds:g} s")
        with open(path + ".answer", encoding="ascii") as file:
            return json.load(file)
    finally:
        os.close(ready)


def _encode(content):
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else bytes(content)
    return base64.b64encode(data).decode("ascii")


def _decode(text):
    return base64.b64decode(text)


def main(arguments):
    """Run the command line."""
    seconds = 20.0
    if arguments[:1] == ["--seconds"]:
        seconds, arguments = float(arguments[1]), arguments[2:]
    if not arguments:
        sys.exit("usage: in_workspace [--seconds N] COMMAND [ARGUMENT...]")
    try:
        result = run(arguments, stdin=sys.stdin.buffer.read(), seconds=seconds)
    except WorkspaceError as error:
        print(f"in_workspace: {error}", file=sys.stderr)
        return _NOT_RUN
    sys.stdout.buffer.write(result.stdout_bytes)
    sys.stderr.buffer.write(result.stderr_bytes)
    if result.exit_code is None:
        return _TIMED_OUT if result.limit_hit == "wall_seconds" else _NOT_RUN
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

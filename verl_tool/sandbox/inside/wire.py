"""Messages between the pool and a forkserver, and the format of a run's job file.

The control channel is a unix socket of type SEQPACKET; every message is one packet:

    pool -> forkserver   a dict           once: the settings
    forkserver -> pool   a dict           once: ready, or an error
    pool -> forkserver   RUN  + 3 fds     start a run: job file, stdout, stderr, stdin if it has one, and the
                                          files by which it joins its control groups
    pool -> forkserver   KILL             kill a run
    pool -> forkserver   DROP             a session has ended: release its box
    forkserver -> pool   REPLY (+ 1 fd)   the run and all its processes have exited; the fd is its folder

A *box* consists of the folders and the user that the runs of a session share. A session's interpreter process
(`interpreter_process`) has another channel of the same type:

    interpreter -> pool  READY + 1 fd     at its start; the fd is the box's folder
    pool -> interpreter  CELL + 3 fds     run a cell: job file, stdout, stderr, stdin if it has one
    pool -> interpreter  CANCEL           cancel the cell
    pool -> interpreter  FORK + 1 fd      fork an interpreter process whose channel is the fd
    interpreter -> pool  DONE             the cell has ended

The job file is an anonymous file (memfd). The run writes its first `JOURNAL_BYTES`, the pool the rest.
"""

from __future__ import annotations

import marshal
import struct

OP_RUN, OP_KILL, OP_DROP = 1, 2, 3
PROGRAM, INTERPRETER, COMMAND = range(3)
"""Kinds of runs: a Python program; a session's interpreter process; any program (`shell_command`)."""

MARSHAL_VERSION = 2
"""Every Python can read it. JSON is not used, because its module would make every fork slower."""


def first_message(content: dict) -> bytes:
    """Encode a dict of plain values as the channel's first message in either direction."""
    return marshal.dumps(content, MARSHAL_VERSION)


def read_first_message(message: bytes) -> dict:
    """Decode a message of `first_message`."""
    return marshal.loads(message)


RUN = struct.Struct("<BQddQIIQQIIIIQ")
"""op, id, wall seconds, CPU seconds (0: none), memory bytes, processes, open files, output bytes, disk bytes,
disk files, whether to return the run's folder, the number of descriptors for its control groups, its kind, and its box:
the id of the run for which the box was made, or 0 for a new one."""
MAX_FDS = 8
"""Maximum of descriptors in one message."""
KILL = struct.Struct("<BQB")
"""op, id, reason: one of the limits below. Also the format of DROP, with the box as id."""
REPLY = struct.Struct("<QBBBiddQ")
"""id, whether the user's code was reached, whether all processes have exited, the limit hit, wait status, wall seconds,
CPU seconds, peak bytes."""

LIMIT_NAMES = (None, "wall_seconds", "cpu_seconds", "memory_bytes", "cancelled", "lost")
NO_LIMIT, WALL, CPU, MEMORY, CANCELLED, LOST = range(6)
"""LOST: the kernel killed one of its processes because others used too much memory."""

JOURNAL_BYTES = 1 << 16
"""The journal: unsigned 64-bit words. Untrusted once the user's code runs."""
STATE, COUNT, DROPPED_OUT, DROPPED_ERR, FIRST_SWITCH = range(5)
"""Index of each word; from FIRST_SWITCH on: (position << 1 | stream) at each change of the stream."""
SWITCHES = JOURNAL_BYTES // 8 - FIRST_SWITCH
FAILURE_BYTES = 1000
"""Maximum length of the message of a failed set-up."""
NOT_STARTED, STARTED, SETUP_FAILED, FILES_REJECTED = range(4)
"""Values of STATE. FILES_REJECTED: the files of the run cannot be written under their names. With it and SETUP_FAILED,
the words from FIRST_SWITCH on contain a message that ends with a zero byte."""


def failure_journal(error: BaseException, state: int = SETUP_FAILED) -> bytes:
    """Return the beginning of a journal with the reason why the user's code was not reached."""
    text = f"{type(error).__name__}: {error}".encode(errors="replace")[:FAILURE_BYTES]
    return struct.pack("<Q", state).ljust(FIRST_SWITCH * 8, b"\0") + text


JOB = struct.Struct("<QI")
"""Length of code, number of files; then the code, and FILE + name + content of each file."""
FILE = struct.Struct("<IQ")
"""Length of name, length of content."""

OP_CELL, OP_CANCEL, OP_FORK = 1, 2, 3
CELL = struct.Struct("<BIIBQ")
"""op, the cell's number, its number in tracebacks (0: none), whether it is interactive (`run_cell`), output
bytes; followed, as `PID`, by the process ids of the session's branches in the same pid namespace. CANCEL has the same
format, and FORK too, with the branch's number."""
PID = struct.Struct("<I")
READY, PRESERVED, UNDONE = range(3)
"""Outcomes. PRESERVED: the cell's process is now the interpreter process. UNDONE: the state was rolled back."""
DONE = struct.Struct("<BIiIIQI")
"""outcome, the cell's number, exit code (PRESERVED) or wait status (UNDONE), threads and processes that were killed,
peak bytes, the interpreter's process id. Untrusted, because user code has run in the sender."""

BOX = "/box"
WORK_DIRECTORY = "/box/work"
"""The run's folder, its current directory and home."""
BRANCH_FOLDER = ".branch-{number}-{name}"
"""In the box: name of a branch's folder while another branch is active."""
LINKS = {"/app": "box/work", "/tests": "box/tests", "/solution": "box/solution", "/logs": "box/logs"}
"""Links for tasks in Harbor's layout. A target may not exist yet."""
VERIFIER_DIRECTORY = "/box/verifier"
"""In the box of a verifier: its home, with the files by which it runs commands in the workspace."""
SCRIPT_NAME = "main.py"
"""The file of the code in the run's folder."""

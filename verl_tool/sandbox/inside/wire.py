"""What the pool and a forkserver say to each other, and what a run's job file holds.

The control channel is a unix socket of type SEQPACKET; every message is one packet:

    pool -> forkserver   a dict           once: how to start
    forkserver -> pool   a dict           once: ready, or why not
    pool -> forkserver   RUN  + 3 fds     start a run: job file, stdout, stderr, stdin if it has any, and the
                                          files by which it joins its control groups
    pool -> forkserver   KILL             end a run
    pool -> forkserver   DROP             nothing is left of a session: let go of its box
    forkserver -> pool   REPLY (+ 1 fd)   the run has ended, all its processes are gone; the fd is its folder

A *box* is what the runs of a session share: their folders and their user. Over a channel of its own, of the same type,
a session's keeper (`interpreter_process`) is told what to run:

    keeper -> pool       READY + 1 fd     at its start; the fd is the box's folder
    pool -> keeper       CELL + 3 fds     run a cell: job file, stdout, stderr, stdin if it has any
    pool -> keeper       CANCEL           end the cell
    pool -> keeper       FORK + 1 fd      make a second keeper, whose channel the fd is
    keeper -> pool       DONE             the cell has ended

The job file is an anonymous file (memfd). Its first `JOURNAL_BYTES` are written by the run, the rest by the pool.
"""

from __future__ import annotations

import marshal
import struct

OP_RUN, OP_KILL, OP_DROP = 1, 2, 3
PROGRAM, KEEPER, COMMAND = range(3)
"""Kinds of runs: a Python program; a session's Python state (`interpreter_process`); any program (`shell_command`)."""

MARSHAL_VERSION = 2
"""Read by every Python. Not JSON, for its module would make every fork of the forkserver dearer."""


def first_message(content: dict) -> bytes:
    """A dict of plain values as the channel's first message in either direction."""
    return marshal.dumps(content, MARSHAL_VERSION)


def read_first_message(message: bytes) -> dict:
    """What `first_message` was given."""
    return marshal.loads(message)


RUN = struct.Struct("<BQddQIIQQIIIIQ")
"""op, id, wall seconds, CPU seconds (0: none), memory bytes, processes, open files, output bytes, disk bytes,
disk files, whether the run's folder is asked for, how many of the descriptors join it to its control groups, its kind,
and the box that it shares: the id of the run that was given it, or 0 for a new one."""
MAX_FDS = 8
"""That come with one message."""
KILL = struct.Struct("<BQB")
"""op, id, why: one of the limits below. Also of DROP, with the box for id."""
REPLY = struct.Struct("<QBBBiddQ")
"""id, whether the user's code was reached, whether nothing is left of it, which limit was hit, wait status, wall
seconds, CPU seconds, peak bytes."""

LIMIT_NAMES = (None, "wall_seconds", "cpu_seconds", "memory_bytes", "cancelled", "lost")
NO_LIMIT, WALL, CPU, MEMORY, CANCELLED, LOST = range(6)
"""LOST: the kernel killed one of its processes, for memory that others took."""

JOURNAL_BYTES = 1 << 16
"""The journal: unsigned 64-bit words. Untrusted from the moment that the user's code runs."""
STATE, COUNT, DROPPED_OUT, DROPPED_ERR, FIRST_SWITCH = range(5)
"""Index of each word; from FIRST_SWITCH on: (position << 1 | stream) at each change of the stream written to."""
SWITCHES = JOURNAL_BYTES // 8 - FIRST_SWITCH
FAILURE_BYTES = 1000
"""Longest message of a failed set-up."""
NOT_STARTED, STARTED, SETUP_FAILED, FILES_REJECTED = range(4)
"""Values of STATE. FILES_REJECTED: the files that came with the run cannot be laid out as they are named. After it and
SETUP_FAILED the words from FIRST_SWITCH on hold a message, closed by a zero byte."""


def failure_journal(error: BaseException, state: int = SETUP_FAILED) -> bytes:
    """The beginning of a journal that tells why the user's code was not reached."""
    text = f"{type(error).__name__}: {error}".encode(errors="replace")[:FAILURE_BYTES]
    return struct.pack("<Q", state).ljust(FIRST_SWITCH * 8, b"\0") + text


JOB = struct.Struct("<QI")
"""Length of code, number of files; then the code, and FILE + name + content of each file."""
FILE = struct.Struct("<IQ")
"""Length of name, length of content."""

OP_CELL, OP_CANCEL, OP_FORK = 1, 2, 3
CELL = struct.Struct("<BIIBQ")
"""op, the cell's number, its number in tracebacks (0: none), whether it is interactive (`run_cell`), output
bytes. Behind it, as `PID`, the process ids of other keepers in the same pid namespace. CANCEL: the same. FORK: the
same, with the branch's number."""
PID = struct.Struct("<I")
READY, PRESERVED, UNDONE = range(3)
"""Outcomes. PRESERVED: the cell's process is the keeper now. UNDONE: the state is what it was before."""
DONE = struct.Struct("<BIiIIQI")
"""outcome, the cell's number, exit code (PRESERVED) or wait status (UNDONE), threads and processes that were
ended, peak bytes, the keeper's process id. Comes from where user code has run: not to be trusted."""

BOX = "/box"
WORK_DIRECTORY = "/box/work"
"""The run's own folder, its current directory and home."""
BRANCH_FOLDER = ".branch-{number}-{name}"
"""In the box: where a folder of a branch waits while another branch's is in its place."""
LINKS = {"/app": "box/work", "/tests": "box/tests", "/solution": "box/solution", "/logs": "box/logs"}
"""Where tasks of Harbor's layout look for things. What a link leads to is there once somebody has made it."""
VERIFIER_DIRECTORY = "/box/verifier"
"""In the box of a verifier: its home, and what it needs to run commands in the workspace."""
SCRIPT_NAME = "main.py"
"""The file within it that holds the code."""

"""The resident process of a container: it runs programs and reads and writes files for the server.

Both speak by frames over its stdin and stdout: the lengths of a header and of a payload, the header as JSON, and the
payload. Python 3.8 or newer, with ctypes. The programs have a user of their own and none of its capabilities, so that
they can neither end it nor see its memory. For each program there is a *keeper*: a fork of this process that starts the
program, and when that has ended, or at its deadline, ends whatever the program has started and left. One keeper waits
for the next program, with a fork that becomes it: a command then takes no fork before it is executed.

    request                                                     answer, with the same id
    run      argv, env, cwd, seconds, bytes; payload: stdin     status, limit, written, order; payload: what was written
    spawn    argv, env, cwd, terminal                           started; then `output` frames, and at its end `status`
             either: python, code for this interpreter, in place of argv
    input    to a program (empty: the end of its stdin)         none; of a connection: `fed`, when it has taken bytes
    taken    bytes of its output have been read                 none
    kill     a program                                          none: its `status` comes
    signal   to the foreground of a program's terminal, or 0    leader and group
    read     path, bytes                                        payload: the content
    write    path, make; payload: the content                   an empty one
    end      all programs and connections                       an empty one
    lease    seconds: end then, unless another one comes        none
    listen   port: connections of programs to it are passed on  an empty one; `connected` frames, and as of a program
"""

import base64
import contextlib
import ctypes
import errno
import fcntl
import grp
import itertools
import json
import os
import pwd
import selectors
import shutil  # noqa: F401  (for `archive`: not to be read after programs have run, who may change it)
import signal
import socket
import stat
import struct
import tarfile  # noqa: F401  (the same)
import termios
import time
import warnings  # noqa: F401  (`os.execvpe` imports it, as a user who may not be able to)

HEAD = struct.Struct(">II")
REPORT = struct.Struct(">ii")
"""Of a keeper: the process id of the program to be, or 0 and an errno; then, at its end, its wait status and whether
the keeper goes on; and so on."""
ORDER = struct.Struct(">II")
"""Before a program for a keeper: its length, and how many programs the keeper had before."""
WINDOW_BYTES = 1 << 18
"""Of a spawned program's output that the server has not taken."""
READ_BYTES = 1 << 16
END_SECONDS = 2.0
"""For the processes that a program left to end; then all processes of its user are ended."""
_KEEPER_SECONDS = END_SECONDS + 3.0
"""For a keeper to end its program: a program that is root may have stopped it."""
OWN_USER = 65533
"""In place of root where the programs are root, who may end processes of the same user."""
_FIRST_USER, _USERS = 1 << 20, 1 << 29
"""In place of `OWN_USER`, one of these drawn by chance: the kernel counts some resources by user, for all containers of
the machine, and programs that are root may be any user."""
_SAVED_USER = 65530
"""Saved with it: who is that user in all respects could take away this process's resources (prlimit)."""
_KILLERS = (65532, 65531)
"""Users of processes that end all of a user's; the first that is not that user."""
ROWS, COLUMNS = 50, 200
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 4, 8, 24, 36
_PR_SET_NO_NEW_PRIVS = 38
_OWN_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18)
"""Those of root, and SETPCAP."""
_CAPABILITIES_OF_ROOT = (0, 1, 3, 4, 5, 6, 7, 10, 18)
"""Of programs whose user is root: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE,
SYS_CHROOT. They can end each process of the container but its first one."""
_CAPABILITIES_FOR_FILES = (0, 1, 3, 4)
"""Of theirs where this is not the first process."""
_CAPABILITIES_VERSION = 0x20080522
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)
_NOT_FOUND, _CANNOT_RUN = 127, 126
_BACKLOG = 64
_END_USER_SECONDS = 5.0
_MAX_CONNECTIONS = 128
"""Of programs to the port that is passed on; further ones are closed."""
_READS_AFTER_END = 64
"""Of what a program that has ended left in a pipe or on its terminal: as much as fits."""

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option, value):
    if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def set_capabilities(numbers):
    mask = sum(1 << number for number in numbers)
    head = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    words = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)
    if libc.capset(head, words) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def permitted_capabilities():
    """Those that this process may have."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        mask = next((int(line.split()[1], 16) for line in file if line.startswith("CapPrm:")), 0)
    return [number for number in range(64) if mask >> number & 1]


def encode(header, payload, lines):
    """A frame; lines: as a line of base64."""
    head = json.dumps(header).encode()
    frame = HEAD.pack(len(head), len(payload)) + head + payload
    return base64.b64encode(frame) + b"\n" if lines else frame


def decode(frame):
    """Header and payload of a whole frame."""
    head, body = HEAD.unpack_from(frame)
    return json.loads(frame[HEAD.size : HEAD.size + head]), frame[HEAD.size + head : HEAD.size + head + body]


class User:
    """Who the programs are."""

    separate = True
    """Whether this process is another user."""

    def __init__(self, name):
        """name: as of a Dockerfile's USER, names or numbers. Raises KeyError for one that the image does not have."""
        user, _, group = name.partition(":")
        entry = None
        try:
            entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
        except KeyError:
            if not user.isdigit():
                raise
        self.uid = int(user) if entry is None else entry.pw_uid
        self.home = entry.pw_dir if entry is not None else "/"
        if group:
            self.gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        else:
            self.gid = entry.pw_gid if entry is not None else 0
        self.groups = [self.gid]
        if entry is not None and not group:
            self.groups = os.getgrouplist(entry.pw_name, self.gid)
        self.may_become_others = self.uid == 0 and os.getpid() == 1
        """Whether its programs may be any user."""
        permitted = permitted_capabilities()
        full = _CAPABILITIES_OF_ROOT if self.may_become_others else _CAPABILITIES_FOR_FILES
        self._capabilities = [number for number in full if number in permitted and self.uid == 0]
        self.own_capabilities = [number for number in _OWN_CAPABILITIES if number in permitted]
        """Of this process, where its programs are root."""

    def become(self):
        """Be this user for good."""
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if self.uid == 0:
            for number in range(64):
                if number not in self._capabilities:
                    with contextlib.suppress(OSError):
                        prctl(_PR_CAPBSET_DROP, number)
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        set_capabilities(self._capabilities)

    @contextlib.contextmanager
    def lent(self):
        """Have this user's rights to files within the block."""
        own = os.geteuid()
        os.setegid(self.gid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(own)
            if self.uid == 0:  # what a change from root takes away
                set_capabilities(self.own_capabilities)
            os.setegid(own)

    def become_killer(self):
        """Be able to signal this user's processes, and no others, for good.

        They cannot stop this one: who may be signalled goes by the real and the saved user, which are nobody's here.
        """
        unused = next(uid for uid in _KILLERS if uid != self.uid)
        try:
            os.setresuid(unused, self.uid, unused)
            set_capabilities(())
        except OSError:  # a user namespace that has few users
            self.become()

    def end_all(self):
        """Become its killer, and end all of its processes but this one."""
        self.become_killer()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


class OwnUser(User):
    """The user of this process, where it may become no other. Its programs can end it."""

    separate = False

    def __init__(self):
        super().__init__(f"{os.geteuid()}:{os.getegid()}")
        self.may_become_others = False
        self._resident = os.getpid()
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what programs leave stays below it

    def become(self):
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        set_capabilities(())

    @contextlib.contextmanager
    def lent(self):
        yield

    def end_all(self):
        for pid in set(descendants(self._resident)) - {os.getpid()}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def read_file(path, maximum):
    """The content. Raises OSError EFBIG if it is longer than `maximum`."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(fd).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        content = bytearray()
        while max(os.fstat(fd).st_size, len(content)) <= maximum:
            part = os.read(fd, min(1 << 20, maximum + 1 - len(content)))
            if not part:
                return bytes(content)
            content += part
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    finally:
        os.close(fd)


def write_file(path, content, make):
    """make: the file, and the folders above it, if they are not there."""
    if make:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    fd = os.open(path, flags, 0o666)
    try:
        # A link may lead to this process's own descriptors.
        found = os.fstat(fd)
        right_kind = stat.S_ISREG(found.st_mode) if make else stat.S_ISFIFO(found.st_mode)
        if not right_kind or found.st_dev == os.stat("/proc").st_dev:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if make:
            os.ftruncate(fd, 0)
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


class Keeper:
    """What the fork that keeps programs, one after the other, does."""

    def __init__(self, user, channel, report):
        self._user, self._channel, self._report = user, channel, report
        self._turn, self._is_killer = 0, False

    def keep(self):
        """Have a fork ready to become the program, wait, end what it left; again, until a signal. Never returns."""
        try:
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
            self._close_others()
            goes_on = True
            while goes_on:
                program = os.fork()
                if program == 0:
                    self._become_program()
                os.write(self._report, REPORT.pack(program, 0))
                goes_on = self._wait(program)
                self._turn += 1
        except OSError as error:
            os.write(self._report, REPORT.pack(0, error.errno or errno.EIO))
        finally:
            os._exit(0)

    def _close_others(self):
        """No keeper holds a pipe of another program, nor the server's."""
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        low = 3
        for fd in sorted({self._channel.fileno(), self._report}):
            os.closerange(low, fd)
            low = fd + 1
        os.closerange(low, os.sysconf("SC_OPEN_MAX"))

    def _become_program(self):
        """Execute the program, or exit with a message on stderr and an exit code like a shell."""
        os.setsid()
        os.close(self._report)
        message, streams = receive_order(self._channel, self._turn)
        self._channel.close()
        with contextlib.suppress(OSError):
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(fd, b"1000")
            os.close(fd)
        if message.get("terminal"):
            fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        for fd in streams:
            os.close(fd)
        at, code = message["cwd"], message["python"]
        try:
            self._user.become()
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(at)
            if code is not None:
                exec(code, {"__name__": "__main__"})
                os._exit(0)
            at = message["argv"][0]
            words = [word.encode("utf-8", "surrogatepass") for word in message["argv"]]
            os.execvpe(words[0], words, {**os.environ, **message["env"]})
        except BaseException as error:  # noqa: BLE001  (such as an embedded NUL)
            reason = error.strerror if isinstance(error, OSError) else error
            os.write(2, f"{at}: {reason}\n".encode(errors="replace"))
            os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_RUN)

    def _wait(self, program):
        """Whether this process can keep another program."""
        status, goes_on = None, True
        while status is None:
            if signal.sigwait(_SIGNALS) == signal.SIGTERM:
                status, goes_on = int(signal.SIGKILL), False
                break
            with contextlib.suppress(ChildProcessError):
                while True:
                    pid, ended = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    if pid == program:
                        status = ended
        status = self._ended(program, status)
        goes_on = goes_on and not self._is_killer
        os.write(self._report, REPORT.pack(status, goes_on))
        return goes_on

    def _ended(self, program, status):
        """End all that descends from this process; the program's wait status."""
        deadline = time.monotonic() + END_SECONDS
        while True:
            try:
                while True:
                    pid, ended = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    if pid == program:
                        status = ended
            except ChildProcessError:
                return status
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline and self._user.may_become_others:
                os._exit(0)  # the first process ends all
            if time.monotonic() > deadline and self._user.separate:
                # They start others faster than they are found. No process of that user outlives one `kill` of all.
                if not self._is_killer:
                    self._user.become_killer()
                    self._is_killer = True
                with contextlib.suppress(OSError):
                    os.kill(-1, signal.SIGKILL)
            time.sleep(0.001)


def send_order(channel, turn, message, streams):
    """Tell a keeper's fork which program to become, on which descriptors. Raises OSError if it is gone."""
    body = json.dumps(message).encode()
    data = memoryview(ORDER.pack(len(body), turn) + body)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("3i", *streams))]
    channel.sendall(data[channel.sendmsg([data], rights) :])


def receive_order(channel, turn):
    """What `send_order` has sent. Exits if nothing comes any more, or if it is for a fork that was killed."""
    data, rights, _, _ = channel.recvmsg(READ_BYTES, socket.CMSG_SPACE(12), socket.MSG_CMSG_CLOEXEC)
    while data and len(data) < ORDER.size + ORDER.unpack_from(data)[0]:
        part = channel.recv(1 << 20)
        if not part:
            os._exit(0)
        data += part
    if not data or ORDER.unpack_from(data)[1] != turn:
        os._exit(0)
    return json.loads(data[ORDER.size :]), struct.unpack("3i", rights[0][2])


def descendants(ancestor):
    """Process ids, children first."""
    children: dict = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    words = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            children.setdefault(int(words[1]), []).append(int(name))
    found, waiting = [], [ancestor]
    while waiting:
        more = children.get(waiting.pop(), [])
        found += more
        waiting += more
    return found


def oom_kills():
    """How many processes of this container the kernel has killed for their memory; -1 if that is not known."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                lines = os.read(fd, READ_BYTES).splitlines()
            finally:
                os.close(fd)
            for line in lines:
                name, _, number = line.partition(b" ")
                if name == b"oom_kill":
                    return int(number)
    return -1


class KeeperClient:
    """A keeper, as the resident sees it."""

    def __init__(self, user):
        """Raises OSError if no process can be started."""
        self.leader = 0
        """The process that is or becomes the program; 0 until it is reported, and after its end."""
        self.ended = False
        """Whether it was ended with all others, and takes no program."""
        self._turn = 0
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.report, report = os.pipe()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                Keeper(user, theirs, report).keep()
        except OSError:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(report)

    def send(self, message, streams):
        """Have it start a program. Raises OSError if it has ended."""
        send_order(self.channel, self._turn, message, streams)

    def read_report(self):
        """What it reports (`REPORT`); None after its end. The first report about a program sets `leader`, and the one
        about its end makes it 0 again."""
        report = os.read(self.report, REPORT.size)
        if len(report) < REPORT.size:
            return None
        first, failure = REPORT.unpack(report)
        if self.leader:
            self._turn += 1
            self.leader = 0
        else:
            self.leader = first
        return first, failure

    def kill(self, number=signal.SIGTERM):
        """End its program, and then itself; by SIGKILL, only itself."""
        if self.pid:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def close(self):
        self.channel.close()
        os.close(self.report)


class Streams:
    """Descriptors whose bytes go to the server, and one that takes bytes of it."""

    deadline: "float | None" = None

    def __init__(self, resident, number):
        self.id = number
        self._resident = resident
        self._pending, self._ends, self._input_fd = bytearray(), False, -1
        self._outputs = {}
        """Stream number by descriptor."""
        self._window = {1: WINDOW_BYTES, 2: WINDOW_BYTES}
        self._status = None

    def input(self, content):
        """Of its stdin; empty: the end."""
        if self._input_fd >= 0:
            self._pending += content
            self._ends = self._ends or not content
            self._feed()

    def taken(self, stream, size):
        self._window[stream] += size
        self._watch()

    def _watch(self):
        """Wait for what can be done: reading what is shown to the server, writing what it has sent."""
        for fd in {*self._outputs, self._input_fd} - {-1}:
            stream = self._outputs.get(fd)
            events = selectors.EVENT_WRITE if fd == self._input_fd and self._pending else 0
            if stream is not None and self._has_room(stream):
                events |= selectors.EVENT_READ
            if events:
                self._resident.watch(fd, events, self._proceed)
            else:
                self._resident.forget(fd)

    def _proceed(self, fd):
        if fd in self._outputs:
            self._read(fd)
        if fd == self._input_fd:
            self._feed()
        else:
            self._watch()

    def _feed(self):
        while self._pending and self._input_fd >= 0:
            try:
                del self._pending[: os.write(self._input_fd, self._pending[:READ_BYTES])]
            except BlockingIOError:
                break
            except OSError:  # it reads no more
                self._pending.clear()
                self._ends = True
        if self._ends and not self._pending and self._input_fd >= 0:
            self._end_input()
        self._watch()

    def _read(self, fd):
        """Whether there may be more."""
        stream = self._outputs[fd]
        if not self._has_room(stream):
            return False
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # of a terminal that no program has open
            data = b""
        if not data:
            del self._outputs[fd]
            if fd != self._input_fd:
                self._resident.forget(fd)
                os.close(fd)
            return False
        self._take(stream, data)
        return True

    def _has_room(self, stream):
        """Whether more of its output may be read."""
        return self._window[stream] > 0 or self._status is not None

    def _take(self, stream, data):
        self._window[stream] -= len(data)
        self._resident.send({"id": self.id, "output": stream}, data)

    def _end_input(self):
        """All that was sent is written, and no more comes."""
        self._resident.forget(self._input_fd)
        os.close(self._input_fd)
        self._input_fd = -1

    def _close(self):
        for fd in {*self._outputs, self._input_fd} - {-1}:
            self._resident.forget(fd)
            os.close(fd)
        self._outputs, self._input_fd = {}, -1


class PassedConnection(Streams):
    """A connection that a program has made to the port of the container's own loopback device."""

    def __init__(self, resident, number, connection):
        super().__init__(resident, number)
        self._socket, self._ended = connection, False
        connection.setblocking(False)
        self._input_fd = connection.fileno()
        self._outputs = {self._input_fd: 1}
        resident.send({"id": number, "connected": True})
        self._watch()

    def kill(self, limit=None):
        self._finish()

    def _feed(self):
        waiting = len(self._pending)
        super()._feed()
        if len(self._pending) < waiting:
            self._resident.send({"id": self.id, "fed": waiting - len(self._pending)})

    def _read(self, fd):
        if super()._read(fd):
            return True
        if not self._outputs:  # it sends no more, and may still receive
            self._resident.send({"id": self.id, "output": 1})
            if self._ended:
                self._finish()
        return False

    def _end_input(self):
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._ends, self._ended = False, True
        if not self._outputs:
            self._finish()

    def _finish(self):
        if self._status is None:
            self._status = 0
            self._resident.forget(self._socket.fileno())
            self._outputs, self._input_fd = {}, -1
            self._socket.close()
            self._resident.send({"id": self.id, "status": 0})
            self._resident.finished(self)


class StartedProgram(Streams):
    """A program, its keeper and its streams, as this process sees them."""

    def __init__(self, resident, message, stdin):
        super().__init__(resident, message["id"])
        self.limit, self._killed = None, False
        self.leader = 0
        self._spawned = message["op"] == "spawn"
        self._terminal = bool(message.get("terminal"))
        self._message = message
        self._pending += stdin
        self._ends = not self._spawned
        self._parts: dict = {1: [], 2: []}
        self._written, self._stored = {1: 0, 2: 0}, {1: 0, 2: 0}
        self._order = []
        self._started = time.monotonic()
        self._oom_kills = oom_kills()
        self._start()

    def _start(self):
        if self._terminal:
            ours, theirs = os.openpty()
            modes = termios.tcgetattr(theirs)
            modes[1] &= ~termios.OPOST
            modes[3] &= ~(termios.ECHO | termios.ECHOE | termios.ECHOK | termios.ECHONL | termios.ECHOCTL)
            termios.tcsetattr(theirs, termios.TCSANOW, modes)
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            streams, self._input_fd, outputs = [theirs] * 3, ours, {ours: 1}
        else:
            pairs = [os.pipe() for _ in range(3)]
            streams = [pairs[0][0], pairs[1][1], pairs[2][1]]
            self._input_fd, outputs = pairs[0][1], {pairs[1][0]: 1, pairs[2][0]: 2}
        for fd in set(streams):
            with contextlib.suppress(OSError):  # for /dev/stdout and its kin, which open it anew
                os.fchown(fd, self._resident.user.uid, self._resident.user.gid)
        try:
            self._keeper = self._resident.take_keeper(self._message, streams)
        except OSError:
            for fd in {self._input_fd, *outputs}:
                os.close(fd)
            raise
        finally:
            for fd in set(streams):
                os.close(fd)
        self._outputs = outputs
        for fd in {*outputs, self._input_fd}:
            os.set_blocking(fd, False)
        self._resident.watch(self._keeper.report, selectors.EVENT_READ, self._reported)
        if self._keeper.leader:
            self._lead(self._keeper.leader)
        if not self._spawned:
            self.deadline = self._started + self._message["seconds"]
        self._feed()

    def kill(self, limit=None):
        """End it and all that it started. Its status comes."""
        if self._status is not None:
            return
        now = time.monotonic()
        if not self._killed:
            self._killed, self.limit = True, limit
            self.deadline = now + _KEEPER_SECONDS
            self._keeper.kill()
        elif self.deadline is not None and self.deadline <= now:
            self.deadline = None
            self._keeper.kill(signal.SIGKILL)
            if self._resident.user.may_become_others:  # its fork may have been stopped, and hold its pipe
                self._resident.end_user()

    def signal(self, number):
        """The leader of its terminal's session, and the group in the foreground, after a signal to that; 0 and 0 if
        it cannot be sent. SIGKILL is not sent to the leader's own group."""
        try:
            group = os.tcgetpgrp(self._input_fd)
            if number:
                if group <= 0 or (number == signal.SIGKILL and group == self.leader):
                    return [0, 0]
                os.killpg(group, number)
        except OSError:
            return [0, 0]
        return [self.leader, group]

    def _has_room(self, stream):
        return not self._spawned or super()._has_room(stream)

    def _take(self, stream, data):
        if self._spawned:
            super()._take(stream, data)
            return
        self._written[stream] += len(data)
        part = data[: self._message["bytes"] - self._stored[stream]]
        if part:
            self._stored[stream] += len(part)
            self._parts[stream].append(part)
            if self._order and self._order[-1][0] == stream:
                self._order[-1][1] += len(part)
            else:
                self._order.append([stream, len(part)])

    def _end_input(self):
        if not self._terminal:
            super()._end_input()

    def _lead(self, leader):
        self.leader = leader
        if self._spawned:
            self._resident.send({"id": self.id, "started": True})

    def _reported(self, fd):
        report = self._keeper.read_report()
        failure = errno.ENOMEM
        if report is None:  # the keeper was killed: for this container's memory, or by programs that are root
            self._status = signal.SIGKILL
            if not self._keeper.ended:
                self._resident.end_user()
        elif self.leader:
            self._status = report[0]
        elif self._keeper.leader:
            self._lead(self._keeper.leader)
            return
        else:
            self._status, failure = 0, report[1]
        self._resident.forget(fd)
        if report is None or not self.leader or self._killed or not report[1]:
            self._keeper.close()
        else:
            self._resident.give_back(self._keeper)
        for output in list(self._outputs):
            for _ in range(_READS_AFTER_END):
                if not self._read(output):
                    break
        self._close()
        if not self.leader:
            self._resident.send({"id": self.id, "error": failure})
        else:
            self._send_status()
        self._resident.finished(self)

    def _send_status(self):
        limit = self.limit
        if limit is None and self._status == signal.SIGKILL and -1 < self._oom_kills < oom_kills():
            limit = "memory_bytes"
        answer = {"id": self.id, "status": self._status, "limit": limit}
        if self._spawned:
            self._resident.send(answer)
            return
        answer.update(
            seconds=time.monotonic() - self._started,
            written=[self._written[1], self._written[2]],
            stored=[self._stored[1], self._stored[2]],
            order=self._order,
        )
        self._resident.send(answer, b"".join(self._parts[1] + self._parts[2]))


class Resident:
    def __init__(self, user, seconds, lines):
        """seconds: that it lives at most. lines: frames are lines of base64."""
        self.user = user
        self._lines = lines
        self._last_end = self._ends = time.monotonic() + seconds
        self._selector = selectors.DefaultSelector()
        self._programs = {}
        self._buffer = bytearray()
        self._ending = []
        """Ids of requests to end all programs."""
        self._connections = itertools.count(-1, -1)
        self._keepers: dict = {}
        """Those that have not been seen to end, by process id."""
        self._idle = None
        """A keeper without a program."""

    def serve(self):
        """Answer requests until stdin ends, or its time is up."""
        self.watch(0, selectors.EVENT_READ, self._received)
        with contextlib.suppress(OSError):
            self.give_back(self._new_keeper())
        while time.monotonic() < self._ends:
            timed = [program for program in self._programs.values() if program.deadline is not None]
            deadlines = [program.deadline for program in timed]
            wait = min([self._ends, *deadlines]) - time.monotonic()
            ready = [key for key, _ in self._selector.select(max(0.0, wait))]
            for key in sorted(ready, key=lambda key: key.fd == 0):  # requests last: they open descriptors
                if key.fd in self._selector.get_map():  # none that another event has closed
                    key.data(key.fd)
            now = time.monotonic()
            for program in timed:
                if program.deadline is not None and program.deadline <= now:
                    program.kill("wall_seconds")
            self._reap()

    def _reap(self):
        """Bury keepers, and orphans: this is the first process of the container. Return whether there are more."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                keeper = self._keepers.pop(pid, None)
                if keeper is not None:  # its number may be another's from now on
                    keeper.pid = 0
        return False

    def take_keeper(self, message, streams):
        """A keeper that has been sent a program. Raises OSError if no process can be started."""
        keeper, self._idle = self._idle, None
        if keeper is not None:
            self.forget(keeper.report)
            try:
                keeper.send(message, streams)
            except OSError:
                keeper.close()
            else:
                return keeper
        keeper = self._new_keeper()
        with contextlib.suppress(OSError):  # it reports why
            keeper.send(message, streams)
        return keeper

    def _new_keeper(self):
        keeper = KeeperClient(self.user)
        self._keepers[keeper.pid] = keeper
        return keeper

    def give_back(self, keeper):
        """Have a keeper wait for the next program, or end if another one does."""
        if self._idle is not None or keeper.ended:
            keeper.kill()
            keeper.close()
            return
        self._idle = keeper
        self.watch(keeper.report, selectors.EVENT_READ, lambda _fd: self._reported_idle(keeper))

    def _reported_idle(self, keeper):
        had_program, report = keeper.leader, keeper.read_report()
        if report is None or not (had_program or keeper.leader):
            self.forget(keeper.report)
            keeper.close()
            self._idle = None

    def end_user(self):
        """End all processes of the programs' user. Return whether that was done."""
        deadline = time.monotonic() + _END_USER_SECONDS
        if self.user.may_become_others:  # the programs, keepers too, are all but this process, which nobody can end
            for keeper in self._keepers.values():
                keeper.ended = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            if self._idle is not None:
                self.forget(self._idle.report)
                self._idle.close()
                self._idle = None
            while self._reap() and time.monotonic() < deadline:  # they count as processes until then
                signal.sigtimedwait((signal.SIGCHLD,), 0.01)
            return True
        while time.monotonic() < deadline:
            try:
                child = os.fork()
            except OSError:
                time.sleep(0.01)
                continue
            if child == 0:
                code = 1
                try:
                    self.user.end_all()
                    code = 0
                finally:
                    os._exit(code)
            pid, status = os.waitpid(child, os.WNOHANG)
            while not pid and time.monotonic() < deadline:
                signal.sigtimedwait((signal.SIGCHLD,), 0.1)
                pid, status = os.waitpid(child, os.WNOHANG)
            if pid and status == 0:
                return True
            if not pid:
                os.kill(child, signal.SIGKILL)
        return False

    def watch(self, fd, events, call):
        try:
            self._selector.modify(fd, events, call)
        except KeyError:
            self._selector.register(fd, events, call)

    def forget(self, fd):
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def send(self, header, payload=b""):
        left = memoryview(encode(header, payload, self._lines))
        while left:
            try:
                left = left[os.write(1, left) :]
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:  # the server is gone
                os._exit(0)

    def finished(self, program):
        """Forget a program whose end has been reported: the answer to `end` comes after it."""
        self._programs.pop(program.id, None)
        self._answer_endings()

    def _answer_endings(self):
        if self._ending and not self._programs:
            answer = {} if self.end_user() else {"error": errno.EAGAIN}
            for number in self._ending:
                self.send({"id": number, **answer})
            self._ending = []

    def _received(self, _fd):
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(0)
        self._buffer += data
        for frame in self._frames():
            self._handle(*decode(frame))

    def _frames(self):
        """Take the whole frames out of the buffer."""
        while True:
            if self._lines:
                end = self._buffer.find(b"\n") + 1
                if not end:
                    return
                frame = base64.b64decode(bytes(self._buffer[:end]))
            else:
                if len(self._buffer) < HEAD.size:
                    return
                end = HEAD.size + sum(HEAD.unpack_from(self._buffer))
                if len(self._buffer) < end:
                    return
                frame = bytes(self._buffer[:end])
            del self._buffer[:end]
            yield frame

    def _handle(self, message, payload):
        number, operation = message["id"], message["op"]
        try:
            if operation in ("run", "spawn"):
                self._programs[number] = StartedProgram(self, message, payload)
            elif operation == "read":
                with self.user.lent():
                    content = read_file(message["path"], message["bytes"])
                self.send({"id": number}, content)
            elif operation == "write":
                with self.user.lent():
                    write_file(message["path"], payload, message["make"])
                self.send({"id": number})
            elif operation == "listen":
                self._listen(message["port"])
                self.send({"id": number})
            elif operation == "end":
                self._end(number)
            elif operation == "lease":
                self._ends = min(self._last_end, time.monotonic() + message["seconds"])
            else:
                self._handle_program(message, payload, self._programs.get(message["of"]))
        except OSError as error:
            self.send({"id": number, "error": error.errno or errno.EIO})
        except ValueError:  # such as an embedded NUL
            self.send({"id": number, "error": errno.EINVAL})

    def _handle_program(self, message, payload, program):
        operation = message["op"]
        if operation == "signal":
            self.send({"id": message["id"], "groups": program.signal(message["signal"]) if program else [0, 0]})
        elif program is None:
            return
        elif operation == "input":
            program.input(payload)
        elif operation == "taken":
            program.taken(message["stream"], message["bytes"])
        elif operation == "kill":
            program.kill("cancelled")

    def _listen(self, port):
        """Pass on connections to a port of the loopback device to the server."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)

        def accept(_fd):
            with contextlib.suppress(OSError):  # such as no more descriptors
                connection = listener.accept()[0]
                if self._ending or sum(number < 0 for number in self._programs) >= _MAX_CONNECTIONS:
                    connection.close()
                    return
                number = next(self._connections)
                self._programs[number] = PassedConnection(self, number, connection)

        self.watch(listener.fileno(), selectors.EVENT_READ, accept)

    def _end(self, number):
        self._ending.append(number)
        self._answer_endings()
        for program in list(self._programs.values()):
            program.kill("cancelled")


def main(user, home, folder, env, seconds, lines):
    """user: of the programs, as of a Dockerfile's USER; empty: that of this process. home: theirs; None: as the image
    has it. folder: is made, as engines do for a working folder that an image names and does not have; empty: none. env:
    further variables of theirs. seconds: that this process lives at most. lines: frames are lines of base64."""
    user = User(user) if user else OwnUser()
    os.environ.update(env, HOME=user.home if home is None else home)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # programs that are root may send any
    prctl(_PR_SET_DUMPABLE, 0)
    with contextlib.suppress(OSError):
        if folder:
            os.makedirs(folder, exist_ok=True)
    try:
        if user.separate:
            os.setgroups([])
    except PermissionError:
        reason = f"its first process (uid {os.geteuid()}) may not become another user"
        os.write(1, encode({"ready": False, "reason": reason}, b"", lines))
        return
    if user.separate and user.uid == 0:
        prctl(_PR_SET_KEEPCAPS, 1)
        drawn = _FIRST_USER + int.from_bytes(os.urandom(4), "big") % _USERS
        try:
            os.setresgid(drawn, drawn, drawn)
            os.setresuid(drawn, drawn, _SAVED_USER)
        except OSError:  # a user namespace that has few users
            os.setresgid(OWN_USER, OWN_USER, OWN_USER)
            os.setresuid(OWN_USER, OWN_USER, _SAVED_USER)
        set_capabilities(user.own_capabilities)
    resident = Resident(user, seconds, lines)
    resident.send({"ready": True, "user": [user.uid, user.gid], "groups": user.groups})
    resident.serve()

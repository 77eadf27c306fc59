"""System calls that Python's library lacks. Sources: the man pages of section 2."""

from __future__ import annotations

import _socket
import ctypes
import mmap
import os
import struct

CLONE_VM = 0x100
CLONE_FILES = 0x400
CLONE_PIDFD = 0x1000
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
SIGCHLD = 17
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
PR_SET_NAME, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 15, 38, 22, 2
MAP_SHARED, PROT_READ, PROT_WRITE = 1, 1, 2
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_PAUSE = ctypes.cast(_libc.pause, ctypes.c_void_p)

_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_COLLAPSE = 25
_HUGE = 2 << 20

_STACK_BYTES = 1 << 14
_CONTEXT_BYTES, _CONTEXT_STACK = 5 << 10, 2 << 10
"""At least `sizeof(ucontext_t)`, 968 on x86-64 and 4560 on ARM; the stack of a function that calls the kernel."""


def _check(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Give this process namespaces of its own."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, flags: int) -> None:
    """Join namespaces: those named by `flags` of the process behind a pidfd, or the one behind a namespace fd."""
    _check(_libc.setns(fd, flags), f"setns({flags:#x})")


def mount(kind: bytes, target: bytes, flags: int, options: bytes | None = None) -> None:
    """Mount a new file system of `kind` at `target`."""
    _check(_libc.mount(kind, target, kind, flags, options), f"mount {target.decode()}")


class Stacks:
    """Room for the stacks of `count` processes made by `clone_idle`. Forks do not have it: it costs them nothing."""

    def __init__(self, count: int) -> None:
        self._room = mmap.mmap(-1, count * _STACK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._room.madvise(mmap.MADV_DONTFORK)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._room))

    def top(self, index: int) -> int:
        """Address of the upper end, where a stack begins."""
        return self._address + (index + 1) * _STACK_BYTES


def clone_idle(stack: int, flags: int) -> tuple[int, int]:
    """Start a child that shares this process's memory and only waits for its death; return its pid and a pidfd
    (close-on-exec).

    It copies no page tables, so it costs a tenth of a fork. It sleeps in libc's `pause` on the stack whose upper end is
    `stack`, which must live as long as the child; signals must be blocked or at their default, for a handler would run
    in shared memory.
    """
    pidfd = ctypes.c_int(-1)
    flags |= CLONE_VM | CLONE_PIDFD | SIGCHLD
    pid = _check(_libc.clone(_PAUSE, stack, flags, None, ctypes.addressof(pidfd)), f"clone({flags:#x})")
    return pid, pidfd.value


def clone_reaper(stack: int, flags: int) -> tuple[int, int]:
    """As `clone_idle`; the child ignores SIGCHLD, so that orphans which become its children leave no zombies.

    It shares this process's descriptors too, for a copy would keep them open for as long as it lives. The disposition
    of the signal is the child's alone, and so it has to set it itself: it runs libc's `sigignore` and then `pause`,
    in contexts (makecontext(3)) at the lower end of its stack. Where libc has no contexts (musl), zombies stay.
    """
    if getattr(_libc, "setcontext", None) is None:
        return clone_idle(stack, flags)
    low = stack - _STACK_BYTES
    waiting, ignoring = low, low + _CONTEXT_BYTES
    _make_context(waiting, _libc.pause, low + 2 * _CONTEXT_BYTES, 0)
    _make_context(ignoring, _libc.sigignore, low + 2 * _CONTEXT_BYTES + _CONTEXT_STACK, waiting, SIGCHLD)
    pidfd = ctypes.c_int(-1)
    flags |= CLONE_VM | CLONE_FILES | CLONE_PIDFD | SIGCHLD
    start = ctypes.cast(_libc.setcontext, ctypes.c_void_p)
    pid = _check(_libc.clone(start, stack, flags, ignoring, ctypes.addressof(pidfd)), f"clone({flags:#x})")
    return pid, pidfd.value


def _make_context(at: int, function: object, stack: int, following: int, *args: int) -> None:
    """A context at the address `at` that calls `function` on the stack from `stack` up, and then goes on with
    `following`."""
    _check(_libc.getcontext(ctypes.c_void_p(at)), "getcontext")
    # `uc_link`, `uc_stack.ss_sp` and `uc_stack.ss_size`, at the same places on all 64-bit architectures of Linux.
    for offset, value in ((8, following), (16, stack), (32, _CONTEXT_STACK)):
        ctypes.c_size_t.from_address(at + offset).value = value
    _libc.makecontext(ctypes.c_void_p(at), ctypes.cast(function, ctypes.c_void_p), len(args), *args)  # type: ignore[arg-type]


def fork() -> int:
    """As `os.fork`, for a process without threads, and without what Python does in the child after it.

    There it renews locks and thread states, which only other threads could have left in a bad way, and calls what
    modules have registered: for that it writes to some 150 pages, each of which is copied, at the price of all the rest
    of a run. What the child does need is done by `program.make_independent`.
    """
    return _check(_libc_with_gil.fork(), "fork")


def map_shared(fd: int, kind: type[ctypes.Array[ctypes.c_char]]) -> memoryview:
    """The beginning of a file as shared memory; unlike `mmap.mmap` it keeps no descriptor open.

    `kind` is a ctypes array type of the length wanted. Keep it: to make one costs more than all the rest.
    """
    length = ctypes.sizeof(kind)
    address = _libc.mmap(None, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if address == MAP_FAILED:
        _check(-1, "mmap")
    return memoryview(kind.from_address(address)).cast("B")


def unmap(view: memoryview) -> None:
    """Undo `map_shared`; nothing else may hold the memory."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    length = view.nbytes
    view.release()
    _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))


def recv_fds(channel: _socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """A message of at most `size` bytes and the descriptors that came with it, `most` at most.

    As `socket.recv_fds`; the module `socket` itself would make every fork dearer.
    """
    remaining = _socket.CMSG_SPACE(4 * most)
    message, ancillary, _, _ = channel.recvmsg(size, remaining)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            fds += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    return message, fds


def send_fds(channel: _socket.socket, message: bytes, fds: list[int]) -> None:
    """Send a message and descriptors; as `socket.send_fds`."""
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    channel.sendmsg([message], rights)


def name_process(name: bytes) -> None:
    """What `ps` and `top` show for this process and its forks."""
    _check(_libc.prctl(PR_SET_NAME, name, 0, 0, 0), "prctl(NAME)")


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapabilityData(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


_CAPABILITY_VERSION_3 = 0x20080522
_no_capabilities = ctypes.byref((_CapabilityData * 2)())
_capability_header = ctypes.byref(_CapabilityHeader(_CAPABILITY_VERSION_3, 0))


def drop_capabilities() -> None:
    """Give up every capability for good."""
    _check(_libc.capset(_capability_header, _no_capabilities), "capset")


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


class SeccompFilter:
    """A compiled BPF program, kept in memory ready to be installed."""

    def __init__(self, program: bytes) -> None:
        self._program = ctypes.create_string_buffer(program, len(program))
        self._header = _Program(len(program) // 8, ctypes.addressof(self._program))
        self._pointer = ctypes.byref(self._header)

    def install(self) -> None:
        """Bind this process and all that it will start to the filter, and forbid set-uid programs."""
        _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
        _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self._pointer, 0, 0), "prctl(SECCOMP)")


def trim_heap() -> None:
    """Give freed memory back to the kernel: a fork copies the page tables of all that is still held."""
    trim = getattr(_libc, "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)


def collapse_heap() -> int:
    """Put this process's private memory on huge pages, where the kernel can (since Linux 6.1); return how many. A fork
    then copies one entry instead of 512, which halves the cost of forking a process that has imported much."""
    made = 0
    with open("/proc/self/maps", encoding="utf-8") as maps:
        regions = [line.split() for line in maps]
    for region in regions:
        start, end = (int(address, 16) for address in region[0].split("-"))
        anonymous = len(region) < 6 or region[5] == "[heap]"
        if region[1] == "rw-p" and anonymous:
            for address in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                made += _libc.madvise(address, _HUGE, _MADV_COLLAPSE) == 0
    return made

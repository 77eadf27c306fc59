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
"""An upper bound of `sizeof(ucontext_t)`, 968 on x86-64 and 4560 on ARM; the stack for one system call."""


def _check(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, flags: int) -> None:
    """Join the namespaces `flags` of the process behind a pidfd, or the one behind a namespace fd."""
    _check(_libc.setns(fd, flags), f"setns({flags:#x})")


def mount(kind: bytes, target: bytes, flags: int, options: bytes | None = None) -> None:
    """Mount a new file system of `kind` at `target`."""
    _check(_libc.mount(kind, target, kind, flags, options), f"mount {target.decode()}")


class Stacks:
    """Memory for the stacks of `count` processes of `clone_idle`. Forks do not inherit it, so it does not slow them."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * _STACK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def top(self, index: int) -> int:
        """Return the address of the upper end, where a stack begins."""
        return self._address + (index + 1) * _STACK_BYTES


def clone_idle(stack: int, flags: int) -> tuple[int, int]:
    """Start a child that shares this process's memory and sleeps until it is killed. Return its pid and a pidfd
    (close-on-exec).

    It copies no page tables, so it takes a tenth of a fork's time. It sleeps in libc's `pause` on the stack whose upper
    end is `stack`, which must live as long as the child. Signals must be blocked or at their default, because a handler
    would run in shared memory.
    """
    pidfd = ctypes.c_int(-1)
    flags |= CLONE_VM | CLONE_PIDFD | SIGCHLD
    pid = _check(_libc.clone(_PAUSE, stack, flags, None, ctypes.addressof(pidfd)), f"clone({flags:#x})")
    return pid, pidfd.value


def clone_reaper(stack: int, flags: int) -> tuple[int, int]:
    """Like `clone_idle`, but the child ignores SIGCHLD, so that orphans which become its children leave no zombies.

    It shares this process's descriptors too, because a copy would hold them open while it lives. Each process has its
    own disposition of the signal, so the child sets it: it runs libc's `sigignore` and then `pause`, in contexts
    (makecontext(3)) at the lower end of its stack. If libc has no contexts (musl), zombies remain.
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
    """Make a context at the address `at` that calls `function` on the stack from `stack` up, then continues with
    `following`."""
    _check(_libc.getcontext(ctypes.c_void_p(at)), "getcontext")
    # `uc_link`, `uc_stack.ss_sp` and `uc_stack.ss_size`, at the same offsets on all 64-bit architectures of Linux.
    for offset, value in ((8, following), (16, stack), (32, _CONTEXT_STACK)):
        ctypes.c_size_t.from_address(at + offset).value = value
    _libc.makecontext(ctypes.c_void_p(at), ctypes.cast(function, ctypes.c_void_p), len(args), *args)  # type: ignore[arg-type]


def fork() -> int:
    """Like `os.fork` for a process without threads, but without Python's work in the child.

    Python renews locks and thread states, which only other threads could have left inconsistent, and calls registered
    hooks. This writes to about 150 pages, each of which is copied, which takes as long as the rest of a run. The child
    calls `program.make_independent` instead.
    """
    return _check(_libc_with_gil.fork(), "fork")


def map_shared(fd: int, kind: type[ctypes.Array[ctypes.c_char]]) -> memoryview:
    """Map the beginning of a file as shared memory. Unlike `mmap.mmap`, this does not hold a descriptor open.

    `kind` is a ctypes array type of the required length. Reuse it, because creating one is slower than the mapping.
    """
    length = ctypes.sizeof(kind)
    address = _libc.mmap(None, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if address == MAP_FAILED:
        _check(-1, "mmap")
    return memoryview(kind.from_address(address)).cast("B")


def unmap(view: memoryview) -> None:
    """Undo `map_shared`. No other view of the memory may exist."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    length = view.nbytes
    view.release()
    _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))


def recv_fds(channel: _socket.socket, size: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Receive a message of at most `size` bytes and at most `max_fds` descriptors.

    Like `socket.recv_fds`, but importing `socket` would make every fork slower.
    """
    message, ancillary, _, _ = channel.recvmsg(size, _socket.CMSG_SPACE(4 * max_fds))
    fds: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            fds += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    return message, fds


def send_fds(channel: _socket.socket, message: bytes, fds: list[int]) -> None:
    """Send a message and descriptors, like `socket.send_fds`."""
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    channel.sendmsg([message], rights)


def name_process(name: bytes) -> None:
    """Set the name that `ps` and `top` display for this process and its forks."""
    _check(_libc.prctl(PR_SET_NAME, name, 0, 0, 0), "prctl(NAME)")


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapabilityData(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


_CAPABILITY_VERSION_3 = 0x20080522
_no_capabilities = ctypes.byref((_CapabilityData * 2)())
_capability_header = ctypes.byref(_CapabilityHeader(_CAPABILITY_VERSION_3, 0))


def drop_capabilities() -> None:
    """Drop all capabilities permanently."""
    _check(_libc.capset(_capability_header, _no_capabilities), "capset")


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


class SeccompFilter:
    """A compiled BPF program in memory."""

    def __init__(self, program: bytes) -> None:
        self._program = ctypes.create_string_buffer(program, len(program))
        self._header = _Program(len(program) // 8, ctypes.addressof(self._program))
        self._pointer = ctypes.byref(self._header)

    def install(self) -> None:
        """Apply the filter to this process and all its future children, and forbid set-uid programs."""
        _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
        _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self._pointer, 0, 0), "prctl(SECCOMP)")


def trim_heap() -> None:
    """Return freed memory to the kernel, since a fork copies the page tables of all memory."""
    trim = getattr(_libc, "malloc_trim", None)  # not in musl
    if trim is not None:
        trim(0)


def collapse_heap() -> int:
    """Move this process's private memory to huge pages if the kernel can (since Linux 6.1), and return their number. A
    fork then copies one entry instead of 512, which halves the time to fork a process with many imports."""
    count = 0
    with open("/proc/self/maps", encoding="utf-8") as maps:
        regions = [line.split() for line in maps]
    for region in regions:
        start, end = (int(address, 16) for address in region[0].split("-"))
        anonymous = len(region) < 6 or region[5] == "[heap]"
        if region[1] == "rw-p" and anonymous:
            for address in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                count += _libc.madvise(address, _HUGE, _MADV_COLLAPSE) == 0
    return count

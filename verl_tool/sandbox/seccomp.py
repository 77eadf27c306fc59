"""The system calls that a run may not make, compiled to BPF by libseccomp.

A list of what is denied, for what Python programs need is open-ended. It closes kernel surface that escapes have used
(namespaces, mounts, io_uring, bpf, userfaultfd, keyrings, ptrace), the network, and memory that no other limit counts.
"""

from __future__ import annotations

import errno

_DENIED = """
    ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise
    userfaultfd bpf perf_event_open keyctl add_key request_key modify_ldt
    mount umount2 pivot_root chroot unshare setns open_by_handle_at name_to_handle_at
    kexec_load kexec_file_load init_module finit_module delete_module lookup_dcookie nfsservctl uselib
    reboot swapon swapoff acct quotactl settimeofday clock_settime clock_adjtime adjtimex stime
    iopl ioperm personality syslog vhangup sethostname setdomainname
    mbind set_mempolicy migrate_pages move_pages get_mempolicy
    fanotify_init fanotify_mark
    setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset seccomp
    socket connect bind listen accept accept4
    shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
    memfd_create
""".split()  # noqa: SIM905  (a page of quotes would hide the names)
"""Answered with EPERM. memfd_create and SysV memory are memory outside every per-run limit, and SysV objects outlive
their maker; `socketpair` stays, for asyncio and multiprocessing are built on it."""

_ABSENT = ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3")
"""Answered with ENOSYS, so that libraries fall back. clone3 takes its flags from memory, where no filter can look."""

_BY_NUMBER = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "set_mempolicy_home_node": 450,
    "map_shadow_stack": 453,
    "statmount": 457,
    "listmount": 458,
    "open_tree_attr": 467,
}
"""Newer than many a libseccomp. From 424 on the numbers are the same on every architecture."""

FORKSERVER_NEEDS = frozenset({"mount", "setns", "clone", "setresuid", "setresgid"})
"""What a forkserver under real root does for its runs. A run has no capability left and gets EPERM from the kernel for
each of them; a user namespace, which would give it some, stays denied."""

_NEW_USER = 0x10000000
_NAMESPACE_FLAGS = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_PR_SET_SECCOMP = 22
_LOW_WORD = 0xFFFFFFFF
"""The kernel reads 32 bits of these arguments; a compare of all 64 is passed by setting a high bit (CVE-2019-10063)."""


def compile_filter(needed: frozenset[str] = frozenset()) -> bytes:
    """A filter as classic BPF for this machine's architecture.

    Args:
        needed: calls to leave out of it; of ``clone`` only the flags that make no user namespace.

    Raises:
        OSError, ImportError, RuntimeError: libseccomp is missing or too old.
    """
    import pyseccomp as seccomp  # loads the system's libseccomp: only when a filter is really wanted

    program = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    program.set_attr(seccomp.Attr.CTL_OPTIMIZE, 2)  # a binary tree: fewer instructions for each call
    denied, absent = seccomp.ERRNO(errno.EPERM), seccomp.ERRNO(errno.ENOSYS)

    def deny(action: int, names: tuple[str, ...] | list[str]) -> None:
        for name in names:
            number = _BY_NUMBER.get(name) or seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
            if number >= 0 and name not in needed:  # negative: this architecture has no such call
                program.add_rule(action, number)

    deny(denied, [*_DENIED, *_BY_NUMBER])
    deny(absent, _ABSENT)
    for flag in (_NEW_USER,) if "clone" in needed else _NAMESPACE_FLAGS:
        program.add_rule(denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    for request in (_TIOCSTI, _TIOCLINUX):
        program.add_rule(denied, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, _LOW_WORD, request))
    program.add_rule(denied, "prctl", seccomp.Arg(0, seccomp.MASKED_EQ, _LOW_WORD, _PR_SET_SECCOMP))
    return _export(program)


def _export(program: object) -> bytes:
    import tempfile

    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)  # type: ignore[attr-defined]
        file.seek(0)
        return file.read()

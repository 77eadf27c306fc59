"""A filter of the system calls that runs may not make, compiled to BPF by libseccomp.

It lists the denied calls, since those that Python programs need cannot be enumerated. It denies kernel features that
sandbox escapes have used (namespaces, mounts, io_uring, bpf, userfaultfd, keyrings, ptrace), the network, memory that
no other limit counts, and calls that affect others: children of the forkserver, watches and locks on files that all
runs read, the page cache, and flushing the host's disks.
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
    sched_setscheduler sched_setparam sched_setattr ioprio_set
""".split()  # noqa: SIM905  (a page of quotes would hide the names)
"""Answered with EPERM. memfd_create and SysV memory are memory outside every per-run limit, and SysV objects outlive
their maker; `socketpair` stays, for asyncio and multiprocessing are built on it."""

_ABSENT = """
    io_uring_setup io_uring_enter io_uring_register clone3
    vmsplice splice tee
    io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents
    inotify_init inotify_init1 inotify_add_watch inotify_rm_watch flock
    membarrier remap_file_pages sysfs
""".split()  # noqa: SIM905
"""Answered with ENOSYS, so that libraries fall back. clone3 takes its flags from memory, where no filter can look;
vmsplice pins memory that no process has; inotify and flock work on the files that all runs share."""

_WITHOUT_EFFECT = """
    sync syncfs fsync fdatasync sync_file_range msync
    fadvise64 readahead
""".split()  # noqa: SIM905
"""Answered with success and not done: a run has nothing on a disk, and through a file of the host's that it may read it
could flush the host's disks or empty the cache that its neighbours read from."""

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
    "listns": 470,
}
"""Newer than many a libseccomp. From 424 on the numbers are the same on every architecture."""

_ABSENT_BY_NUMBER = {
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "cachestat": 451,
    "lsm_get_self_attr": 459,
    "lsm_set_self_attr": 460,
    "lsm_list_modules": 461,
}

LOOPBACK_NEEDS = frozenset({"socket", "connect", "bind", "listen", "accept", "accept4", "flock"})
"""What a program needs that is spoken to over its own loopback device, in a network namespace that has no other. Agents
lock files of their own; on files that several may read, a lock could at most tell one of them that another runs."""
_FOREIGN_FAMILIES = (3, 4, 5, 6, 7, 8, 9)
_FOREIGN_PROTOCOLS = (33, 132, 136, 262)
"""DCCP, SCTP, UDP-Lite and MPTCP: a socket may load the kernel's module."""
_LAST_FAMILY = 10
"""Of sockets: Unix (1), IPv4 (2) and IPv6 (10) are allowed, all others are kernel surface that nobody needs."""

FORKSERVER_NEEDS = frozenset({"mount", "setns", "clone", "setresuid", "setresgid"})
"""What a forkserver under real root does for its runs. A run has no capability left and gets EPERM from the kernel for
each of them; a user namespace, which would give it some, stays denied."""

_NEW_USER = 0x10000000
_NAMESPACE_FLAGS = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
_CLONE_PARENT = 0x8000
"""A child of its own parent: the forkserver's, in a namespace that cannot end before the forkserver has buried it."""
_CLONE_PTRACE = 0x2000
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_SO_ATTACH_FILTER, _SO_ATTACH_BPF, _SO_ATTACH_REUSEPORT_CBPF, _SO_ATTACH_REUSEPORT_EBPF = 26, 50, 51, 52
_AF_UNIX = 1

_DENIED_VALUES = {
    # call: (index of the argument, values); only the low 32 bits count for the kernel
    "ioctl": (1, (_TIOCSTI, _TIOCLINUX, _TIOCSETD)),  # the last loads modules of the kernel: line disciplines
    "fcntl": (1, (1024, 1026)),  # F_SETLEASE, F_NOTIFY: on files that all runs share
    "madvise": (2, (12, 100, 101)),  # MERGEABLE (what pages hold can be told by time), HWPOISON, SOFT_OFFLINE
    "setsockopt": (2, (_SO_ATTACH_FILTER, _SO_ATTACH_BPF, _SO_ATTACH_REUSEPORT_CBPF, _SO_ATTACH_REUSEPORT_EBPF)),
    "prctl": (
        0,
        (
            *(22, 29, 31, 32, 33),  # SET_SECCOMP, SET_TIMERSLACK, TASK_PERF_EVENTS, MCE_KILL
            *(35, 36, 57, 59),  # SET_MM, SET_CHILD_SUBREAPER, SET_IO_FLUSHER, SET_SYSCALL_USER_DISPATCH
            *(
                62,
                67,
                78,
                0x59616D61,
            ),  # SCHED_CORE (keeps other runs off a core), MEMORY_MERGE, FUTEX_HASH, SET_PTRACER
        ),
    ),
}
_PR_SET_DUMPABLE = 4
"""Of prctl: to hide (0) is allowed, to be seen is not."""
_LOW_WORD = 0xFFFFFFFF
"""The kernel reads 32 bits of these arguments; a compare of all 64 is passed by setting a high bit (CVE-2019-10063)."""


def compile_filter(needed: frozenset[str] = frozenset()) -> bytes:
    """A filter as classic BPF for this machine's architecture, without the calls `needed`; of ``clone`` only the flags
    that make no user namespace are left out. Raises OSError, ImportError or RuntimeError if libseccomp is missing or
    too old."""
    import pyseccomp as seccomp  # loads the system's libseccomp: only when a filter is really wanted

    program = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    program.set_attr(seccomp.Attr.CTL_OPTIMIZE, 2)  # a binary tree: fewer instructions for each call
    denied, absent = seccomp.ERRNO(errno.EPERM), seccomp.ERRNO(errno.ENOSYS)

    numbers = _BY_NUMBER | _ABSENT_BY_NUMBER

    def deny(action: int, names: list[str]) -> None:
        for name in names:
            number = numbers.get(name) or seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
            if number >= 0 and name not in needed:  # negative: this architecture has no such call
                program.add_rule(action, number)

    deny(denied, [*_DENIED, *_BY_NUMBER])
    deny(absent, [*_ABSENT, *_ABSENT_BY_NUMBER])
    deny(seccomp.ERRNO(0), _WITHOUT_EFFECT)
    namespaces = (_NEW_USER,) if "clone" in needed else _NAMESPACE_FLAGS
    for flag in (*namespaces, _CLONE_PARENT, _CLONE_PTRACE):
        program.add_rule(denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    for call, (index, values) in _DENIED_VALUES.items():
        for value in values:
            program.add_rule(denied, call, seccomp.Arg(index, seccomp.MASKED_EQ, _LOW_WORD, value))
    hiding = seccomp.Arg(0, seccomp.MASKED_EQ, _LOW_WORD, _PR_SET_DUMPABLE)
    program.add_rule(denied, "prctl", hiding, seccomp.Arg(1, seccomp.NE, 0))
    program.add_rule(denied, "socketpair", seccomp.Arg(0, seccomp.NE, _AF_UNIX))
    if "socket" in needed:
        program.add_rule(denied, "socket", seccomp.Arg(0, seccomp.GT, _LAST_FAMILY))
        for family in _FOREIGN_FAMILIES:
            program.add_rule(denied, "socket", seccomp.Arg(0, seccomp.EQ, family))
        for protocol in _FOREIGN_PROTOCOLS:
            program.add_rule(denied, "socket", seccomp.Arg(2, seccomp.EQ, protocol))
    return _export(program)


def _export(program: object) -> bytes:
    import tempfile

    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)  # type: ignore[attr-defined]
        file.seek(0)
        return file.read()

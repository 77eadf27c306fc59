"""Attacks of our own, beside the corpus: each prints what it got away with, and is expected to print nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hostile_ground import HostileGround, Outcome

from verl_tool.sandbox import Limits, SandboxPool

WALL_SECONDS = 4.0
AT_ONCE = 4

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(200)]

_SYSCALL = (
    "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ndef got(r): print('GOT' if r >= 0 else 'denied')\n"
)

ATTACKS: dict[str, tuple[str, str]] = {
    # name: (code, predicate over `out`, `err` (text), `rc`, `result`)
    "memfd-exec": (_SYSCALL + "got(libc.syscall(319, b'x', 0))", "'GOT' not in out and 'denied' in out"),
    "memfd-secret": (_SYSCALL + "got(libc.syscall(447, 0))", "'GOT' not in out and 'denied' in out"),
    "host-root-by-proc": (
        "import os\nfor p in ('/proc/1/root', '/proc/1/cwd', '/proc/self/root/root'):\n"
        "    try: print('GOT', os.listdir(p)) if '/proc/1' in p else print(os.path.exists('/work/shared'))\n"
        "    except OSError: print('denied')",
        "'GOT' not in out and out.count('denied') == 2 and 'True' not in out",
    ),
    "signals-to-pid-1": (
        "import os, signal\nfor s in (9, 15, 2, 19, 11):\n    try: os.kill(1, s)\n    except OSError: pass\n"
        "print('alive')",
        "'alive' in out",
    ),
    "signals-to-the-group": (
        "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nfor p in (0, -1):\n"
        "    try: os.kill(p, 15)\n    except OSError: pass\nprint('alive')",
        "'alive' in out",
    ),
    "dumpable-and-ptrace": (
        _SYSCALL + "libc.prctl(4, 1, 0, 0, 0)\np = os.fork()\nif p == 0:\n    import time; time.sleep(3); os._exit(0)\n"
        "got(libc.ptrace(16, p, 0, 0))",
        "'GOT' not in out",
    ),
    "hidden-from-others": (
        _SYSCALL + "import subprocess, sys\n"
        "hide = 'import ctypes, sys; print(ctypes.CDLL(None).prctl(4, 0, 0, 0, 0), flush=True); sys.stdin.read()'\n"
        "p = subprocess.Popen([sys.executable, '-c', hide], stdin=-1, stdout=-1)\n"
        "print('hides', p.stdout.readline() == b'0\\n')\n"
        "for name in ('mem', 'environ', 'fd/0', 'maps'):\n"
        "    try: open(f'/proc/{p.pid}/{name}', 'rb').read(1); print('GOT', name)\n"
        "    except OSError: pass\n"
        "for hidden in (1, 2, 1 << 32, (1 << 32) + 1): got(libc.prctl(4, ctypes.c_ulong(hidden), 0, 0, 0))\n"
        "p.kill()",
        "'hides True' in out and 'GOT' not in out",
    ),
    "become-root": (
        _SYSCALL
        + "got(libc.setuid(0)); got(libc.setresuid(0, 0, 0)); got(libc.setgid(0)); got(libc.setgroups(0, None))",
        "'GOT' not in out and out.count('denied') == 4",
    ),
    "anothers-uid": (
        _SYSCALL
        + "u = os.getuid()\ngot(libc.setresuid(u + 1, u + 1, u + 1)); got(libc.setresgid(u - 1, u - 1, u - 1))",
        "'GOT' not in out",
    ),
    "set-uid-programs": (
        "import subprocess\nfor c in (['su', '-c', 'id'], ['mount'], ['passwd', '-S']):\n"
        "    r = subprocess.run(c, capture_output=True, stdin=subprocess.DEVNULL, text=True)\n"
        "    print('GOT' if 'uid=0' in r.stdout else 'denied')",
        "'GOT' not in out",
    ),
    "core-pattern": (
        "for p in ('/proc/sys/kernel/core_pattern', '/proc/sys/vm/overcommit_memory', '/proc/sysrq-trigger',"
        " '/proc/sys/kernel/hostname'):\n"
        "    try: open(p, 'w').write('x'); print('GOT', p)\n    except OSError: print('denied')",
        "'GOT' not in out and out.count('denied') == 4",
    ),
    "sys": (
        "import os\nprint('GOT' if os.path.exists('/sys/kernel') or os.path.exists('/sys/fs/cgroup') else 'none')",
        "'none' in out",
    ),
    "kernel-memory": (
        "for p in ('/proc/kcore', '/dev/mem', '/dev/kmsg', '/proc/kmsg', '/dev/vda', '/dev/fuse', '/dev/net/tun'):\n"
        "    try: open(p, 'rb').read(1); print('GOT', p)\n    except OSError: print('denied')",
        "'GOT' not in out",
    ),
    "make-a-device": (
        "import os, stat\ntry: os.mknod('d', 0o666 | stat.S_IFBLK, os.makedev(254, 0)); print('GOT')\n"
        "except OSError: print('denied')",
        "'GOT' not in out",
    ),
    "mount-tricks": (
        _SYSCALL + "got(libc.mount(b'/', b'/box/tmp', None, 4096, None)); got(libc.umount2(b'/proc', 2));"
        " got(libc.umount2(b'/box', 2)); got(libc.syscall(428, -100, b'/', 1)); got(libc.syscall(430, b'tmpfs', 0));"
        " got(libc.mount(None, b'/usr/lib', None, 32 | 4096, None))",
        "'GOT' not in out and out.count('denied') == 6",
    ),
    "namespaces": (
        _SYSCALL + "for f in (0x20000, 0x20000000, 0x40000000, 0x10000000, 0x2000000, 0x8000000):\n"
        "    got(libc.unshare(f))\n    got(libc.syscall(56, f | 17, 0, 0, 0, 0))\n"
        "fd = os.open('/proc/self/ns/mnt', os.O_RDONLY)\ngot(libc.setns(fd, 0))",
        "'GOT' not in out and out.count('denied') == 13",
    ),
    "io-uring": (
        _SYSCALL + "b = ctypes.create_string_buffer(256)\ngot(libc.syscall(425, 8, b))",
        "'denied' in out",
    ),
    "sysv-memory": (
        _SYSCALL + "got(libc.shmget(0, 1 << 20, 0o1666)); got(libc.msgget(0, 0o1666)); got(libc.semget(0, 1, 0o1666));"
        " got(libc.mq_open(b'/x', 0o102, 0o666, None))",
        "'GOT' not in out and out.count('denied') == 4",
    ),
    "sockets-between-runs": (
        "import socket\nfor f in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):\n"
        "    for t in (socket.SOCK_STREAM, socket.SOCK_DGRAM):\n"
        "        try: socket.socket(f, t); print('GOT', f, t)\n        except OSError: print('denied')",
        "'GOT' not in out and out.count('denied') == 6",
    ),
    "inherited-descriptors": (
        "import os\nfor fd in range(3, 5000):\n"
        "    try: os.fstat(fd); print('GOT', fd, os.readlink(f'/proc/self/fd/{fd}'))\n    except OSError: pass",
        "'GOT' not in out and rc == 0",
    ),
    "descriptors-passed-in-a-circle": (
        "import socket, array\n"
        "def send(a, fd): a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [fd]))])\n"
        "n = 0\ntry:\n"
        "    while True:\n"
        "        a, b = socket.socketpair(); f = open(f'/tmp/{n}', 'wb'); f.truncate(1 << 20)\n"
        "        send(a, f.fileno()); send(a, a.fileno()); send(b, b.fileno())\n"
        "        a.close(); b.close(); f.close(); n += 1\n"
        "        if n > 20000: break\n"
        "except OSError as e: print('stopped', n)",
        "True",
    ),
    "raise-own-limits": (
        "import resource as r\nfor w in (r.RLIMIT_NOFILE, r.RLIMIT_STACK, r.RLIMIT_CORE, r.RLIMIT_MEMLOCK,"
        " r.RLIMIT_NPROC, r.RLIMIT_FSIZE, r.RLIMIT_AS, r.RLIMIT_CPU):\n"
        "    soft, hard = r.getrlimit(w)\n"
        "    try: r.setrlimit(w, (hard + 1 if hard > 0 else -1, hard + 1 if hard > 0 else -1)); print('GOT', w)\n"
        "    except (ValueError, OSError): print('denied')",
        "'GOT' not in out and out.count('denied') == 8",
    ),
    "unlinked-open-files": (
        "import os\nn = 0\ntry:\n    while True:\n"
        "        f = os.open('/tmp/u', os.O_CREAT | os.O_RDWR); os.unlink('/tmp/u')\n"
        "        os.write(f, bytes(1 << 20)); n += 1\nexcept OSError as e: print(n, e.strerror)",
        "int(out.split()[0]) <= 64",
    ),
    "sparse-file": (
        "try:\n    f = open('s', 'wb'); f.truncate(1 << 40); print('GOT')\nexcept OSError: print('denied')",
        "'denied' in out",
    ),
    "stdout-truncate-up": (
        "import os\nfor size in (1 << 40, 1 << 30, 60 << 20):\n"
        "    try: os.ftruncate(1, size); print('GOT', size)\n    except OSError: pass",
        "len(result.stdout_raw) <= 1 << 20",
    ),
    "stdout-allocate": (
        "import os\ntry:\n"
        "    while True: os.posix_fallocate(1, 0, 60 << 20); os.posix_fallocate(1, 60 << 20, 1 << 30)\n"
        "except OSError as e: print('stopped', file=__import__('sys').stderr)",
        "'stopped' in err and len(result.stdout_raw) <= 1 << 20",
    ),
    "stdout-reopened": (
        "import os\nf = os.open('/proc/self/fd/1', os.O_RDWR | os.O_TRUNC)\n"
        "os.lseek(f, 50 << 20, 0)\nos.write(f, b'far')\n"
        "os.lseek(1, 0, 0); os.write(1, b'near')",
        # The run's own streams are appended to, wherever it seeks: "near" is behind "far", and neither is kept.
        "not out.strip(chr(0)) and result.stdout_truncated",
    ),
    "stdout-replaced": (
        "import os, sys\nr, w = os.pipe()\nos.dup2(w, 1)\nos.dup2(r, 2)\nprint('x')\nos._exit(3)",
        "rc == 3 and out == ''",
    ),
    "seal-the-output": (
        "import fcntl\ntry: fcntl.fcntl(1, fcntl.F_ADD_SEALS, 15); print('GOT')\nexcept OSError: print('denied')",
        "'denied' in out",
    ),
    "forged-journal": (
        "import ctypes, os, random\n"
        "for line in open('/proc/self/maps'):\n"
        "    if 'memfd:job' in line:\n"
        "        a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        ctypes.memmove(a, os.urandom(b - a), b - a)\n"
        "os.write(1, b'o' * 100); os.write(2, b'e' * 100)",
        "out == 'o' * 100 and err == 'e' * 100 and sorted(result.output) == ['e'] * 100 + ['o'] * 100",
    ),
    "forged-failure": (
        "import ctypes, os\n"
        "for line in open('/proc/self/maps'):\n"
        "    if 'memfd:job' in line: ctypes.c_uint64.from_address(int(line.split('-')[0], 16)).value = 2\n"
        "print('ran'); os._exit(125)",
        "rc == 125 and out == 'ran\\n'",
    ),
    "forkservers-memory": (
        "import ctypes\nfor line in open('/proc/self/maps'):\n"
        "    if '/dev/zero' in line and 'rw-s' in line: print('GOT', line)",
        "'GOT' not in out and rc == 0",
    ),
    "priority": (
        _SYSCALL + "import errno\nfor f in (lambda: os.setpriority(0, 0, -20), lambda: os.nice(-5),"
        " lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))):\n"
        "    try: f(); print('GOT')\n    except OSError: print('denied')",
        "'GOT' not in out and out.count('denied') == 3",
    ),
    "lock-memory": (
        _SYSCALL + "b = ctypes.create_string_buffer(64 << 20)\ngot(libc.mlock(b, 64 << 20)); got(libc.mlockall(3))",
        "'GOT' not in out and out.count('denied') == 2",
    ),
    "timer-flood": (
        _SYSCALL
        + "n = 0\nt = ctypes.c_void_p()\nwhile libc.timer_create(1, None, ctypes.byref(t)) == 0 and n < 10**6: n += 1\n"
        "print(n)",
        "rc == 0 or rc < 0",
    ),
    "child-of-the-forkserver": (
        _SYSCALL + "r = libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0)\nif r == 0: os._exit(0)\ngot(r)\n"
        "b = (ctypes.c_uint64 * 11)(0x8000, 0, 0, 0, 17)\nr = libc.syscall(435, b, 88)\nif r == 0: os._exit(0)\ngot(r)",
        "'GOT' not in out and out.count('denied') == 2",
    ),
    "traced-child": (
        _SYSCALL + "r = libc.syscall(56, 0x2000 | 17, 0, 0, 0, 0)\nif r == 0: os._exit(0)\ngot(r)",
        "'GOT' not in out",
    ),
    "pinned-pages": (
        _SYSCALL + "r, w = os.pipe()\nb = ctypes.create_string_buffer(4096)\n"
        "iov = (ctypes.c_size_t * 2)(ctypes.addressof(b), 4096)\ngot(libc.vmsplice(w, iov, 1, 0))\n"
        "os.write(w, b'x'); r2, w2 = os.pipe()\ngot(libc.tee(r, w2, 1, 0)); got(libc.splice(r, None, w2, None, 1, 0))",
        "'GOT' not in out and out.count('denied') == 3",
    ),
    "pairs-of-other-families": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nb = (ctypes.c_int * 2)()\n"
        "for f in range(0, 50):\n    for t in (1, 2, 3, 5):\n"
        "        for high in (0, 1 << 32):\n"
        "            ctypes.set_errno(0)\n"
        "            r = libc.syscall(ctypes.c_long(53), ctypes.c_long(f | high), ctypes.c_long(t),"
        " ctypes.c_long(0), b)\n"
        "            if f != 1 and ctypes.get_errno() != 1: print('GOT', f, t)\n"
        "import socket\na, b = socket.socketpair()\na.send(b'pair'); print(b.recv(9))",
        "'GOT' not in out and 'pair' in out",
    ),
    "aio": (
        _SYSCALL + "c = ctypes.c_ulong(0)\ngot(libc.syscall(206, 2000, ctypes.byref(c)))",
        "'denied' in out",
    ),
    "watches-and-locks-on-shared-files": (
        "import ctypes, fcntl, os\nlibc = ctypes.CDLL(None)\nprint('GOT' if libc.inotify_init1(0) >= 0 else 'denied')\n"
        "f = os.open('/usr/bin/env', os.O_RDONLY)\nd = os.open('/usr/lib', os.O_RDONLY)\n"
        "for call in (lambda: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB), lambda: fcntl.fcntl(f, 1024, 0),\n"
        "             lambda: fcntl.fcntl(d, fcntl.F_NOTIFY, fcntl.DN_ACCESS)):\n"
        "    try: call(); print('GOT')\n    except OSError: print('denied')",
        "'GOT' not in out and out.count('denied') == 4",
    ),
    "own-place-in-the-line-of-victims": (
        "import ctypes, os\nctypes.CDLL(None).prctl(4, 1, 0, 0, 0)\n"
        "for name in ('oom_score_adj', 'oom_adj', 'coredump_filter', 'timerslack_ns', 'autogroup', 'clear_refs'):\n"
        "    for who in ('self', f'{os.getpid()}', f'self/task/{os.getpid()}'):\n"
        "        try: open(f'/proc/{who}/{name}', 'w').write('0'); print('GOT', name)\n        except OSError: pass\n"
        "os.system('echo 0 > /proc/self/oom_score_adj')\nprint(open('/proc/self/oom_score_adj').read())",
        "out == '1000\\n\\n'",
    ),
    "options-of-the-process": (
        _SYSCALL
        + "for o, v in ((4, 1), (22, 1), (29, 1), (31, 0), (33, 0), (35, 14), (36, 1), (57, 1), (59, 1), (62, 1),"
        " (67, 1), (0x59616d61, -1), (4 | 1 << 32, 1), (36 | 1 << 32, 1)):\n"
        "    got(libc.syscall(ctypes.c_long(157), ctypes.c_long(o), ctypes.c_long(v), 0, 0, 0))",
        "'GOT' not in out and out.count('denied') == 14",
    ),
    "scheduling-class": (
        "import os\nfor policy in (os.SCHED_FIFO, os.SCHED_RR, os.SCHED_BATCH, os.SCHED_IDLE):\n"
        "    try: os.sched_setscheduler(0, policy, os.sched_param(0)); print('GOT', policy)\n"
        "    except OSError: print('denied')",
        "'GOT' not in out and out.count('denied') == 4",
    ),
    "flushing-the-hosts-disks": (
        "import mmap, os, time\nf = os.open('/usr/bin/env', os.O_RDONLY)\nt = time.monotonic()\n"
        "for _ in range(2000):\n    os.sync(); os.fsync(f); os.fdatasync(f)\n"
        "    os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "print(time.monotonic() - t)\nm = mmap.mmap(-1, 4096); m[0] = 1; m.flush()",
        "float(out) < 1.5 and rc == 0",
    ),
    "leader-that-leaves": (
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), os.write(1, b'thread'), time.sleep(30))).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)",
        "result.timed_out",
    ),
    "children-by-other-flags": (
        _SYSCALL + "for f in (0x8000 | 17 | 1 << 40, 0x8000 | 0x4000 | 17, 0x8000 | 0x10000 | 0x100 | 0x800):\n"
        "    r = libc.syscall(ctypes.c_long(56), ctypes.c_long(f), 0, 0, 0, 0)\n    if r == 0: os._exit(0)\n    got(r)",
        "'GOT' not in out and out.count('denied') == 3",
    ),
    "children-that-tell-nobody": (
        _SYSCALL + "for _ in range(40):\n    if libc.syscall(56, 0, 0, 0, 0, 0) == 0: os._exit(0)\nprint('end')",
        "'end' in out",
    ),
    "pid-1-by-other-means": (
        _SYSCALL
        + "b = (ctypes.c_uint64 * 2)(0, 0)\ngot(libc.syscall(302, 1, 7, b, 0)); got(libc.syscall(203, 1, 8, b));"
        " got(libc.syscall(234, 1, 1, 9)); fd = libc.syscall(434, 1, 0); got(libc.syscall(424, fd, 9, 0, 0));"
        " got(libc.syscall(438, fd, 0, 0)); got(libc.syscall(141, 0, 1, 19))",
        "'GOT' not in out and out.count('denied') == 6",
    ),
    "queued-signals": (
        _SYSCALL + "import signal\nsignal.pthread_sigmask(0, range(34, 60))\nb = ctypes.create_string_buffer(128)\n"
        "ctypes.c_int.from_buffer(b, 8).value = -1\nn = 0\n"
        "while n < 10**5 and libc.syscall(129, os.getpid(), 40, b) == 0: n += 1\nprint(n)",
        "int(out) <= 256",
    ),
    "filters-on-sockets": (
        "import socket\na, b = socket.socketpair()\nfor o in (26, 50, 51, 52):\n"
        "    try: a.setsockopt(1, o, bytes(16)); print('GOT')\n    except PermissionError: print('denied')",
        "'GOT' not in out and out.count('denied') == 4",
    ),
    "leases-by-high-bits": (
        _SYSCALL + "f = os.open('/usr/bin/env', 0)\nfor c in (1024 | 1 << 32, 1026 | 1 << 33):\n"
        "    got(libc.syscall(ctypes.c_long(72), ctypes.c_long(f), ctypes.c_long(c), ctypes.c_long(0)))",
        "'GOT' not in out and out.count('denied') == 2",
    ),
    "kernel-surface-of-late": (
        _SYSCALL
        + "for n in (444, 445, 446, 451, 459, 460, 461, 324, 139, 216, 470): got(libc.syscall(n, 0, 0, 1, 0, 0))",
        "'GOT' not in out and out.count('denied') == 11",
    ),
    "descriptors-held-in-flight": (
        "import array, os, socket\nheld = []\ntry:\n    while True:\n"
        "        a, b = socket.socketpair(); held.append((a, b))\n"
        "        for _ in range(200):\n"
        "            r, w = os.pipe(); os.set_blocking(w, False); os.write(w, bytes(4096))\n"
        "            a.sendmsg([b'x'], [(1, 1, array.array('i', [r, w]))]); os.close(r); os.close(w)\n"
        "except OSError: print('stopped')",
        "'stopped' in out or result.limit_hit",
    ),
    "a-tree-that-stops": (
        "import os, signal\nfor _ in range(4): os.fork()\nos.kill(0, signal.SIGSTOP)",
        "result.timed_out",
    ),
    "names-by-attributes": (
        "import os\nopen('f', 'w').close()\nn = 0\ntry:\n"
        "    while n < 10**5: os.setxattr('f', f'user.{n}', bytes(60000)); n += 1\nexcept OSError: pass\nprint(n)",
        "int(out) < 5000",
    ),
    "inotify-flood": (
        _SYSCALL + "n = 0\nwhile libc.inotify_init() >= 0: n += 1\nprint(n)",
        "int(out) < 256",
    ),
    "zombie-flood": (
        "import os\nn = 0\ntry:\n    while True:\n        if os.fork() == 0: os._exit(0)\n        n += 1\n"
        "except OSError: print('stopped', n)",
        "'stopped' in out and int(out.split()[1]) <= 32",
    ),
    "orphan-flood": (
        "import os\nfor _ in range(60):\n    try: p = os.fork()\n    except OSError: print('stopped'); break\n"
        "    if p == 0:\n        try: os.fork()\n        finally: os._exit(0)\n    os.waitpid(p, 0)\nprint('end')",
        "'end' in out",
    ),
    "spinning-threads": (
        "import subprocess, sys\nps = [subprocess.Popen(['/bin/sh', '-c', 'while :; do :; done']) for _ in range(28)]\n"
        "while True: pass",
        "result.timed_out",
    ),
    "pipe-hoard": (
        "import os, fcntl\nn = 0\ntry:\n    while True:\n        r, w = os.pipe()\n"
        "        try: fcntl.fcntl(w, 1031, 1 << 20)\n        except OSError: pass\n"
        "        os.set_blocking(w, False)\n"
        "        try: n += os.write(w, bytes(1 << 20))\n        except OSError: pass\n"
        "except OSError: print(n >> 20)",
        "int(out) <= 130",
    ),
    "memory-of-others": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 64 << 20)\nprint('GOT' if m.read().count(0) != 64 << 20 else 'zero')",
        "out == 'zero\\n'",
    ),
    "deep-folders": (
        "import os\nn = 0\ntry:\n    while True: os.mkdir('d'); os.chdir('d'); n += 1\nexcept OSError as e: print(n)",
        "int(out) <= 4096",
    ),
    "exit-hooks-that-hang": (
        "import atexit, time\natexit.register(lambda: [None for _ in iter(int, 1)])\nprint('end')",
        "result.timed_out and 'end' in out",
    ),
    "excepthook-that-hangs": (
        "import sys\nsys.excepthook = lambda *a: [0 for _ in iter(int, 1)]\n1/0",
        "result.timed_out",
    ),
    "error-that-cannot-be-shown": (
        "class E(Exception):\n    def __str__(self): raise E()\n    __repr__ = __str__\nraise E()",
        "rc == 1",
    ),
    "circle-of-errors": (
        "a, b = ValueError('a'), ValueError('b')\na.__context__ = b; b.__context__ = a; b.__cause__ = a\nraise a",
        "rc == 1 and 'ValueError: a' in err",
    ),
    "no-descriptors-left": (
        "import os\ntry:\n    while True: os.dup(1)\nexcept OSError: pass\n1/0",
        "rc == 1 and 'ZeroDivisionError' in err",
    ),
    "no-memory-left": (
        "x = []\ntry:\n    while True: x.append(bytearray(1 << 20))\nexcept MemoryError: pass\n"
        "try:\n    while True: x.append(bytearray(64))\nexcept MemoryError: pass\nraise ValueError('full')",
        "rc != 0",
    ),
    "garbage-for-code": ("\0\x01\xff", "rc == 1 and 'Error' in err"),
    "unknown-encoding": ("# -*- coding: nonsense -*-\nprint(1)", "rc == 1 and 'SyntaxError' in err"),
    "nested-code": ("(" * 5000 + ")" * 5000, "rc != 0"),
    "long-traceback": (
        "import sys\nsys.setrecursionlimit(100000)\ndef f(n): return f(n - 1) if n else 1 / 0\nf(30000)",
        "rc != 0",
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HostileGround]:
    async with HostileGround(SandboxPool(workers=2), tmp_path_factory.mktemp("canary")) as ground:
        yield ground


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outcomes(ground: HostileGround) -> AsyncIterator[dict[str, tuple[Outcome, dict[str, object]]]]:
    """How each attack went and what was seen around it, a few at a time."""
    filled: dict[str, tuple[Outcome, dict[str, object]]] = {}
    names = list(ATTACKS)
    for first in range(0, len(names), AT_ONCE):
        batch = names[first : first + AT_ONCE]
        done = await asyncio.gather(
            *(ground.unleash(ATTACKS[name][0], Limits(wall_seconds=WALL_SECONDS)) for name in batch)
        )
        seen = await ground.witness(done)
        filled.update({name: (outcome, seen) for name, outcome in zip(batch, done, strict=True)})
    yield filled


@pytest.mark.parametrize("name", ATTACKS)
async def test_attack_fails(name: str, outcomes: dict[str, tuple[Outcome, dict[str, object]]]) -> None:
    outcome, seen = outcomes[name]
    result = outcome.result
    known = {"out": result.stdout, "err": result.stderr, "rc": outcome.rc, "result": result}
    shown = f"{result.stdout[-500:]!r} {result.stderr[-800:]!r} rc={outcome.rc} {result.limit_hit}"
    assert eval(ATTACKS[name][1], {}, known), shown  # noqa: S307  (our own expression, from above)
    assert outcome.next_ok
    assert outcome.wall < WALL_SECONDS + 2
    assert seen["leftover"] == 0
    assert seen["server_alive"]
    assert seen["victim_alive"]
    assert seen["host_unchanged"]
    assert not seen["canary_leaked"]


async def test_runs_do_not_share_their_standard_input(ground: HostileGround) -> None:
    """`/dev/null` is opened for each of them: flags and owners that one sets are not there for the next."""
    write = "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK); fcntl.fcntl(0, 10, 42)"
    read = "import fcntl, os\nprint(fcntl.fcntl(0, fcntl.F_GETFL) & (os.O_APPEND | os.O_NONBLOCK), fcntl.fcntl(0, 11))"
    for _ in range(3):
        assert (await ground.pool.run(write)).ok
        assert (await ground.pool.run(read)).stdout == "0 0\n"

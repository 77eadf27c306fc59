"""What a run gives, what it may use, and what the pool does when things go wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import venv
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from verl_tool.errors import ConfigError, IsolationError, SandboxError
from verl_tool.sandbox import Level, Limits, SandboxPool

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(workers=1, max_concurrent=8) as pool:
        yield pool


async def test_output_is_kept_apart_and_interleaved(pool: SandboxPool) -> None:
    result = await pool.run(
        "import sys\nprint('a', end='')\nprint('b', file=sys.stderr)\nprint('c')\nsys.stderr.write('d')"
    )
    assert (result.stdout, result.stderr, result.output) == ("ac\n", "b\nd", "ab\nc\nd")
    assert result.exit_code == 0
    assert result.ok
    assert result.signal is None


async def test_many_changes_of_stream_lose_nothing(pool: SandboxPool) -> None:
    result = await pool.run("import sys\nfor i in range(20000):\n print('o')\n print('e', file=sys.stderr)")
    assert result.stdout == "o\n" * 20000
    assert result.stderr == "e\n" * 20000
    assert result.output.startswith("o\ne\n" * 4000)
    assert sorted(result.output) == sorted(result.stdout + result.stderr)


async def test_output_of_a_subprocess_comes_in_order(pool: SandboxPool) -> None:
    result = await pool.run("import subprocess\nprint(1)\nsubprocess.run(['echo', '2'])\nprint(3)")
    assert result.stdout == "1\n2\n3\n"


async def test_output_beyond_the_limit_is_counted_and_dropped(pool: SandboxPool) -> None:
    code = "import sys\nfor _ in range(1000): print('x' * 99)\nprint('done', file=sys.stderr)"
    result = await pool.run(code, limits=Limits(output_bytes=1234))
    assert len(result.stdout_raw) == 1234
    assert result.stdout_bytes == 100_000
    assert result.stdout_truncated
    assert not result.stderr_truncated
    assert result.stderr == "done\n"
    assert result.ok


async def test_invalid_utf8_is_replaced_and_kept_raw(pool: SandboxPool) -> None:
    result = await pool.run(r"import sys; sys.stdout.buffer.write(b'a\xffb')")
    assert result.stdout == "a\ufffdb"
    assert result.stdout_raw == b"a\xffb"


@pytest.mark.parametrize(
    ("code", "exit_code", "killed_by"),
    [
        ("import os; os._exit(7)", 7, None),
        ("import sys; sys.exit(3)", 3, None),
        ("import sys; sys.exit('bye')", 1, None),
        ("raise SystemExit", 0, None),
        ("1/0", 1, None),
        ("raise KeyboardInterrupt", 130, None),
        ("import os; os.abort()", None, signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", None, signal.SIGTERM),
        ("import ctypes; ctypes.string_at(0)", None, signal.SIGSEGV),
    ],
)
async def test_how_it_ended_is_known(
    pool: SandboxPool, code: str, exit_code: int | None, killed_by: int | None
) -> None:
    result = await pool.run(code)
    assert (result.exit_code, result.signal) == (exit_code, killed_by)
    assert result.limit_hit is None


async def test_a_traceback_shows_user_code_only(pool: SandboxPool) -> None:
    result = await pool.run("def f():\n    return 1 / 0\n\nf()")
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "main.py", line 4, in <module>'
    assert lines[2] == "    f()"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "program.py" not in result.stderr
    assert "forkserver" not in result.stderr


async def test_a_syntax_error_is_the_codes_own(pool: SandboxPool) -> None:
    result = await pool.run("print('x'")
    assert result.exit_code == 1
    assert "SyntaxError: '(' was never closed" in result.stderr
    assert "Traceback" not in result.stderr


async def test_stdin_is_data_or_nothing(pool: SandboxPool) -> None:
    given = await pool.run("print(input()); print(input())", stdin="one\ntwo\n")
    assert given.stdout == "one\ntwo\n"
    nothing = await pool.run("input()")
    assert "EOFError" in nothing.stderr
    assert not nothing.timed_out


async def test_it_looks_like_a_script(pool: SandboxPool) -> None:
    code = (
        "import sys, inspect, os\n"
        "def own(): return 1\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv, open(__file__).readline().strip())\n"
        "    print(inspect.getsource(own).strip())\n"
        "    print(os.path.samefile(os.getcwd(), os.path.dirname(__file__)), os.listdir())\n"
    )
    result = await pool.run(code)
    assert result.stdout.splitlines() == [
        "['main.py'] import sys, inspect, os",
        "def own(): return 1",
        "True ['main.py']",
    ]


async def test_it_ends_as_a_script_does(pool: SandboxPool) -> None:
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'exit function')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "class A:\n    def __del__(self): print('del')\n"
        "a = A()\nprint('main')\n"
    )
    assert (await pool.run(code)).stdout == "main\nthread\nexit function\ndel\n"


async def test_a_module_of_the_users_own_may_be_called_threading(pool: SandboxPool) -> None:
    result = await pool.run("import sys, types; sys.modules['threading'] = types.ModuleType('mine'); print(1)")
    assert (result.stdout, result.stderr, result.exit_code) == ("1\n", "", 0)


async def test_processes_of_its_own_work(pool: SandboxPool) -> None:
    code = (
        "import multiprocessing, subprocess, sys\n"
        "def square(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn'):\n"
        "        with multiprocessing.get_context(method).Pool(2) as pool:\n"
        "            print(method, pool.map(square, range(4)))\n"
        "    print(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout)\n"
    )
    result = await pool.run(code, limits=Limits(wall_seconds=30))
    assert result.stdout == "fork [0, 1, 4, 9]\nspawn [0, 1, 4, 9]\n5\n\n", result.stderr


async def test_files_go_in_and_come_out(pool: SandboxPool) -> None:
    result = await pool.run(
        "import helper, os\nos.makedirs('out')\n"
        "with open('out/r.bin', 'wb') as f: f.write(helper.double(open('in/d', 'rb').read()))",
        files={"in/d": b"\x00\xff", "helper.py": b"def double(b): return b + b"},
        fetch_files=["out/r.bin", "absent", "in"],
    )
    assert result.files == {"out/r.bin": b"\x00\xff\x00\xff"}, result.stderr


async def test_fetching_follows_no_link(pool: SandboxPool) -> None:
    code = (
        "import os\nos.symlink('/etc/ld.so.cache', 'link')\nos.symlink('/etc', 'folder')\nos.mkfifo('pipe')\n"
        "os.symlink('main.py', 'inner')\n"
    )
    result = await pool.run(code, fetch_files=["link", "folder/ld.so.cache", "pipe", "inner", "main.py"])
    assert list(result.files) == ["main.py"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../b", "", "a//b", "."])
async def test_a_file_name_must_stay_in_the_folder(pool: SandboxPool, name: str) -> None:
    with pytest.raises(ConfigError, match="plain path"):
        await pool.run("", files={name: b""})


async def test_long_code_and_input(pool: SandboxPool) -> None:
    code = "x = '" + "a" * 5_000_000 + "'\nimport sys\nprint(len(x), len(sys.stdin.read()))"
    result = await pool.run(code, stdin="b" * 3_000_000)
    assert result.stdout == "5000002 3000000\n".replace("5000002", "5000000")


async def test_code_larger_than_the_disk_is_refused(pool: SandboxPool) -> None:
    with pytest.raises(ConfigError, match="disk_bytes is 65536"):
        await pool.run("#" * 70_000, limits=Limits(disk_bytes=1 << 16))


async def test_wall_limit(pool: SandboxPool) -> None:
    result = await pool.run("print('begun')\nwhile True: pass", limits=Limits(wall_seconds=0.5))
    assert result.timed_out
    assert result.limit_hit == "wall_seconds"
    assert result.signal == signal.SIGKILL
    assert result.stdout == "begun\n"
    assert 0.5 <= result.wall_seconds < 3


async def test_cpu_limit_counts_all_processes(pool: SandboxPool) -> None:
    code = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    result = await pool.run(code, limits=Limits(wall_seconds=20, cpu_seconds=0.6))
    assert result.limit_hit == "cpu_seconds"
    assert result.timed_out
    assert result.wall_seconds < 10
    assert result.cpu_seconds >= 0.6


async def test_memory_limit_of_one_process(pool: SandboxPool) -> None:
    result = await pool.run("x = bytearray(300 << 20)", limits=Limits(memory_bytes=200 << 20))
    assert "MemoryError" in result.stderr
    fits = await pool.run("x = bytearray(150 << 20); print(len(x))", limits=Limits(memory_bytes=200 << 20))
    assert fits.ok
    assert fits.peak_memory_bytes > 150 << 20


async def test_memory_limit_counts_all_processes(pool: SandboxPool) -> None:
    code = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(100 << 20)\ntime.sleep(30)"
    result = await pool.run(code, limits=Limits(wall_seconds=30, memory_bytes=300 << 20))
    assert result.limit_hit == "memory_bytes"
    assert not result.timed_out


async def test_memory_that_processes_share_counts_once(pool: SandboxPool) -> None:
    code = (
        "import os, time\nx = bytearray(150 << 20)\nfor _ in range(3): os.fork()\ntime.sleep(0.6)\nprint('ok')\n"
        "try:\n    while True: os.wait()\nexcept ChildProcessError: pass"  # the run ends with its first process
    )
    result = await pool.run(code, limits=Limits(memory_bytes=300 << 20))
    assert result.limit_hit is None
    assert result.stdout == "ok\n" * 8


async def test_what_processes_print_at_once_is_all_there(pool: SandboxPool) -> None:
    code = (
        "import os\nfor _ in range(3): os.fork()\nfor i in range(500): print('ok')\n"
        "try:\n    while True: os.wait()\nexcept ChildProcessError: pass"
    )
    result = await pool.run(code)
    assert result.stdout.split() == ["ok"] * 4000


async def test_disk_limit_holds_over_all_its_places(pool: SandboxPool) -> None:
    code = (
        "n = 0\n"
        "try:\n"
        "    for place in ('.', '/tmp', '/dev/shm'):\n"
        "        for i in range(3):\n"
        "            with open(f'{place}/f{i}', 'wb') as f: f.write(bytes(1 << 20))\n"
        "            n += 1\n"
        "except OSError as error: print(n, error.strerror)\n"
    )
    result = await pool.run(code, limits=Limits(disk_bytes=5 << 20))
    assert result.stdout == "4 No space left on device\n"


async def test_nothing_of_one_run_is_left_for_the_next(pool: SandboxPool) -> None:
    await pool.run(
        "import os, sys, builtins, json\nbuiltins.leak = 1\njson.leak = 1\nos.environ['LEAK'] = '1'\n"
        "for p in ('.', '/tmp', '/dev/shm'): open(p + '/leak', 'w').close()"
    )
    result = await pool.run(
        "import os, builtins, json\nprint(hasattr(builtins, 'leak'), hasattr(json, 'leak'), 'LEAK' in os.environ,"
        " *(os.path.exists(p + '/leak') for p in ('.', '/tmp', '/dev/shm')))"
    )
    assert result.stdout == "False " * 5 + "False\n"


async def test_random_numbers_differ_between_runs(pool: SandboxPool) -> None:
    code = "import random, uuid, numpy.random\nprint(random.random(), uuid.uuid4(), numpy.random.random())"
    first, second = await pool.run(code), await pool.run(code)
    assert not set(first.stdout.split()) & set(second.stdout.split())
    assert len(first.stdout.split()) == 3


async def test_the_environment_holds_nothing_of_the_server(pool: SandboxPool) -> None:
    result = await pool.run("import os; print(*sorted(os.environ))")
    assert "LD_BIND_NOW" not in result.stdout
    assert set(result.stdout.split()) <= {
        *("HOME", "LANG", "MKL_NUM_THREADS", "MPLBACKEND", "NUMEXPR_NUM_THREADS", "OMP_NUM_THREADS"),
        *("OPENBLAS_NUM_THREADS", "PATH", "PWD", "PYTHONDONTWRITEBYTECODE"),
    }


async def test_answers_are_not_crossed(pool: SandboxPool) -> None:
    results = await asyncio.gather(*(pool.run(f"print({i} * 3)") for i in range(150)))
    assert [result.stdout for result in results] == [f"{i * 3}\n" for i in range(150)]
    assert pool.stats().live == 0
    assert pool.stats().queued == 0


async def test_cancelling_kills_the_run(pool: SandboxPool) -> None:
    task = asyncio.create_task(pool.run("import time; time.sleep(60)", limits=Limits(wall_seconds=60)))
    await asyncio.sleep(0.3)
    assert pool.stats().live == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert pool.stats().live == 0
    assert pool._workers[0].live == 0


async def test_cancelling_in_the_queue_gives_the_turn_on() -> None:
    async with SandboxPool(workers=1, max_concurrent=1, warm_modules=()) as pool:
        first = asyncio.create_task(pool.run("import time; time.sleep(0.5)"))
        await asyncio.sleep(0.1)
        waiting = [asyncio.create_task(pool.run(f"print({i})")) for i in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        assert (await waiting[1]).stdout == "1\n"
        assert (await waiting[2]).stdout == "2\n"
        assert (await first).ok
        assert pool.stats().live == 0


async def test_a_full_queue_refuses() -> None:
    async with SandboxPool(workers=1, max_concurrent=1, max_queued=1, warm_modules=()) as pool:
        runs = [asyncio.create_task(pool.run("import time; time.sleep(0.3)")) for _ in range(3)]
        done = await asyncio.gather(*runs, return_exceptions=True)
        refused = [error for error in done if isinstance(error, SandboxError)]
        assert len(refused) == 1
        assert refused[0].retryable
        assert "queue is full (1 runs wait)" in str(refused[0])


async def test_without_isolation_a_run_that_had_begun_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    async with SandboxPool(workers=1, warm_modules=(), required_level="none") as pool:
        running = asyncio.create_task(pool.run("import time; time.sleep(60)", limits=Limits(wall_seconds=60)))
        await asyncio.sleep(0.5)
        pool._workers[0].abandon()
        with pytest.raises(SandboxError) as caught:
            await asyncio.wait_for(running, 10)
        assert not caught.value.retryable
        assert (await asyncio.wait_for(pool.run("print(1)"), 20)).stdout == "1\n"
        assert pool.stats().restarts == 1


async def test_the_death_of_forkservers_costs_no_run() -> None:
    """Runs that had begun begin again, and what they had printed is not told twice."""
    async with SandboxPool(workers=2, warm_modules=(), max_concurrent=4) as pool:
        code = "import time; print('begun', flush=True); time.sleep(0.05); print({})"
        runs = [asyncio.create_task(pool.run(code.format(i))) for i in range(100)]
        for worker in (0, 1):
            await asyncio.sleep(0.3)
            pool._workers[worker].abandon()
        done = await asyncio.wait_for(asyncio.gather(*runs), 60)
        assert [result.stdout for result in done] == [f"begun\n{i}\n" for i in range(100)]
        assert pool.stats().restarts == 2


async def test_a_forkserver_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_tool.sandbox.pool._ANSWER_SECONDS", 0.5)
    async with SandboxPool(workers=1, warm_modules=(), limits=Limits(wall_seconds=0.5)) as pool:
        assert pool._workers[0].pid is not None
        outermost = psutil.Process(pool._workers[0].pid)
        for process in (outermost, *outermost.children(recursive=True)):
            process.suspend()
        result = await asyncio.wait_for(pool.run("print('answered')"), 30)
        assert result.stdout == "answered\n"
        assert pool.stats().restarts == 1


async def test_check_tells_a_live_pool_from_a_closed_one() -> None:
    pool = SandboxPool(workers=1, warm_modules=())
    async with pool:
        await pool.check()
        assert pool.level.level is Level.full
        assert "seccomp" in pool.level.describe()
    with pytest.raises(SandboxError, match="not running"):
        await pool.check()


async def test_without_bubblewrap_it_refuses_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SECRET", "1")
    with pytest.raises(IsolationError, match=r"bubblewrap is not installed.*--isolation none"):
        await SandboxPool(workers=1).start()
    async with SandboxPool(workers=1, required_level="none", warm_modules=()) as pool:
        assert pool.level.level is Level.none
        fetched = await pool.run("open('f', 'w').write('x')", fetch_files=["f"])
        assert fetched.files == {"f": b"x"}
        result = await pool.run("import os; print(os.getcwd(), 'SECRET' in os.environ)")
        folder, has_secret = result.stdout.split()
        assert has_secret == "False"
        assert not _exists(folder)
        slow = await pool.run(
            "import subprocess; subprocess.run(['/bin/sleep', '60'])", limits=Limits(wall_seconds=0.5)
        )
        assert slow.timed_out


async def test_an_unknown_level_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'ful' is unknown; known: none, full"):
        SandboxPool(required_level="ful")


async def test_an_interpreter_that_does_not_run_is_an_error() -> None:
    with pytest.raises(IsolationError, match="does not run"):
        await SandboxPool(interpreter="/nowhere/python").start()


async def test_closing_leaves_no_process_behind() -> None:
    pool = SandboxPool(workers=2, warm_modules=())
    await pool.start()
    pids = [worker.pid for worker in pool._workers]
    run = asyncio.create_task(pool.run("import time; time.sleep(60)", limits=Limits(wall_seconds=60)))
    await asyncio.sleep(0.3)
    await pool.close()
    with pytest.raises(SandboxError):
        await run
    assert not [pid for pid in pids if _exists(f"/proc/{pid}")]


def _exists(path: str) -> bool:
    return os.path.exists(path)


async def test_limits_have_least_values() -> None:
    with pytest.raises(ConfigError, match="processes=0 is too small; give 1 or more"):
        Limits(processes=0)


@pytest.mark.parametrize(
    ("code", "loaded"),
    [("", "[]"), ("# numpy", "['numpy']"), ("# sympy", "['numpy', 'sympy']"), ("# numpy, sympy", "['numpy', 'sympy']")],
)
async def test_a_program_starts_with_the_modules_that_it_mentions(pool: SandboxPool, code: str, loaded: str) -> None:
    names = "'num' + 'py', 'sym' + 'py'"
    result = await pool.run(f"{code}\nimport sys\nprint([name for name in ({names}) if name in sys.modules])")
    assert result.stdout == f"{loaded}\n"


async def test_a_virtual_environment_below_tmp_works() -> None:
    """Runs have a /tmp of their own, and still find an interpreter there."""
    code = "import of_this_venv, subprocess, sys\nprint(of_this_venv.x)\nopen('/tmp/mine', 'w').write('a')\n"
    code += "print(subprocess.run([sys.executable, '-c', 'import of_this_venv as m; print(m.x)'], capture_output=True))"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        _make_venv(Path(folder))
        async with SandboxPool(workers=1, warm_modules=(), interpreter=f"{folder}/bin/python") as pool:
            result = await pool.run(code)
    assert result.stdout.startswith("5\n"), result.stderr
    assert "stdout=b'5\\n'" in result.stdout


def _make_venv(folder: Path) -> None:
    venv.create(folder, symlinks=True)
    next(folder.glob("lib/python*/site-packages")).joinpath("of_this_venv.py").write_text("x = 5")

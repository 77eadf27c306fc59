"""IPython's additions as a session's Python finds them. Runs within the sandbox: standard library only, no import of
this project. `install` is called once in each session that needs it; `cells` writes the calls of `KernelShell`.
"""

from __future__ import annotations

import builtins
import os
import re
import select
import subprocess
import sys
import time
import types

FIGURES = "/dev/shm/.figures"
"""Where `Shell.save_figures` leaves them: ``0.png``, ``1.png``, …"""
FIGURE_MARK = "\x1dfigure %s\x1d"
"""What stands in the output of a cell where it showed the figure of that number."""
_READ = 1 << 16
_QUIET_SECONDS = 0.1
"""After a command has ended, what it left running may keep its output open: so long is waited for more of it."""
_run = eval  # of the user's own code, where it belongs
_BACKEND = "verl_tool_figures"


class MagicUsageError(Exception):
    """A magic that is unknown or wrongly used."""


class KernelShell:
    """What ``get_ipython()`` gives."""

    def __init__(self, main, pre_import):
        self.user_ns = main.__dict__
        self.events = types.SimpleNamespace(register=_nothing, unregister=_nothing)
        self._pre_import = pre_import
        self._saved = 0

    def system(self, command, shell=None):
        """``!command``: its output goes to that of the cell as it comes."""
        self._run(command, shell, lambda data: (sys.stdout.write(data.decode(errors="replace")), sys.stdout.flush()))

    def getoutput(self, command):
        """``name = !command``: the lines of its output."""
        parts: list[bytes] = []
        self._run(command, None, parts.append)
        return b"".join(parts).decode(errors="replace").splitlines()

    def run_line_magic(self, name, rest):
        """``%name rest``."""
        magic = getattr(self, f"_line_{name}", None)
        if magic is None:
            known = ", ".join(sorted(each[6:] for each in dir(self) if each.startswith("_line_")))
            raise MagicUsageError(f"Line magic function `%{name}` not found; known: {known}")
        return magic(rest)

    def run_cell_magic(self, name, rest, body):
        """``%%name rest``, then `body`."""
        if name in ("bash", "sh", "!"):
            return self.system(body, "sh" if name == "sh" else "bash")
        if name == "writefile":
            append, path = rest.startswith("-a "), rest.removeprefix("-a ").strip().strip("'\"")
            with open(os.path.expanduser(path), "a" if append else "w", encoding="utf-8") as file:
                file.write(body)
            print(f"{'Appending to' if append else 'Writing'} {path}")
        elif name == "timeit":
            self._line_timeit(f"{rest}\n{body}")
        elif name == "time":
            self._line_time(body)
        else:
            raise MagicUsageError(
                f"Cell magic `%%{name}` not found; known: bash, sh, time, timeit, writefile (alone in the first line)"
            )
        return None

    def help(self, name):
        """``name?``."""
        import inspect

        try:
            value = _run(name, self.user_ns)
        except (NameError, AttributeError):
            print(f"Object `{name}` not found.")
            return
        try:
            print(f"Signature: {name}{inspect.signature(value)}")
        except (TypeError, ValueError):
            print(f"Value:     {value!r:.1000}")
        print(f"Type:      {type(value).__name__}")
        print(f"Docstring: {inspect.getdoc(value) or '<no docstring>'}")

    def prepare_figures(self):
        """Have matplotlib draw into memory, and `save_figures` save what it is told to show."""
        try:
            os.environ.setdefault("MPLCONFIGDIR", "/tmp/.matplotlib")
            import matplotlib
            from matplotlib.backends.backend_agg import FigureCanvasAgg
        except ImportError:
            return
        backend = sys.modules[_BACKEND] = types.ModuleType(_BACKEND)
        backend.__dict__.update(FigureCanvas=FigureCanvasAgg, show=lambda *_, **__: self.show_figures())
        matplotlib.use(f"module://{_BACKEND}")
        import matplotlib.pyplot

    def save_figures(self):
        """Save and close the open figures of matplotlib."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            os.makedirs(FIGURES, exist_ok=True)
            figure = pyplot.figure(number)
            figure.savefig(f"{FIGURES}/{self._saved}.png", format="png", bbox_inches="tight")
            pyplot.close(figure)
            self._saved += 1

    def show_figures(self):
        """Save the open figures, and mark their places in the output."""
        first = self._saved
        self.save_figures()
        for number in range(first, self._saved):
            print(FIGURE_MARK % number)

    def saved_figures(self):
        """How many were saved since the last time, the open ones included."""
        self.save_figures()
        saved, self._saved = self._saved, 0
        return saved

    def _run(self, command, shell, write):
        """Run a command; `write` is given what it writes to stdout and stderr."""
        process = subprocess.Popen(
            [shell or "bash", "-c", self._expanded(command) if shell is None else command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        fd = process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            finished = process.poll() is not None
            if poll.poll(_QUIET_SECONDS * 1000):
                data = os.read(fd, _READ)
                if not data:
                    break
                write(data)
            elif finished:
                break
        process.stdout.close()
        self.user_ns["_exit_code"] = process.wait()

    def _expanded(self, command):
        """With the values of ``{expression}`` and ``$name`` where Python knows them; the rest is the shell's."""

        def of_expression(found):
            try:
                return str(_run(found[1], self.user_ns))
            except Exception:  # noqa: BLE001  (not Python's: a brace of the shell's)
                return found[0]

        def of_name(found):
            return str(self.user_ns[found[1]]) if found[1] in self.user_ns else found[0]

        command = re.sub(r"(?<![\$\\{])\{([^{}\n]+)\}", of_expression, command)
        return re.sub(r"(?<![\$\\])\$([A-Za-z_]\w*)", of_name, command)

    # Magics of one line.

    def _line_timeit(self, rest):
        import timeit

        options = re.match(r"\s*((?:-[nr]\s*\d+\s+|-[qocpt]\s+)*)", rest)
        assert options is not None
        counts = dict(re.findall(r"-([nr])\s*(\d+)", options[1]))
        timer = timeit.Timer(rest[options.end() :].strip() or "pass", globals=self.user_ns)
        loops = int(counts.get("n", 0))
        if not loops:
            loops, took = timer.autorange()
            rounds = int(counts.get("r", 7 if took < 0.5 else 3))
        else:
            rounds = int(counts.get("r", 7))
        times = [seconds / loops for seconds in timer.repeat(rounds, loops)]
        mean = sum(times) / len(times)
        spread = (sum((each - mean) ** 2 for each in times) / len(times)) ** 0.5
        of = f"mean ± std. dev. of {rounds} run{'s' * (rounds != 1)}, {loops:,} loop{'s' * (loops != 1)} each"
        print(f"{_duration(mean)} ± {_duration(spread)} per loop ({of})")

    def _line_time(self, rest):
        import ast

        tree = ast.parse(rest.strip(), "<time>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            exec(compile(tree, "<time>", "exec"), self.user_ns)
            value = None if last is None else _run(compile(ast.Expression(last.value), "<time>", "eval"), self.user_ns)
        finally:
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"CPU times: {_duration(cpu)}\nWall time: {_duration(wall)}")
        return value

    def _line_who(self, rest):
        names = self._line_who_ls(rest)
        print("\t ".join(names) if names else "Interactive namespace is empty.")

    def _line_who_ls(self, rest):
        kinds = set(rest.split())
        return [name for name in sorted(self._names()) if not kinds or type(self.user_ns[name]).__name__ in kinds]

    def _line_whos(self, rest):
        rows = [
            (name, type(self.user_ns[name]).__name__, f"{self.user_ns[name]!r:.80}") for name in sorted(self._names())
        ]
        print("\n".join(["Variable   Type   Data/Info", *("   ".join(row) for row in rows)]))

    def _line_reset(self, rest):
        for name in self._names():
            del self.user_ns[name]
        for statement in self._pre_import:
            exec(statement, self.user_ns)

    def _line_cd(self, rest):
        os.chdir(os.path.expanduser(rest.strip("'\"") or "~"))
        print(os.getcwd())

    def _line_pwd(self, rest):
        return os.getcwd()

    def _line_env(self, rest):
        name, equals, value = rest.partition("=")
        if not rest:
            return dict(os.environ)
        if not equals:
            return os.environ.get(name.strip(), f"Environment does not have key: {name}")
        os.environ[name.strip()] = value.strip()
        print(f"env: {name.strip()}={value.strip()}")
        return None

    def _line_ls(self, rest):
        self.system(f"ls {rest}")

    def _line_cat(self, rest):
        self.system(f"cat {rest}")

    def _line_pip(self, rest):
        self.system(f"{sys.executable} -m pip {rest}")

    def _line_run(self, rest):
        import runpy
        import shlex

        path, *arguments = shlex.split(rest)
        before, sys.argv = sys.argv, [path, *arguments]
        try:
            found = runpy.run_path(path, run_name="__main__")
        finally:
            sys.argv = before
        self.user_ns.update({name: value for name, value in found.items() if not name.startswith("__")})

    def _line_matplotlib(self, rest):
        return None  # figures are taken in any case

    _line_config = _line_load_ext = _line_autoreload = _line_matplotlib

    def _names(self):
        return [name for name, value in self.user_ns.items() if not name.startswith("_")]


def _nothing(*_, **__):
    """In the place of what other programs may ask of IPython, such as matplotlib of its events."""


def display(*values, **_):
    """Show values as text."""
    for value in values:
        print(value if isinstance(value, str) else repr(value))


class _Rich:
    """Text in the place of IPython's rich objects, such as ``Markdown("**a**")``."""

    def __init__(self, data=None, **named):
        self.data = data

    def __repr__(self):
        return str(self.data)


def install(main, pre_import):
    """Give the module `main` IPython's names. `pre_import`: statements to run again after ``%reset``."""
    shell = KernelShell(main, pre_import)
    builtins.__dict__.update(get_ipython=lambda: shell, display=display)
    _hide_own_frames()
    _stand_in(shell)


def _hide_own_frames():
    displayed_by = sys.excepthook

    def show(kind, error, trace):
        if kind is MagicUsageError:
            print(f"UsageError: {error}", file=sys.stderr)
            return
        frames = []
        while trace is not None:
            if trace.tb_frame.f_code.co_filename != __file__:
                frames.append(trace)
            trace = trace.tb_next
        following = None
        for link in reversed(frames):
            link.tb_next = following
            following = link
        displayed_by(kind, error.with_traceback(following), following)

    sys.excepthook = show


def _stand_in(shell):
    """The modules ``IPython`` and ``IPython.display``, where they are not installed."""
    import importlib.util

    if importlib.util.find_spec("IPython") is not None:
        return
    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.__path__ = []
    package.__dict__.update(version_info=(9, 0, 0, ""), get_ipython=lambda: shell, display=module)
    module.__dict__.update(display=display, clear_output=_nothing)
    for name in ("Markdown", "HTML", "Latex", "Math", "Image", "SVG", "JSON", "Pretty", "Code"):
        setattr(module, name, type(name, (_Rich,), {}))
    sys.modules.update({"IPython": package, "IPython.display": module})


def _duration(seconds):
    for unit, minimum in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= minimum:
            return f"{seconds / minimum:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"

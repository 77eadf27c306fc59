"""Right solutions of the tasks in `examples/tasks`, in shapes that a verifier must not stumble over."""

from __future__ import annotations

MEDIAN = """
def median(values):
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def spread(values):
    return max(values) - min(values) if values else 0
"""
_CODE = {
    "plain": MEDIAN,
    "prints when it is imported": "print('hello')\nprint('[1, 2]', end='')\n" + MEDIAN + "\nprint('x' * 3_000_000)",
    "prints at its end": "import atexit\natexit.register(print, 'the end')\n" + MEDIAN,
    "prints in its functions": MEDIAN.replace("    ordered =", "    print(values)\n    ordered ="),
    "has replaced stdout": "import io, sys\nsys.stdout = io.StringIO()\n" + MEDIAN,
    "has closed stdout": "import sys\nsys.stdout.close()\n" + MEDIAN,
    "logs and warns": "import logging, warnings\nlogging.basicConfig(level=0)\nwarnings.warn('old')\n" + MEDIAN,
    "has a main part": MEDIAN + "\nif __name__ == '__main__':\n    raise SystemExit(median([1]))",
    "has an exit code at its end": "import atexit, os\natexit.register(os._exit, 3)\n" + MEDIAN,
    "leaves a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\n" + MEDIAN,
    "leaves a process": "import subprocess\nsubprocess.Popen(['sleep', '100'])\n" + MEDIAN,
    "changes its folder": "import os\nos.chdir('/tmp')\n" + MEDIAN,
    "sets limits of its own": "import sys, gc, random\nsys.setrecursionlimit(9000)\ngc.disable()\nrandom.seed(0)\n"
    + MEDIAN,
    "has signal handlers": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + MEDIAN,
    "changes its argument": MEDIAN.replace("    ordered = sorted(values)", "    values.sort()\n    ordered = values"),
    "has annotations": "from __future__ import annotations\n" + MEDIAN.replace("(values)", "(values: list[int])", 1),
    "uses the library": (
        "import statistics\n\n\ndef median(values):\n    return statistics.median(values) if values else None\n\n\n"
        "def spread(values):\n    return max(values, default=0) - min(values, default=0)\n"
    ),
    "uses numpy": (
        "import numpy as np\n\n\ndef median(values):\n    return np.median(values) if values else None\n\n\n"
        "def spread(values):\n    return np.max(values) - np.min(values) if values else np.int64(0)\n"
    ),
    "uses fractions": MEDIAN.replace("/ 2\n", "/ Fraction(2)\n").replace(
        "\ndef", "from fractions import Fraction\ndef", 1
    ),
    "is a class's": (
        "class S:\n" + MEDIAN.replace("\n", "\n    ").replace("(values):", "(self, values):") + "\n\n"
        "median, spread = S().median, S().spread\n"
    ),
    "is cached": "import functools\n" + MEDIAN + "\n_median = functools.cache(lambda v: 0)\n",
    "names a variable as a builtin": "sum = list = None\n" + MEDIAN,
    "has a star import": "from math import *\nfrom os.path import *\n" + MEDIAN,
}


def _written(text: str, name: str = "statistics_of.py") -> str:
    return f"cat > {name} <<'PYTHON'\n{text}\nPYTHON\n"


_NESTED = "mkdir src && mv statistics_of.py src/ && "
_AROUND = {
    "a package": "mkdir statistics_of && mv statistics_of.py statistics_of/__init__.py",
    "a link to another file": _NESTED + "ln -s src/statistics_of.py statistics_of.py",
    "a link by its whole path": _NESTED + "ln -s /box/work/src/statistics_of.py statistics_of.py",
    "a link by the path of the image": _NESTED + "ln -s /app/src/statistics_of.py statistics_of.py",
    "taken from another module": _NESTED + "echo 'from src.statistics_of import median, spread' > statistics_of.py",
    "line ends of Windows": "sed -i 's/$/\\r/' statistics_of.py",
    "a byte order mark": "printf '\\357\\273\\277' | cat - statistics_of.py > x && mv x statistics_of.py",
    "for its owner only": "chmod 600 statistics_of.py && chmod 700 .",
    "for reading only": "chmod 400 statistics_of.py && chmod 500 .",
    "an old date": "touch -d 1999-01-01 statistics_of.py",
    "much beside it": "for n in $(seq 200); do echo > file$n; done; truncate -s 30M large; mkfifo pipe; ln -s no x",
    "a virtual environment": "mkdir -p venv/bin; ln -s $(command -v python3) venv/bin/python; ln -s /usr/lib venv/lib",
    "a repository": "git init -q . && git add -A && git -c user.name=a -c user.email=b commit -qm x; true",
    "compiled already": "python3 -c 'import statistics_of'; PYTHONDONTWRITEBYTECODE= python3 -c 'import statistics_of'",
    "programs that go on": "(setsid sleep 100 &); nohup sleep 100 > /dev/null 2>&1 & disown",
    "a full disk": "cat /dev/zero > zero 2> /dev/null; true",
    "names in other scripts": "echo 1 > 'größe 数.txt'; echo 1 > $'two\\nlines'; mkdir -- '-rf'",
    "modules of other names": "echo x = 1 > utils.py; echo import utils > test_more.py; echo '[x]' > pyproject.toml",
}
_ANSWERS = {
    "plain": "echo 6484 > answer.txt",
    "without a line end": "printf 6484 > answer.txt",
    "a line end of Windows": "printf '6484\\r\\n' > answer.txt",
    "blanks around it": "printf '\\n  6484 \\n\\n' > answer.txt",
    "a link": "echo 6484 > port; ln -s port answer.txt",
    "for its owner only": "echo 6484 > answer.txt; chmod 600 answer.txt",
    "for nobody": "echo 6484 > answer.txt; chmod 0 answer.txt; chmod 0500 .",
    "a hard link": "echo 6484 > port; ln port answer.txt",
    "moved there": "echo 6484 > /tmp/x; mv /tmp/x answer.txt",
    "written as a sparse file": "printf 6484 > answer.txt; truncate -s 4 answer.txt",
}
_REPORTS = {
    "indented": "json.dump(report, open('report.json', 'w'), indent=4, sort_keys=True)",
    "on one line with a line end": "open('report.json', 'w').write(json.dumps(report) + '\\n\\n')",
    "numbers as floats": "report['failed'] = float(report['failed']); json.dump(report, open('report.json', 'w'))",
    "escaped": "open('report.json', 'w').write(json.dumps(report).replace('/', '\\\\u002f'))",
    "replaced": "json.dump(report, open('x', 'w')); import os; os.replace('x', 'report.json')",
    "a link": "json.dump(report, open('x', 'w')); import os; os.symlink('x', 'report.json')",
}
_TABLES = {
    "line ends of Windows": "sed -i 's/$/\\r/' orders.csv",
    "all quoted": (
        "python3 -c \"import csv; r = list(csv.reader(open('orders.csv', newline='')));"
        " csv.writer(open('orders.csv', 'w', newline=''), quoting=csv.QUOTE_ALL).writerows(r)\""
    ),
    "no line end at its end": 'printf %s "$(cat orders.csv)" > x; mv x orders.csv',
    "a link": "mv orders.csv done.csv; ln -s done.csv orders.csv",
    "for its owner only": "chmod 400 orders.csv",
}
_REPORT = (
    "import json; report = {'requests': 376, 'failed': 58, 'slowest': '/static/app.js', 'busiest_host': '10.0.0.84'}\n"
)
_SOLVED = "bash /solution/solve.sh"
RIGHT = [
    *(("repair-function", name, _written(text)) for name, text in _CODE.items()),
    *(("repair-function", name, _written(MEDIAN) + line) for name, line in _AROUND.items()),
    *(("find-value", name, line) for name, line in _ANSWERS.items()),
    *(("parse-log", name, f'python3 - <<"PYTHON"\n{_REPORT}{line}\nPYTHON') for name, line in _REPORTS.items()),
    *(("fill-csv", name, f"{_SOLVED}\n{line}") for name, line in _TABLES.items()),
    ("failing-test", "with other tests", f"{_SOLVED}\nrm test_slugs.py; echo 'assert 0' > conftest.py"),
    ("failing-test", "another pattern", f"{_SOLVED}\nsed -i 's/import re/import re, json, random/' slugs.py"),
    ("git-bisect", "in a repository", f"{_SOLVED}\ncp -r project/.git .git; printf ' ' >> answer.txt"),
]
"""Task, what is special, and a script that solves it; the task's own solution is in ``/solution``."""

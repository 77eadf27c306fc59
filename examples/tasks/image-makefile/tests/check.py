"""Runs make in the workspace after changes that are drawn anew each time."""

import random
from pathlib import Path

from in_workspace import WorkspaceError, run

draw = random.SystemRandom()
SCRIPT = """
rm -rf out; touch clean
make -s && cat out/report.txt || exit 1
touch -d '1 hour ago' $(find . -type f)
touch -d '30 minutes ago' out/report.txt
find parts -maxdepth 0 -exec touch -d '1 hour ago' {} +
make -q; echo "unchanged: $?"
cat new.txt > parts/1.txt; make -s && cat out/report.txt || exit 1
sleep 1.1
cat new.txt > parts/15.txt; make -s && cat out/report.txt || exit 1
make -s clean; test ! -e out; echo "clean: $?"
"""


def draw_text():
    return "".join(draw.choices("abcdefgh ", k=12)) + "\n"


first, second, new, title = draw_text(), draw_text(), draw_text(), draw_text()
files = {"title.txt": title, "parts/1.txt": first, "parts/2.txt": second, "new.txt": new}
reports = [title + (a + b).upper() for a, b in ((first, second), (new, second))]
reports.append(title + (new + new + second).upper())
expected = f"{reports[0]}unchanged: 0\n{reports[1]}{reports[2]}clean: 0\n"
try:
    result = run(["bash", "-c", SCRIPT], files=files, seconds=30)
    right = (result.exit_code, result.stdout) == (0, expected)
    if not right:
        print(result.stdout, result.stderr)
except WorkspaceError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")

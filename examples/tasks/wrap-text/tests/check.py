"""Runs the program on texts that are drawn anew each time."""

import random
from pathlib import Path

from in_workspace import WorkspaceError, run

draw = random.SystemRandom()
WORDS = ["a", "it", "tea", "seven", "letter", "incomprehensibilities", "x-ray", "über", "42,"]


def wrap(words, width):
    lines = [[]]
    for word in words:
        if lines[-1] and len(" ".join([*lines[-1], word])) > width:
            lines.append([])
        lines[-1].append(word)
    return "\n".join(map(" ".join, lines))


right = True
try:
    for width in (1, 5, 12, 20, 40, 79):
        paragraphs = [draw.choices(WORDS, k=draw.randint(1, 40)) for _ in range(draw.randint(0, 4))]
        blanks = draw.choice(["\n\n", "\n\n\n", "\n  \n"])
        text = blanks.join("".join(word + draw.choice([" ", "  ", "\n", "\t"]) for word in part) for part in paragraphs)
        expected = "".join(wrap(part, width) + "\n\n" for part in paragraphs)[:-1]
        result = run(["python3", "wrap.py", str(width)], stdin=text, seconds=10, env={"PYTHONIOENCODING": "utf-8"})
        right = right and (result.exit_code, result.stdout) == (0, expected)
except WorkspaceError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")

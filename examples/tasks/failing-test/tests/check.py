"""Compares the function with its definition, on titles that are drawn anew each time and on those of the tests."""

import random
from pathlib import Path

from in_workspace import WorkspaceError, evaluate

draw = random.SystemRandom()
WORDS = "a to tea time seven eleven Hydrogen, incomprehensibilities 42 2024! C++ x-ray"
titles = [
    (" ".join(draw.choices(WORDS.split(" "), k=count)), limit)
    for count in range(7)
    for limit in (1, 5, 12, 30)
    for _ in range(3)
]
titles += [("Hello,  World!", 30), ("one two three four", 12), ("incomprehensibilities", 10), ("?!", 9)]


def slug(title, limit):
    kept = "".join(c if c.isascii() and c.isalnum() else " " for c in title.lower()).split()
    if kept and len(kept[0]) > limit:
        return kept[0][:limit]
    while len("-".join(kept)) > limit:
        kept.pop()
    return "-".join(kept)


expected = [slug(*each) for each in titles]
code = "import slugs; result = [slugs.slug(title, limit=limit) for title, limit in given]"
try:
    right = evaluate(code, titles, seconds=10) == expected
except WorkspaceError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")

"""Looks for the old name in the package's syntax trees, and compares the functions on shapes that are drawn anew."""

import ast
import os
import random
import stat
from pathlib import Path

from in_workspace import WorkspaceError, evaluate

FILES = ("__init__", "area", "totals", "commands")
draw = random.SystemRandom()


def text_of(path):
    """The text of a small plain file; None of anything else."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > 200_000:
            return None
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return None


def names_in(text):
    names = set()
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "name", "attr", "asname"):
            names.add(getattr(node, field, None))
    return names


def draw_shape(depth=0):
    kind = draw.choice(["circle", "box", "group"] if depth < 2 else ["circle", "box"])
    if kind == "group":
        return {"kind": kind, "parts": [draw_shape(depth + 1) for _ in range(draw.randint(0, 3))]}
    if kind == "circle":
        return {"kind": kind, "radius": draw.randint(1, 9)}
    return {"kind": kind, "width": draw.randint(1, 9), "height": draw.randint(1, 9)}


def area(shape):
    if shape["kind"] == "group":
        return sum(area(part) for part in shape["parts"])
    return 355 / 113 * shape["radius"] ** 2 if shape["kind"] == "circle" else shape["width"] * shape["height"]


shapes = [draw_shape() for _ in range(20)]
expected = [[area(shape) for shape in shapes], sum(map(area, shapes)), area(shapes[0]), ["calc", "total"]]
code = """
from shapes import calculate_total, compute_area
from shapes.commands import COMMANDS, HELP, run
assert HELP == "calc: area of one shape; total: area of all"
areas = [compute_area(shape) for shape in given]
result = [areas, calculate_total(given), run("calc", given[0]), sorted(COMMANDS)]
"""
try:
    names = set().union(*(names_in(text_of(f"shapes/{name}.py") or "(") for name in FILES))
    right = "calc" not in names and "compute_area" in names and evaluate(code, shapes, seconds=10) == expected
except (WorkspaceError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")

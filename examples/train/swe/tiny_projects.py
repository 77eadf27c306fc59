"""Tiny projects with a bug in one line, for a tiny model. `make_projects.py` makes rows of them.

    # shop.py
    # a plus b
    def price(a, b): return a - b

    # x times y
    def stock(x, y): return x * y

The issue names the function and the file. What the function should do is written above it, and nowhere else: which edit
repairs it depends on what is read. No two projects have the same files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

FILES = ("bank.py", "farm.py", "game.py", "mill.py", "port.py", "shop.py")
FUNCTIONS = ("bonus", "cargo", "crop", "fare", "loan", "price", "prize", "score", "stock", "toll", "wage", "tax")
NAMES = (("a", "b"), ("c", "d"), ("m", "n"), ("p", "q"), ("u", "v"), ("x", "y"))
"""Of parameters; those of a file's functions differ, and so do their lines."""
OPERATIONS = {"plus": "+", "minus": "-", "times": "*", "over": "//"}
FUNCTIONS_PER_FILE = 2
INPUTS = ((7, 3), (12, 5), (2, 9), (8, 4))
"""Of the hidden tests: no two operations agree on all of them."""
ISSUE = "{function} in {file} is wrong. Repair it."


@dataclass(frozen=True)
class Function:
    """One function, with the operation that it should have and the one that it has."""

    name: str
    names: tuple[str, str]
    operation: str
    """One of `OPERATIONS`."""
    operator: str

    @property
    def text(self) -> str:
        """Return its lines."""
        first, second = self.names
        return (
            f"# {first} {self.operation} {second}\n"
            f"def {self.name}({first}, {second}): return {self.body(self.operator)}\n"
        )

    def body(self, operator: str) -> str:
        """Return the expression with an operator."""
        return f"{self.names[0]} {operator} {self.names[1]}"


@dataclass(frozen=True)
class Project:
    """One file with a wrong function, and another that is right."""

    file: str
    functions: tuple[Function, ...]
    wrong: int
    """Which of the functions."""

    @property
    def bug(self) -> Function:
        """Return the wrong function."""
        return self.functions[self.wrong]

    @property
    def issue(self) -> str:
        """Return what the model reads."""
        return ISSUE.format(function=self.bug.name, file=self.file)

    @property
    def text(self) -> str:
        """Return the content of the file."""
        return "\n".join(function.text for function in self.functions)

    @property
    def hidden_test(self) -> str:
        """Return a program that calls each function, and reports as pytest does."""
        wanted = {
            each.name: [
                eval(each.body(OPERATIONS[each.operation]), dict(zip(each.names, pair, strict=True)))  # noqa: S307
                for pair in INPUTS
            ]
            for each in self.functions
        }
        module = self.file.removesuffix(".py")
        return (
            f"import {module}\n\nINPUTS, RESULTS = {INPUTS!r}, {wanted!r}\nfor name, results in RESULTS.items():\n"
            f"    right = [getattr({module}, name)(*pair) for pair in INPUTS] == results\n"
            "    print('PASSED' if right else 'FAILED', name)\n"
        )

    @classmethod
    def draw(cls, rng: random.Random) -> Project:
        """Draw a project."""
        names, pairs = rng.sample(FUNCTIONS, FUNCTIONS_PER_FILE), rng.sample(NAMES, FUNCTIONS_PER_FILE)
        wrong, functions = rng.randrange(FUNCTIONS_PER_FILE), []
        for number, (name, pair) in enumerate(zip(names, pairs, strict=True)):
            operation = rng.choice([*OPERATIONS])
            right = OPERATIONS[operation]
            others = [operator for operator in OPERATIONS.values() if operator != right]
            functions.append(Function(name, pair, operation, rng.choice(others) if number == wrong else right))
        return cls(rng.choice(FILES), tuple(functions), wrong)


def projects(count: int, seed: int) -> Iterator[Project]:
    """Draw so many projects, all different."""
    rng, seen = random.Random(seed), set()
    while len(seen) < count:
        project = Project.draw(rng)
        if project not in seen:
            seen.add(project)
            yield project

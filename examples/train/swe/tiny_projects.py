"""Tiny projects with a bug in one line, for a tiny model. `make_projects.py` makes rows of them.

    # shop.py
    # a plus b
    def price(a, b): return a - b

    # mill.py
    # x times y
    def stock(x, y): return x * y

The issue names the function and the file. What the function should do is written above it, and nowhere else: which edit
repairs it depends on what is read. No two projects have the same wrong file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

FILES = ("bank.py", "farm.py", "game.py", "mill.py", "port.py", "shop.py")
FUNCTIONS = ("bonus", "cargo", "crop", "fare", "loan", "price", "prize", "score", "stock", "toll", "wage", "tax")
NAMES = (("a", "b"), ("c", "d"), ("m", "n"), ("p", "q"), ("u", "v"), ("x", "y"))
"""Of parameters."""
OPERATIONS = {"plus": "+", "minus": "-", "times": "*", "over": "//"}
FILES_PER_PROJECT = 2
INPUTS = ((7, 3), (12, 5), (2, 9), (8, 4))
"""Of the hidden tests: no two operations agree on all of them."""
ISSUE = "{function} in {file} is wrong. Repair it."


@dataclass(frozen=True)
class Function:
    """One function in a file of its own, with the operation that it should have and the one that it has."""

    file: str
    name: str
    names: tuple[str, str]
    operation: str
    """One of `OPERATIONS`."""
    operator: str

    @property
    def module(self) -> str:
        """Return the name by which the file is imported."""
        return self.file.removesuffix(".py")

    @property
    def text(self) -> str:
        """Return the content of the file."""
        first, second = self.names
        return (
            f"# {first} {self.operation} {second}\n"
            f"def {self.name}({first}, {second}): return {self.body(self.operator)}\n"
        )

    def body(self, operator: str) -> str:
        """Return the expression with an operator."""
        return f"{self.names[0]} {operator} {self.names[1]}"

    @classmethod
    def draw(cls, rng: random.Random, file: str, name: str, is_wrong: bool) -> Function:
        """Draw parameters and operation, and a wrong operator if it is wanted."""
        operation = rng.choice([*OPERATIONS])
        right = OPERATIONS[operation]
        others = [operator for operator in OPERATIONS.values() if operator != right]
        return cls(file, name, rng.choice(NAMES), operation, rng.choice(others) if is_wrong else right)


@dataclass(frozen=True)
class Project:
    """A file with a wrong function, and others that are right."""

    bug: Function
    others: tuple[Function, ...]

    @property
    def functions(self) -> tuple[Function, ...]:
        """Return all functions, by the names of their files."""
        return tuple(sorted((self.bug, *self.others), key=lambda function: function.file))

    @property
    def issue(self) -> str:
        """Return what the model reads."""
        return ISSUE.format(function=self.bug.name, file=self.bug.file)

    @property
    def files(self) -> dict[str, str]:
        """Return the texts of the files by name."""
        return {function.file: function.text for function in self.functions}

    @property
    def hidden_test(self) -> str:
        """Return a program that calls each function, and reports as pytest does."""
        wanted = {
            (each.module, each.name): [
                eval(each.body(OPERATIONS[each.operation]), dict(zip(each.names, pair, strict=True)))  # noqa: S307
                for pair in INPUTS
            ]
            for each in self.functions
        }
        return (
            "from importlib import import_module\n\n"
            f"INPUTS, RESULTS = {INPUTS!r}, {wanted!r}\nfor (module, name), results in RESULTS.items():\n"
            "    function = getattr(import_module(module), name)\n"
            "    print('PASSED' if [function(*pair) for pair in INPUTS] == results else 'FAILED', name)\n"
        )

    @classmethod
    def draw(cls, rng: random.Random) -> Project:
        """Draw a project."""
        files, names = rng.sample(FILES, FILES_PER_PROJECT), rng.sample(FUNCTIONS, FILES_PER_PROJECT)
        bug, *others = (
            Function.draw(rng, file, name, is_wrong=number == 0)
            for number, (file, name) in enumerate(zip(files, names, strict=True))
        )
        return cls(bug, tuple(others))


def projects(count: int, seed: int) -> Iterator[Project]:
    """Draw so many projects whose wrong files all differ."""
    rng, seen = random.Random(seed), set()
    while len(seen) < count:
        project = Project.draw(rng)
        if project.bug not in seen:
            seen.add(project.bug)
            yield project

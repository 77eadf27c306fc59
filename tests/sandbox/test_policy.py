"""What the policy refuses to user code, what it leaves to libraries, and what its errors say."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from verl_tool.errors import ConfigError
from verl_tool.sandbox import Policy, SandboxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLICY = Policy(
    allowed_modules=("collections", "csv", "dataclasses", "importlib", "json", "math", "numpy", "sys"),
    restricted_functions=("eval", "exec", "open", "input", "os.system", "subprocess.Popen"),
    pre_import=("import numpy as np", "math"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(workers=1, policy=POLICY, warm_modules=("numpy", "pathlib", "subprocess")) as pool:
        yield pool


@pytest.mark.parametrize(
    "code",
    [
        "print(np.arange(3).sum(), math.gcd(6, 3))",
        "import numpy.linalg, json\nprint(numpy.linalg.inv(np.eye(1))[0, 0], json.loads('3'))",
        "from collections import namedtuple\nprint(*namedtuple('P', 'x y')(3, 3))",
        "import csv\nprint(csv.__name__, 3)",  # not loaded before
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nprint(A(3).x, A(3).x)",
    ],
)
async def test_what_is_allowed_works(pool: SandboxPool, code: str) -> None:
    result = await pool.run(code)
    assert "3" in result.stdout, result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "from os import path",
        "import os.path as p",
        "__import__('os')",
        "import importlib; importlib.import_module('os')",
        "import importlib; importlib.__import__('os')",
        "import sys; del sys.modules['os']; import os",
        "import sympy",
        "import ctypes",
        "import _posixsubprocess",
        "import numpy.testing\nfrom subprocess import run",
        "def f():\n    import os\nimport sys\nsys.excepthook = sys.__excepthook__\nf()",
    ],
)
async def test_an_import_that_is_not_allowed_says_so(pool: SandboxPool, code: str) -> None:
    result = await pool.run(code)
    assert result.exit_code == 1
    assert "ImportError: module '" in result.stderr
    assert (
        "is not allowed here; allowed: collections, csv, dataclasses, importlib, json, math, numpy, sys"
        in result.stderr
    )
    assert "policy_hooks.py" not in result.stderr


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("eval('1')", "eval"),
        ("e = eval\nprint(e('1'))", "eval"),
        ("exec('print(1)')", "exec"),
        ("open('f')", "open"),
        ("import sys; sys.modules['io'].open('f')", "open"),
        ("import sys; sys.modules['pathlib'].Path('f').write_text('x')  # import pathlib", "open"),
        ("np.savetxt('f', np.eye(2))", "open"),
        ("input()", "input"),
        ("import sys; sys.modules['os'].system('id')", "os.system"),
        ("import sys; sys.modules['posix'].system('id')", "os.system"),
        ("import sys; sys.modules['subprocess'].run(['id'])", "subprocess.Popen"),
    ],
)
async def test_a_restricted_function_says_so_by_whatever_name(pool: SandboxPool, code: str, name: str) -> None:
    result = await pool.run(code, stdin="x\n")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"PermissionError: {name} is not allowed here"


@pytest.mark.parametrize(
    "code",
    [
        "compile('import os', np.__file__, 'exec')",
        "def f(): pass\nf.__code__.replace(co_filename=np.__file__)",
    ],
)
async def test_code_cannot_claim_to_be_a_librarys(pool: SandboxPool, code: str) -> None:
    result = await pool.run(code)
    assert "PermissionError: code may not claim to come from" in result.stderr


async def test_a_refusal_can_be_caught_and_lived_with(pool: SandboxPool) -> None:
    result = await pool.run("try:\n    import os\nexcept ImportError as error:\n    print(error.name)")
    assert result.stdout == "os\n"


async def test_without_a_policy_nothing_is_refused() -> None:
    async with SandboxPool(workers=1, warm_modules=()) as pool:
        result = await pool.run("import os\nprint(eval('1 + 1'), open(__file__).read(6), os.system('true'))")
        assert result.stdout == "2 import 0\n"


async def test_a_pre_import_that_fails_is_shown() -> None:
    async with SandboxPool(workers=1, warm_modules=(), policy=Policy(pre_import=("import nothing_there",))) as pool:
        result = await pool.run("print(1)")
        assert result.exit_code == 1
        assert "ModuleNotFoundError: No module named 'nothing_there'" in result.stderr


@pytest.mark.parametrize("entry", ["print(1)", "import x; print(1)", "1", "from . import x", "import"])
async def test_a_pre_import_must_be_an_import(entry: str) -> None:
    with pytest.raises(ConfigError, match="import"):
        Policy(pre_import=(entry,))


async def test_names_must_be_names() -> None:
    with pytest.raises(ConfigError, match="'os; rm' is not a"):
        Policy(allowed_modules=("os; rm",))
    assert Policy(pre_import=("from numpy import linalg", "math")).pre_imported_modules == ("numpy", "math")

"""A test as the judge runs it: what it needs, and the text with the judge's own calls between its statements.

Which names are the judge's is decided by the text of the test alone, never by the solution. Sent into the sandbox
beside the judge.
"""

import ast
import builtins
import re
import sys
from importlib import import_module
from typing import Any

from remote import Handle

_USUAL_MODULES = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math numpy operator random re "
    "statistics string sys time typing"
)
_MODULES = {**{name: name for name in _USUAL_MODULES.split()}, "np": "numpy"}
"""Names of modules that a test may use as ``name.attribute`` without an import, and the module."""
_HELPERS = {
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "datetime": "datetime timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "partial reduce",
    "itertools": "combinations permutations",
    "math": "ceil fabs floor inf isclose isfinite isinf isnan nan pi sqrt",
    "typing": "Any Callable Dict Iterable List Optional Set Tuple Union",
}
"""Names that a test may use without an import, by their module. A test that uses names of the solution beside one of
them gets Python's own, whatever the solution calls so: ``isclose(f(2), 3.14)``."""
_HOME_OF = {name: home for home, names in _HELPERS.items() for name in names.split()}
_BUILTINS = frozenset(dir(builtins))
_SPEAKS_OF_INFINITY = re.compile(
    r"(?i)(?<!\w)(nan|inf|infinity|isnan|isinf|isfinite|nan_to_num|equal_nan|\d+e\d{3,})(?!\w)"
)
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_RUN_DATA = (
    "_ctypes _pickle bdb cloudpickle code codeop ctypes dill doctest ensurepip idlelib imp importlib joblib "
    "marshal multiprocessing pdb pickle pickletools pkgutil profile pty runpy shelve site subprocess test trace "
    "turtledemo venv yaml zipapp zipimport"
)
_RUNS_DATA = frozenset(_RUN_DATA.split())
"""Modules that make code of data, or start programs. No test may import them: the data may be the solution's."""


class TestCase:
    """One test. Raises SyntaxError."""

    def __init__(self, text):
        tree = ast.parse(text, "test.py")
        nodes = list(ast.walk(tree))
        loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        self._free = loaded - _bound(nodes)
        self._modules = {
            node.value.id
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _MODULES
        } & self._free
        self._texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        self._imports = _imported(nodes) | self._texts
        self._mentioned = frozenset(_IDENTIFIER.findall(text))
        self._own = self._free - _BUILTINS - self._modules - _HOME_OF.keys()
        self.finite = _SPEAKS_OF_INFINITY.search(text) is None
        """It says nothing of NaN and infinity, and so means neither."""
        self.must_hold = any(isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant) for node in nodes)
        """It has assertions, one of which at least must be reached and hold."""
        self.code = compile(ast.fix_missing_locations(_Instrumented().visit(tree)), "test.py", "exec")

    def namespace(self, link):
        """The names that the test starts with: the solution's, then those that are not the solution's to give.

        Builtins are the solution's only in a test that uses no other name of it, as one of a function ``pow`` does.
        """
        wanted = (link.names() & self._mentioned) - self._modules
        protected = _BUILTINS | _HOME_OF.keys()
        names = {name: link.value(name) for name in wanted if name not in protected or not self._own}
        for name in self._free & _HOME_OF.keys() - names.keys():
            names[name] = getattr(import_module(_HOME_OF[name]), name)
        for name in self._modules & self._installed():
            names[name] = import_module(_MODULES[name])
        return {"__builtins__": self._builtins(link), **names, "__name__": "test"}

    def _installed(self):
        return {name for name in self._modules if _MODULES[name] != "numpy" or _has_numpy()}

    def _builtins(self, link):
        """Python's, but that what makes code of data takes only texts that stand in the test."""
        own = self._texts

        def literal(name, source):
            if not isinstance(source, str) or source not in own:
                raise link.refuse(f"{name} of a text")

        def guarded_import(name, *args, **kwargs):
            home = name.partition(".")[0]
            if home in _RUNS_DATA or (name not in self._imports and not kwargs.get("level", 0)):
                raise link.refuse(f"import of {name!r:.80}; of modules that make code of data none is allowed, and")
            return builtins.__import__(name, *args, **kwargs)

        def guarded_eval(source, *names):
            if isinstance(source, str) and source not in own and not names:
                return link.ask("eval", source)
            literal("eval", source)
            frame = sys._getframe(1)
            return eval(source, *(names or (frame.f_globals, frame.f_locals)))  # noqa: S307  the test's own text

        def guarded_exec(source, *names):
            literal("exec", source)
            frame = sys._getframe(1)
            exec(source, *(names or (frame.f_globals, frame.f_locals)))

        def guarded_compile(source, *args, **kwargs):
            literal("compile", source)
            return compile(source, *args, **kwargs)

        guards: dict[str, Any] = {
            "eval": guarded_eval,
            "exec": guarded_exec,
            "compile": guarded_compile,
            "__import__": guarded_import,
        }
        return {**vars(builtins), **guards}


def present(value):
    """The condition of an ``if`` or ``while``: an object of the solution's is there, whatever its ``__bool__`` says."""
    return True if isinstance(value, Handle) else value


BEFORE, HELD, PRESENT = "__judge_before__", "__judge_held__", "__judge_present__"
"""Names of the judge's own calls in a test: before each statement, behind each assertion, around conditions."""


class _Instrumented(ast.NodeTransformer):
    """Puts the judge's calls into a test."""

    def generic_visit(self, node):
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [call for statement in statements for call in _with_calls(statement)])
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            node.test = _condition(node.test)
        elif isinstance(node, ast.comprehension):
            node.ifs = [_condition(test) for test in node.ifs]
        return node


def _with_calls(statement):
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
        return [statement]
    behind = [_call(HELD, statement)] if isinstance(statement, ast.Assert) else []
    return [_call(BEFORE, statement), statement, *behind]


def _call(name, at, *args):
    call = ast.Call(ast.Name(name, ast.Load()), list(args), [])
    return ast.copy_location(ast.Expr(call) if isinstance(at, ast.stmt) else call, at)


def _condition(test):
    if isinstance(test, ast.BoolOp):
        test.values = [_condition(value) for value in test.values]
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test.operand = _condition(test.operand)
    elif isinstance(test, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return _call(PRESENT, test, test)
    return test


def _bound(nodes):
    """Names that the test itself gives a meaning, anywhere."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
            found.add(node.name or "")
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return found


def _imported(nodes):
    """Full names of modules that the test's import statements name."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def _has_numpy():
    try:
        import numpy  # noqa: F401
    except ImportError:
        return False
    return True

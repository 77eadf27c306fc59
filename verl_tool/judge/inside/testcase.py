"""A test as the judge runs it: what it needs, and its text with calls of the judge between its statements.

The text of the test alone decides which names belong to the judge, never the solution. Sent into the sandbox with the
judge.
"""

import ast
import builtins
import math
import re
import reprlib
import sys
import types
from contextlib import suppress
from importlib import import_module

from link import PeerExitedError
from output_equality import is_near_whole
from remote import PLAIN_METHODS, Handle
from values import ValueRejected

_USUAL_MODULES = (
    "base64 binascii bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools "
    "hashlib heapq hmac inspect io ipaddress itertools json math numpy operator os pandas pathlib pytest random re "
    "scipy statistics string struct sympy sys textwrap time torch typing unicodedata unittest uuid zlib"
)
_MODULES = {**{name: name for name in _USUAL_MODULES.split()}, "np": "numpy", "pd": "pandas"}
"""Modules that a test may use as ``name.attribute`` without an import, by name."""
_HELPERS = {
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "datetime": "datetime timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "cmp_to_key lru_cache partial reduce",
    "itertools": "combinations islice permutations product zip_longest",
    "math": (
        "acos asin atan atan2 ceil comb copysign cos degrees exp fabs factorial floor fmod fsum gcd hypot inf isclose "
        "isfinite isinf isnan isqrt lcm log log10 log1p log2 nan perm pi prod radians sin sqrt tan trunc"
    ),
    "numpy": "allclose arange array array_equal eye linspace ones zeros",
    "numpy.testing": "assert_allclose assert_almost_equal assert_array_almost_equal assert_array_equal",
    "operator": "attrgetter itemgetter",
    "pytest": "approx",
    "statistics": "fmean mean median pstdev stdev",
    "string": "ascii_lowercase ascii_uppercase",
    "typing": "Any Callable Dict Iterable List Optional Set Tuple Union",
}
"""Names that a test may use without an import, by module. If a test uses other names of the solution too, they are
Python's own, whatever the solution defines: ``isclose(f(2), 3.14)``."""
_HOME_OF = {name: home for home, names in _HELPERS.items() for name in names.split()}
_DECIDE = frozenset(name for name in _HOME_OF if name.startswith(("is", "all", "array", "assert", "approx")))
"""Helpers that decide whether something is right."""
_BUILTINS = frozenset(dir(builtins))
_MAKE = (
    "bool bytearray bytes complex dict enumerate filter float frozenset id int isinstance issubclass iter len list map "
    "next print range repr set str tuple type zip"
)
_MAKERS = frozenset(_MAKE.split())
"""Builtins that support a test of another function. They are the solution's only if a test has no other names."""
_PARSERS = frozenset(("complex", "float", "Decimal", "json", "loads", "literal_eval"))
_PROTECTED = _BUILTINS | _HOME_OF.keys()
_EXCEPTIONS = frozenset(
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
)
_SPEAKS_OF_INFINITY = re.compile(
    r"(?i)(?<!\w)(nan|inf|infinity|isnan|isinf|isfinite|nan_to_num|equal_nan|\d+e\d{3,})(?!\w)"
)
_SPEAKS_OF_WIDTHS = re.compile(
    r"(?<!\w)(np\.|numpy\.|['\"])(int(8|16|32)|uint\w*|u?byte|u?short|u?intc|float16|half)(?!\w)|itemsize|nbytes"
)
_SPEAKS_OF_INT64 = re.compile(r"(?<!\w)(np\.|numpy\.|['\"])(int64|int_|integer|signedinteger|number|generic)(?!\w)")
_MEMBERS = re.compile(r"\.(all|any|astype|conj|dtype|item|max|min|ndim|prod|reshape|round|shape|size|sum|tolist)\b")
"""Members of numpy's scalars that Python's numbers lack."""
_SQUARE_BITS = 24
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_ARRAY_NAMES = "cupy dask jax jnp np numpy pandas pd pl polars scipy sklearn tensorflow tf torch xarray xr"
_ARRAYS = frozenset((*_ARRAY_NAMES.split(), *_HELPERS["numpy"].split(), *_HELPERS["numpy.testing"].split()))
"""A test that mentions one of them compares arrays."""
_RUN_DATA = (
    "_ctypes _pickle bdb cloudpickle code codeop ctypes dill doctest ensurepip idlelib imp importlib joblib "
    "marshal multiprocessing pdb pickle pickletools pkgutil profile pty runpy shelve site subprocess test trace "
    "turtledemo venv yaml zipapp zipimport"
)
_RUNS_DATA = frozenset(_RUN_DATA.split())
"""Modules that turn data into code or start programs. No test may import them, since the data may be the solution's."""


class TestCase:
    """One test. Raises SyntaxError.

    With `notes`, the values that an assertion compares are stored, for `format_values` if it fails.
    """

    def __init__(self, text, notes=False):
        self._text = text
        self._parts = []
        self._values = {}
        self.has_held = False
        """Whether an assertion was reached and held."""
        tree = ast.parse(text, "test.py")
        nodes = list(ast.walk(tree))
        loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        self._free = loaded - _find_bound(nodes) - {EQUAL}
        self._modules = {
            node.value.id
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _MODULES
        } & self._free
        self.texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        """String literals of the test."""
        self._imports = _find_imported(nodes) | self.texts
        self._mentioned = frozenset(_IDENTIFIER.findall(text))
        self._used = self._free - _PROTECTED - self._modules
        self._passed = _find_passed(nodes, bool(self._used)) & self._free & _PROTECTED
        """Builtins and helpers that the test passes to its own function to test them: ``check(median)``."""
        self._used |= self._passed
        self._tested = frozenset() if self._used else (_find_tested(nodes) or _HOME_OF.keys() - _DECIDE) & self._free
        derived = self._used | _find_derived(nodes, self._used)
        self._aliases: dict[str, str] = {}
        if self._used:
            for scope in _split_scopes(tree):
                self._aliases.update(_rename_tested(scope, self._used, self._free))
        self.makers = _find_makers(nodes)
        """Names that the test calls to construct objects of the solution, as far as its text tells."""
        self.evaluates = "eval" in self._mentioned
        """Whether it may evaluate text, which may contain text of the solution."""
        self.finite = _SPEAKS_OF_INFINITY.search(text) is None
        """Whether it mentions neither NaN nor infinity, and so expects neither."""
        self.widths = _SPEAKS_OF_WIDTHS.search(text) is not None
        """Whether it mentions narrow numbers, or may."""
        self.int64 = _SPEAKS_OF_INT64.search(text) is not None
        """Whether it mentions numpy's integers."""
        self.members = self.int64 or _MEMBERS.search(text) is not None
        """Whether it may use members of numpy's scalars."""
        self.large = any(_count_bits(node) > _SQUARE_BITS for node in nodes)
        """Whether it has integers for which a sum of a thousand squares does not fit an int64."""
        self.arrays = bool(self._mentioned & _ARRAYS)
        self.rejects_empty = self.arrays and not _expects_empty(nodes, self._used)
        """Whether it uses arrays, which equal anything if they are empty, and itself expects nothing empty."""
        self.parses = self.arrays or bool(self._mentioned & _PARSERS)
        """Whether it may parse text as numbers."""
        has_effects = any(_is_call_for_effect(node, self._used) for node in nodes)
        self.accepts_none = not self.arrays or "None" in self._mentioned or has_effects
        """Whether None may be returned: it uses no arrays (where None is NaN), mentions None, or discards results."""
        self.has_assertions = any(map(_can_fail, nodes))
        """Whether it has assertions, of which at least one must be reached and hold."""
        for node in nodes:
            _instrument(node)
            if notes and isinstance(node, ast.Assert):
                node.test = self._wrap_assertion(node.test)
        if self.evaluates:
            tree = ast.fix_missing_locations(_RecordTexts(derived).visit(tree))
        self.code = compile(tree, "test.py", "exec")

    def record_held(self):
        """Record that an assertion was reached and held."""
        self.has_held = True
        self._values.clear()

    def note(self, number, value):
        """Store the value of a part of an assertion, and return it."""
        self._values[number] = value
        return value

    def format_values(self, max_chars):
        """Return the parts of the failed assertion and their values, in at most `max_chars` characters each."""
        parts = [(ast.get_source_segment(self._text, self._parts[n]), v) for n, v in self._values.items()]
        return [[(source or "")[:max_chars], _format_value(value)[:max_chars]] for source, value in parts]

    def _wrap_assertion(self, node):
        """Return the node with those parts noted whose values tell why it does not hold."""
        if isinstance(node, ast.BoolOp):
            node.values = [self._wrap_assertion(value) for value in node.values]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self._wrap_assertion(node.operand)
        elif isinstance(node, ast.Compare):
            node.left, *node.comparators = [self._wrap_part(side) for side in (node.left, *node.comparators)]
        elif isinstance(node, ast.Call) and _get_root_name(node.func) == EQUAL:
            node.args[0] = self._wrap_part(node.args[0])
        else:
            return self._wrap_part(node)
        return node

    def _wrap_part(self, node):
        if not any(isinstance(part, ast.Name) for part in ast.walk(node)):
            return node  # a literal can be read in the test
        self._parts.append(node)
        number = ast.Constant(len(self._parts) - 1, **_get_location(node))
        return _make_call(NOTE, node, number, node)

    def make_namespace(self, link):
        """Return the initial names of the test: those of the solution, then those that the solution cannot replace.

        Builtins and helpers are the solution's only if a test uses no other name of it, such as a test of a function
        ``pow``, and if their arguments contain no other call: ``sqrt`` in ``isclose(sqrt(4), 2)``. Raises
        `ValueRejected` if the solution has none of them, since the test would test Python itself.
        """
        used = (link.list_names() & self._mentioned) - self._modules
        tested = self._tested & used
        if self._tested and not tested:
            raise link.reject_test(f"the solution does not define {' or '.join(sorted(self._tested))}")
        if self._passed - used:
            raise link.reject_test(f"the solution does not define {' or '.join(sorted(self._passed - used))}")
        names = {name: link.read_name(name) for name in used if name not in _PROTECTED or name in tested | self._passed}
        for name in self._free & _HOME_OF.keys() - names.keys():
            with suppress(ImportError):
                names[name] = getattr(import_module(_HOME_OF[name]), name)
        test_builtins = self._builtins(link)
        for name, alias in self._aliases.items():
            if name in used or name in test_builtins:
                names[alias] = link.read_name(name) if name in used else test_builtins[name]
        for name in self._modules:
            with suppress(ImportError):
                names[name] = import_module(_MODULES[name])
        return {"__builtins__": test_builtins, **names, "__name__": "test"}

    def _builtins(self, link):
        """Return Python's builtins. Those that turn data into code accept only text that is part of the test."""
        own, mentioned = self.texts, self._mentioned

        def check_literal(name, source):
            if not isinstance(source, str) or source not in own:
                raise link.reject_test(f"{name} of text that is not part of the test")

        def guarded_import(name, *args, **kwargs):
            # Python's own code calls it too, such as `strftime` or the sum of an array.
            chosen = "__import__" in mentioned and name not in self._imports
            if chosen or name.partition(".")[0] in _RUNS_DATA:
                raise link.reject_test(f"import of {name!r:.80}: not part of the test, or it turns data into code")
            return builtins.__import__(name, *args, **kwargs)

        def guarded_eval(source, *names):
            if isinstance(source, str) and source not in own and not names:
                return evaluate(link, source, own)
            check_literal("eval", source)
            frame = sys._getframe(1)
            return eval(source, *(names or (frame.f_globals, frame.f_locals)))  # noqa: S307  part of the test

        def guarded_exec(source, *names):
            check_literal("exec", source)
            frame = sys._getframe(1)
            exec(source, *(names or (frame.f_globals, frame.f_locals)))

        def guarded_compile(source, *args, **kwargs):
            check_literal("compile", source)
            return compile(source, *args, **kwargs)

        def guarded_getattr(owner, name, *default):
            if isinstance(owner, types.ModuleType) and name not in own and name not in mentioned:
                raise link.reject_test(f"getattr of {name!r:.80} in a module: not part of the test")
            return getattr(owner, name, *default)

        guards = {"eval": guarded_eval, "exec": guarded_exec, "compile": guarded_compile, "getattr": guarded_getattr}
        return {**vars(builtins), **guards, "__import__": guarded_import}


def evaluate(link, text, own):
    """Evaluate text that is not part of the test, although it may contain some of the texts `own` of the test."""
    import evaluation  # cached by the judge if a test may need it

    node = evaluation.parse_expression(text)
    pieces = {piece.strip() for part in own for piece in _FIELD.split(part)} - {""}
    if any(piece in text for piece in pieces) and not evaluation.has_only_whole_parts(text, node, link.texts - own):
        raise link.reject_test("eval: a returned text may only be a complete expression or the content of a string")
    if node is None or not _collect_names(node) & link.list_names():
        return link.evaluate_isolated(text)
    return evaluation.SolutionEvaluation(link.read_name, link.reject_test).evaluate(node)


def is_present(value):
    """Return the condition of an ``if`` or ``while``. An object of the solution is true, whatever its ``__bool__``."""
    return True if isinstance(value, Handle) else value


def is_equal(value, *expected):
    """Whether a returned value is one of the expected ones, as JSON: lists and tuples are equal, keys of dictionaries
    are compared as strings, and a float may differ from an expected float by a billionth. An expected integer is exact:
    2.0 is 2, and True is 1, as in Python."""
    return any(_is_equal(value, each) for each in expected)


def _is_equal(value, expected):
    if isinstance(value, (list, tuple)) and type(expected) is list:
        return len(value) == len(expected) and all(map(_is_equal, value, expected))
    if isinstance(value, dict) and type(expected) is dict:
        texts = {str(key): item for key, item in value.items()}
        alike = len(texts) == len(value) and texts.keys() == {str(key) for key in expected}
        return alike and all(_is_equal(texts[str(key)], item) for key, item in expected.items())
    if isinstance(value, float) and type(expected) is float:
        if expected.is_integer():  # 123456789012.0 is not a rounding of the next integer
            return value == expected or (not value.is_integer() and is_near_whole(value, expected))
        return math.isclose(value, expected) or (expected != expected and value != value)
    return value == expected


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 8
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = _SHORT.maxdeque = 60
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 300


def _format_value(value):
    """Format a value, large ones not in full."""
    try:
        return _SHORT.repr(value)
    except (Exception, ValueRejected, PeerExitedError):  # noqa: BLE001  a `__repr__` of the test or of a library
        return f"<a {type(value).__name__}>"


_FIELD = re.compile(r"%[-+ #0-9.]*[a-z]|\{[^{}]*\}")
"""A field in a format string."""
TEXT = "__judge_text__"
"""Name of the judge's call around text that may be the solution's, in a test that evaluates text."""
BEFORE, HELD, PRESENT = "__judge_before__", "__judge_held__", "__judge_present__"
"""Names of the judge's calls in a test: before each statement, after each assertion, around conditions."""
EQUAL, NOTE = "__judge_equal__", "__judge_note__"
"""Names of the judge's calls in a test of a call and an expected value, and around what an assertion compares."""


def _instrument(node):
    """Insert the judge's calls into a node of a test."""
    for field in _BLOCKS:
        statements = getattr(node, field, None)
        if type(statements) is list:
            setattr(node, field, [call for statement in statements for call in _add_calls(statement)])
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        node.test = _wrap_condition(node.test)
    if isinstance(node, ast.While):  # evaluated again after the body
        node.test = _precede(node.test)
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        node.body.append(ast.Expr(_make_call(BEFORE, node.body[-1]), **_get_location(node.body[-1])))
    elif isinstance(node, ast.BoolOp):
        node.values[1:] = map(_precede, node.values[1:])
    elif isinstance(node, ast.comprehension):
        node.ifs = [_wrap_condition(test) for test in node.ifs]


_BLOCKS = ("body", "orelse", "finalbody")


def _add_calls(statement):
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
        return [statement]
    before = ast.Expr(_make_call(BEFORE, statement), **_get_location(statement))
    if not _can_fail(statement):
        return [before, statement]
    return [before, statement, ast.Expr(_make_call(HELD, statement), **_get_location(statement))]


def _can_fail(node):
    """Whether it is an assertion that could fail: ``assert 1 == 1`` could not."""
    return isinstance(node, ast.Assert) and any(isinstance(part, ast.Name) for part in ast.walk(node.test))


def _precede(value):
    """Apply changes before a later operand: ``f(values) is None and values == [1, 2]`` sees the changes by `f`."""
    place = _get_location(value)
    both = ast.Tuple([_make_call(BEFORE, value), value], ast.Load(), **place)
    return ast.Subscript(both, ast.Constant(1, **place), ast.Load(), **place)


def _is_call_for_effect(node, own):
    """Whether it calls one of the functions `own` and discards the result."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _get_root_name(node.value.func) in own


def _make_call(name, at, *args):
    place = _get_location(at)
    return ast.Call(ast.Name(name, ast.Load(), **place), list(args), [], **place)


def _get_location(at):
    return {name: getattr(at, name) for name in at._attributes}


def _wrap_condition(test):
    if isinstance(test, ast.BoolOp):
        test.values = [_wrap_condition(value) for value in test.values]
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test.operand = _wrap_condition(test.operand)
    elif isinstance(test, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return _make_call(PRESENT, test, test)
    return test


def _find_innermost(nodes):
    """Return names that are called with arguments without calls, except for builtins that construct a value."""
    return {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in _EXCEPTIONS
        if not any(
            isinstance(inner, ast.Call) and getattr(inner.func, "id", None) not in _MAKERS
            for part in (*node.args, *node.keywords)
            for inner in ast.walk(part)
        )
    }


def _find_passed(nodes, has_others):
    """Return names that a test passes to a function of its own to test them, as HumanEval's tests do. If the test has
    other names of the solution, only to a function named as in HumanEval."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    if has_others:
        named = [(node, {each.arg for each in node.args.args}) for node in functions]
        functions = [node for node, arguments in named if node.name == "check" or "candidate" in arguments]
    own = {node.name for node in functions}
    return {
        part.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own
        for part in node.args
        if isinstance(part, ast.Name)
    }


def _find_tested(nodes):
    """Return what a test without other names tests: ``max([1, 2]) == len([1, 2])`` tests `max`."""
    left: set[str] = set()
    right: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Compare):
            one = _find_innermost(ast.walk(node.left)) & _PROTECTED - _MAKERS
            left |= one
            if one:
                right.update(*(_find_innermost(ast.walk(other)) for other in node.comparators))
    found = (_find_innermost(nodes) & _PROTECTED) - (right - left)
    return found - _MAKERS or found


_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.withitem)


def _collect_names(node):
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _find_derived(nodes, own, passed=True):
    """Return names that may refer to something of the solution: those in an assignment with one of `own` or with
    another such name, and all arguments of functions. With `passed`, also what the solution may have changed."""
    found = {node.arg for node in nodes if isinstance(node, ast.arg)} - {"self", "cls"}
    statements = (*_ASSIGNMENTS, ast.Expr, ast.Assert) if passed else _ASSIGNMENTS
    groups = [_collect_names(node) for node in nodes if isinstance(node, statements)]
    loops = [node for node in nodes if isinstance(node, (ast.For, ast.comprehension))]
    groups += [_collect_names(node.target) | _collect_names(node.iter) for node in loops]
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    groups += [{node.name} | _collect_names(node) for node in nodes if isinstance(node, defined)]
    size = -1
    while size < len(found):
        size = len(found)
        for group in groups:
            if group & (own | found):
                found |= group - _PROTECTED
    return found - own


_GUARDED = frozenset(("__import__", "compile", "eval", "exec", "getattr"))
"""Builtins that are never the solution's in a test that uses other names of it."""


def _split_scopes(tree):
    """Yield the nodes of each function of the test, then those outside. Each scope has its own variables."""
    outside, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield list(ast.walk(node))
        else:
            outside.append(node)
            waiting += ast.iter_child_nodes(node)
    yield outside


def _rename_tested(nodes, own, free):
    """Rename builtins and helpers that a single statement tests, in a test that uses other names too: ``product([2,
    3])`` calls the solution's if the statement uses nothing else of it. Returns the new name of each."""
    values, derived = (own | _find_derived(nodes, own, passed) for passed in (False, True))
    renamed = {}
    for node in nodes:
        if not isinstance(node, (ast.Assert, ast.Assign, ast.Expr)) or _collect_names(node) & values:
            continue
        inner = list(ast.walk(node))
        tested = _find_tested(inner) & free - _MAKERS - _GUARDED
        if _collect_names(node) & derived:  # the solution may have changed it, or is compared with it
            tested &= (_HOME_OF.keys() - _DECIDE) if isinstance(node, ast.Assert) else set()
        for call in inner:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in tested:
                name = call.func.id
                renamed[name] = call.func.id = f"__judge_tested_{name}__"
    return renamed


def _find_makers(nodes):
    """Return calls whose results have members that plain data lacks: ``stack()`` in ``s = stack(); s.push(1)``."""
    bound: list[tuple[object, ast.AST]] = [(node, node) for node in nodes if isinstance(node, ast.Call)]
    bound += [(node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)]
    bound += [(node.target, node.iter) for node in nodes if isinstance(node, (ast.For, ast.comprehension))]
    bound += [(node.optional_vars, node.context_expr) for node in nodes if isinstance(node, ast.withitem)]
    makers: dict[str, set[str]] = {}
    for place, value in bound:
        parts = [value] if isinstance(value, ast.Call) else ast.walk(value)
        calls = {_get_last_name(part.func) for part in parts if isinstance(part, ast.Call)}
        if place is not None and calls:
            makers.setdefault(ast.dump(_make_load(place)), set()).update(calls)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in PLAIN_METHODS:
            owner = node.value
            while isinstance(owner, ast.Subscript):
                owner = owner.value
            found |= makers.get(ast.dump(owner), set())
    return found


def _make_load(node):
    """Return the same name, attribute or item as it is read."""
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ast.Load())
    return ast.Attribute(node.value, node.attr, ast.Load()) if isinstance(node, ast.Attribute) else node


def _get_last_name(node):
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


class _RecordTexts(ast.NodeTransformer):
    """Wraps whatever may be text of the solution in a call of the judge."""

    def __init__(self, derived):
        self._derived = derived

    def _record(self, node):
        self.generic_visit(node)
        name = _get_last_name(getattr(node, "func", node))
        if _collect_names(node) & self._derived and not name.startswith("__judge"):
            return _make_call(TEXT, node, node)
        return node

    visit_Call = _record

    def visit_Subscript(self, node):
        return self._record(node) if isinstance(node.ctx, ast.Load) else self.generic_visit(node)


def _expects_empty(nodes, own):
    """Whether the test has something empty, except in arguments of the solution's functions `own` and as the initial
    value of a collection that the test fills."""
    passed = {
        id(part)
        for node in nodes
        if isinstance(node, ast.Call) and _get_root_name(node.func) in own
        for argument in (*node.args, *node.keywords)
        for part in ast.walk(argument)
    }
    collecting = {
        node.func.value.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        if node.func.attr in ("add", "append", "extend", "update")
    }
    collectors = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) in collecting for target in node.targets)
    }
    return any(_is_empty(node) for node in nodes if id(node) not in passed | collectors)


def _count_bits(node):
    """Return the maximum bits of an integer literal, or of a sum, product or power of literals; 0 for other nodes."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value.bit_length()
    if not isinstance(node, ast.BinOp):
        return 0
    left, right = _count_bits(node.left), _count_bits(node.right)
    if isinstance(node.op, (ast.Pow, ast.LShift)):
        times = node.right.value if isinstance(node.right, ast.Constant) and type(node.right.value) is int else right
        return left and (left * times if isinstance(node.op, ast.Pow) else left + times)
    return left + right if isinstance(node.op, ast.Mult) and left and right else max(left, right)


def _get_root_name(node):
    """Return the name at the start of ``name.attribute[0]()``, or None."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_empty(node):
    """Whether it is a literal, or a call without arguments, that makes something empty."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return not node.elts
    if isinstance(node, ast.Call):
        empty = ("bytearray", "bytes", "deque", "dict", "frozenset", "list", "set", "str", "tuple")
        return isinstance(node.func, ast.Name) and node.func.id in empty and not node.args
    return (isinstance(node, ast.Dict) and not node.keys) or (
        isinstance(node, ast.Constant) and node.value in ("", b"")
    )


def _find_bound(nodes):
    """Return names that the test itself binds anywhere."""
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


def _find_imported(nodes):
    """Return the full names of modules in the test's import statements."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found

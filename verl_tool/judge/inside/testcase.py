"""A test as the judge runs it: what it needs, and the text with the judge's own calls between its statements.

Which names are the judge's is decided by the text of the test alone, never by the solution. Sent into the sandbox
beside the judge.
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
from output_equality import near_whole
from remote import PLAIN_METHODS, Handle
from values import ValueRejected

_USUAL_MODULES = (
    "base64 binascii bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools "
    "hashlib heapq hmac inspect io ipaddress itertools json math numpy operator os pandas pathlib pytest random re "
    "scipy statistics string struct sympy sys textwrap time torch typing unicodedata unittest uuid zlib"
)
_MODULES = {**{name: name for name in _USUAL_MODULES.split()}, "np": "numpy", "pd": "pandas"}
"""Names of modules that a test may use as ``name.attribute`` without an import, and the module."""
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
"""Names that a test may use without an import, by their module. A test that uses names of the solution beside one of
them gets Python's own, whatever the solution calls so: ``isclose(f(2), 3.14)``."""
_HOME_OF = {name: home for home, names in _HELPERS.items() for name in names.split()}
_DECIDE = frozenset(name for name in _HOME_OF if name.startswith(("is", "all", "array", "assert", "approx")))
"""Helpers that say whether something is right."""
_BUILTINS = frozenset(dir(builtins))
_MAKE = (
    "bool bytearray bytes complex dict enumerate filter float frozenset id int isinstance issubclass iter len list map "
    "next print range repr set str tuple type zip"
)
_MAKERS = frozenset(_MAKE.split())
"""Builtins that a test of another one uses: the solution's only where a test has no others."""
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
"""What numpy's scalars have, and Python's numbers lack."""
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
"""Modules that make code of data, or start programs. No test may import them: the data may be the solution's."""


class TestCase:
    """One test. Raises SyntaxError.

    `notes`: the values that an assertion compares are kept, to be `seen` if it fails.
    """

    def __init__(self, text, notes=False):
        self._text = text
        self._noted_parts = []
        self._values = {}
        self.any_held = False
        """Whether an assertion was reached and held."""
        tree = ast.parse(text, "test.py")
        nodes = list(ast.walk(tree))
        loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        self._free = loaded - _bound(nodes) - {EQUAL}
        self._modules = {
            node.value.id
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _MODULES
        } & self._free
        self.texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        """Texts that stand in it."""
        self._imports = _imported(nodes) | self.texts
        self._mentioned = frozenset(_IDENTIFIER.findall(text))
        self._own = self._free - _PROTECTED - self._modules
        self._passed = _passed(nodes, bool(self._own)) & self._free & _PROTECTED
        """Builtins and helpers that the test passes to its own function, which tests them: ``check(median)``."""
        self._own |= self._passed
        self._tested = frozenset() if self._own else (_tested(nodes) or _HOME_OF.keys() - _DECIDE) & self._free
        derived = self._own | _derived(nodes, self._own)
        self._apart: dict[str, str] = {}
        if self._own:
            for scope in _scopes(tree):
                self._apart.update(_rename_tested(scope, self._own, self._free))
        self.makers = _makers(nodes)
        """What the test calls to make objects of the solution's classes, as far as its text tells."""
        self.evaluates = "eval" in self._mentioned
        """It may evaluate a text, in which there may be some of the solution's."""
        self.finite = _SPEAKS_OF_INFINITY.search(text) is None
        """It says nothing of NaN and infinity, and so means neither."""
        self.widths = _SPEAKS_OF_WIDTHS.search(text) is not None
        """It speaks of narrow numbers, or may."""
        self.int64 = _SPEAKS_OF_INT64.search(text) is not None
        """It speaks of numpy's whole numbers."""
        self.members = self.int64 or _MEMBERS.search(text) is not None
        """It may look for what numpy's scalars have."""
        self.large = any(_bits(node) > _SQUARE_BITS for node in nodes)
        """Whole numbers stand in it whose squares are too large for an int64 when there are a thousand of them."""
        self.arrays = bool(self._mentioned & _ARRAYS)
        self.vector = self.arrays and not _expects_empty(nodes, self._own)
        """It uses arrays, which are equal to anything when they are empty, and expects nothing empty itself."""
        self.parses = self.arrays or bool(self._mentioned & _PARSERS)
        """It may make numbers of texts."""
        self.nothing = not self.arrays or "None" in self._mentioned or any(_discards(node, self._own) for node in nodes)
        """None may come back: it uses no arrays, in which None is a NaN, or speaks of it, or calls for an effect."""
        self.expected_true = any(map(_decides, nodes))
        """It has assertions, one of which at least must be reached and hold."""
        for node in nodes:
            _instrument(node)
            if notes and isinstance(node, ast.Assert):
                node.test = self._noting(node.test)
        if self.evaluates:
            tree = ast.fix_missing_locations(_RecordTexts(derived).visit(tree))
        self.code = compile(tree, "test.py", "exec")

    def held(self):
        """An assertion was reached and held."""
        self.any_held = True
        self._values.clear()

    def note(self, number, value):
        """The value of a part of an assertion, as it is."""
        self._values[number] = value
        return value

    def seen(self, longest):
        """The parts of the assertion that has failed, and their values, in at most `longest` characters each."""
        parts = [(ast.get_source_segment(self._text, self._noted_parts[n]), v) for n, v in self._values.items()]
        return [[(source or "")[:longest], _format(value)[:longest]] for source, value in parts]

    def _noting(self, node):
        """The node, with the parts noted whose values tell why it does not hold."""
        if isinstance(node, ast.BoolOp):
            node.values = [self._noting(value) for value in node.values]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self._noting(node.operand)
        elif isinstance(node, ast.Compare):
            node.left, *node.comparators = [self._noted(side) for side in (node.left, *node.comparators)]
        elif isinstance(node, ast.Call) and _root(node.func) == EQUAL:
            node.args[0] = self._noted(node.args[0])
        else:
            return self._noted(node)
        return node

    def _noted(self, node):
        if not any(isinstance(part, ast.Name) for part in ast.walk(node)):
            return node  # a literal is to be read in the test
        self._noted_parts.append(node)
        number = ast.Constant(len(self._noted_parts) - 1, **_place(node))
        return _call(NOTE, node, number, node)

    def namespace(self, link):
        """The names that the test starts with: the solution's, then those that are not the solution's to give.

        Builtins and helpers are the solution's only in a test that uses no other name of it, as one of a function
        ``pow`` does, and only if no other call is among their arguments: ``sqrt`` in ``isclose(sqrt(4), 2)``. Raises
        `ValueRejected` if the solution has none of those: the test would be of Python itself.
        """
        used = (link.names() & self._mentioned) - self._modules
        tested = self._tested & used
        if self._tested and not tested:
            raise link.reject_test(f"the solution does not define {' or '.join(sorted(self._tested))}")
        if self._passed - used:
            raise link.reject_test(f"the solution does not define {' or '.join(sorted(self._passed - used))}")
        names = {name: link.value(name) for name in used if name not in _PROTECTED or name in tested | self._passed}
        for name in self._free & _HOME_OF.keys() - names.keys():
            with suppress(ImportError):
                names[name] = getattr(import_module(_HOME_OF[name]), name)
        own_builtins = self._builtins(link)
        for name, alias in self._apart.items():
            if name in used or name in own_builtins:
                names[alias] = link.value(name) if name in used else own_builtins[name]
        for name in self._modules:
            with suppress(ImportError):
                names[name] = import_module(_MODULES[name])
        return {"__builtins__": own_builtins, **names, "__name__": "test"}

    def _builtins(self, link):
        """Python's, but that what makes code of data takes only texts that stand in the test."""
        own, mentioned = self.texts, self._mentioned

        def literal(name, source):
            if not isinstance(source, str) or source not in own:
                raise link.reject(f"{name} of a text")

        def guarded_import(name, *args, **kwargs):
            # Python's own code calls it too: that of `strftime`, or of the sum of an array.
            chosen = "__import__" in mentioned and name not in self._imports
            if chosen or name.partition(".")[0] in _RUNS_DATA:
                raise link.reject(f"import of {name!r:.80}; of modules that make code of data none is allowed, and")
            return builtins.__import__(name, *args, **kwargs)

        def guarded_eval(source, *names):
            if isinstance(source, str) and source not in own and not names:
                return evaluate(link, source, own)
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

        def guarded_getattr(owner, name, *default):
            if isinstance(owner, types.ModuleType) and name not in own and name not in mentioned:
                raise link.reject(f"a name {name!r:.80} in a module")
            return getattr(owner, name, *default)

        guards = {"eval": guarded_eval, "exec": guarded_exec, "compile": guarded_compile, "getattr": guarded_getattr}
        return {**vars(builtins), **guards, "__import__": guarded_import}


def evaluate(link, text, own):
    """The value of a text that does not stand in the test, but some of the texts `own` that do may stand in it."""
    from evaluation import SolutionEvaluation, is_whole, parse  # the judge has imported it if a test may need it

    node = parse(text)
    pieces = {piece.strip() for part in own for piece in _FIELD.split(part)} - {""}
    if any(piece in text for piece in pieces) and not is_whole(text, node, link.texts - own):
        raise link.reject("eval of a text that is no expression by itself,")
    if node is None or not _names(node) & link.names():
        return link.evaluate_apart(text)
    return SolutionEvaluation(link.value, link.reject).of(node)


def present(value):
    """The condition of an ``if`` or ``while``: an object of the solution's is there, whatever its ``__bool__`` says."""
    return True if isinstance(value, Handle) else value


def equal(value, *expected):
    """Whether what a function gave back is one of these, as far as JSON can tell: lists and tuples are alike, keys of
    dictionaries are texts, and a float may differ from an expected float by a billionth. What is expected as a whole
    number is exact: 2.0 is 2, and True is 1, as in Python."""
    return any(_equal(value, each) for each in expected)


def _equal(value, expected):
    if isinstance(value, (list, tuple)) and type(expected) is list:
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and type(expected) is dict:
        texts = {str(key): item for key, item in value.items()}
        alike = len(texts) == len(value) and texts.keys() == {str(key) for key in expected}
        return alike and all(_equal(texts[str(key)], item) for key, item in expected.items())
    if isinstance(value, float) and type(expected) is float:
        if expected.is_integer():  # 123456789012.0: the next ones are no roundings of it
            return value == expected or (not value.is_integer() and near_whole(value, expected))
        return math.isclose(value, expected) or (expected != expected and value != value)
    return value == expected


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 8
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = _SHORT.maxdeque = 60
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 300


def _format(value):
    """A value as text, large ones not in full."""
    try:
        return _SHORT.repr(value)
    except (Exception, ValueRejected, PeerExitedError):  # noqa: BLE001  a `__repr__` of the test's, or of a library's
        return f"<a {type(value).__name__}>"


_FIELD = re.compile(r"%[-+ #0-9.]*[a-z]|\{[^{}]*\}")
"""Of a text that is a format."""
TEXT = "__judge_text__"
"""The judge's own call around what may be a text of the solution's, in a test that evaluates texts."""
BEFORE, HELD, PRESENT = "__judge_before__", "__judge_held__", "__judge_present__"
"""Names of the judge's own calls in a test: before each statement, behind each assertion, around conditions."""
EQUAL, NOTE = "__judge_equal__", "__judge_note__"
"""The same: in tests that are made of a call and the value expected, and around what an assertion compares."""


def _instrument(node):
    """Put the judge's calls into a node of a test."""
    for field in _BLOCKS:
        statements = getattr(node, field, None)
        if type(statements) is list:
            setattr(node, field, [call for statement in statements for call in _with_calls(statement)])
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        node.test = _condition(node.test)
    if isinstance(node, ast.While):  # asked again when the body is over
        node.test = _behind(node.test)
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        node.body.append(ast.Expr(_call(BEFORE, node.body[-1]), **_place(node.body[-1])))
    elif isinstance(node, ast.BoolOp):
        node.values[1:] = map(_behind, node.values[1:])
    elif isinstance(node, ast.comprehension):
        node.ifs = [_condition(test) for test in node.ifs]


_BLOCKS = ("body", "orelse", "finalbody")


def _with_calls(statement):
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
        return [statement]
    before = ast.Expr(_call(BEFORE, statement), **_place(statement))
    if not _decides(statement):
        return [before, statement]
    return [before, statement, ast.Expr(_call(HELD, statement), **_place(statement))]


def _decides(node):
    """Whether it is an assertion, and one that could fail: ``assert 1 == 1`` could not."""
    return isinstance(node, ast.Assert) and any(isinstance(part, ast.Name) for part in ast.walk(node.test))


def _behind(value):
    """What is asked once something else was: ``f(values) is None and values == [1, 2]`` sees what `f` has done."""
    place = _place(value)
    both = ast.Tuple([_call(BEFORE, value), value], ast.Load(), **place)
    return ast.Subscript(both, ast.Constant(1, **place), ast.Load(), **place)


def _discards(node, own):
    """Whether it calls one of the functions `own` for what it does, not for what it gives back."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _root(node.value.func) in own


def _call(name, at, *args):
    place = _place(at)
    return ast.Call(ast.Name(name, ast.Load(), **place), list(args), [], **place)


def _place(at):
    return {name: getattr(at, name) for name in at._attributes}


def _condition(test):
    if isinstance(test, ast.BoolOp):
        test.values = [_condition(value) for value in test.values]
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test.operand = _condition(test.operand)
    elif isinstance(test, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return _call(PRESENT, test, test)
    return test


def _innermost(nodes):
    """Names that are called with no call among their arguments but that of a builtin that makes a value."""
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


def _passed(nodes, has_others):
    """Names that a test passes to a function of its own by which it tests them, as HumanEval's tests do; if there are
    others that are the solution's, only to one of the names that HumanEval gives to it."""
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


def _tested(nodes):
    """Builtins and helpers that a test without other names is of: ``max([1, 2]) == len([1, 2])`` is of `max`."""
    left: set[str] = set()
    right: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Compare):
            one = _innermost(ast.walk(node.left)) & _PROTECTED - _MAKERS
            left |= one
            if one:
                right.update(*(_innermost(ast.walk(other)) for other in node.comparators))
    found = (_innermost(nodes) & _PROTECTED) - (right - left)
    return found - _MAKERS or found


_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.withitem)


def _names(node):
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _derived(nodes, own, passed=True):
    """Names that may stand for something of the solution's: those in an assignment with one of `own` or with another
    such name, and all arguments of functions; if `passed`, also for what the solution was given and may have changed.
    """
    found = {node.arg for node in nodes if isinstance(node, ast.arg)} - {"self", "cls"}
    statements = (*_ASSIGNMENTS, ast.Expr, ast.Assert) if passed else _ASSIGNMENTS
    groups = [_names(node) for node in nodes if isinstance(node, statements)]
    groups += [
        _names(node.target) | _names(node.iter) for node in nodes if isinstance(node, (ast.For, ast.comprehension))
    ]
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    groups += [{node.name} | _names(node) for node in nodes if isinstance(node, defined)]
    size = -1
    while size < len(found):
        size = len(found)
        for group in groups:
            if group & (own | found):
                found |= group - _PROTECTED
    return found - own


_GUARDED = frozenset(("__import__", "compile", "eval", "exec", "getattr"))
"""Builtins that are never the solution's in a test that asks something else of it."""


def _scopes(tree):
    """The nodes of each function of the test's, and those outside of any: they have variables of their own."""
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
    """Rename builtins and helpers that a statement by itself is of, in a test of other names too: ``product([2, 3])``
    is the solution's where nothing else of it is asked. The new name of each."""
    values, derived = (own | _derived(nodes, own, passed) for passed in (False, True))
    renamed = {}
    for node in nodes:
        if not isinstance(node, (ast.Assert, ast.Assign, ast.Expr)) or _names(node) & values:
            continue
        inner = list(ast.walk(node))
        tested = _tested(inner) & free - _MAKERS - _GUARDED
        if _names(node) & derived:  # the solution may have changed it, or it is what the solution is compared with
            tested &= (_HOME_OF.keys() - _DECIDE) if isinstance(node, ast.Assert) else set()
        for call in inner:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in tested:
                name = call.func.id
                renamed[name] = call.func.id = f"__judge_tested_{name}__"
    return renamed


def _makers(nodes):
    """Functions and methods whose results are asked for what no plain data has: ``stack()`` in
    ``s = stack(); s.push(1)``."""
    bound: list[tuple[object, ast.AST]] = [(node, node) for node in nodes if isinstance(node, ast.Call)]
    bound += [(node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)]
    bound += [(node.target, node.iter) for node in nodes if isinstance(node, (ast.For, ast.comprehension))]
    bound += [(node.optional_vars, node.context_expr) for node in nodes if isinstance(node, ast.withitem)]
    makers: dict[str, set[str]] = {}
    for place, value in bound:
        parts = [value] if isinstance(value, ast.Call) else ast.walk(value)
        calls = {_last_name(part.func) for part in parts if isinstance(part, ast.Call)}
        if place is not None and calls:
            makers.setdefault(ast.dump(_loaded(place)), set()).update(calls)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in PLAIN_METHODS:
            owner = node.value
            while isinstance(owner, ast.Subscript):
                owner = owner.value
            found |= makers.get(ast.dump(owner), set())
    return found


def _loaded(node):
    """The same name, attribute or item where it is read."""
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ast.Load())
    return ast.Attribute(node.value, node.attr, ast.Load()) if isinstance(node, ast.Attribute) else node


def _last_name(node):
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


class _RecordTexts(ast.NodeTransformer):
    """Puts the judge's call around whatever may be a text of the solution's."""

    def __init__(self, derived):
        self._derived = derived

    def _recorded(self, node):
        self.generic_visit(node)
        if _names(node) & self._derived and not _last_name(getattr(node, "func", node)).startswith("__judge"):
            return _call(TEXT, node, node)
        return node

    visit_Call = _recorded

    def visit_Subscript(self, node):
        return self._recorded(node) if isinstance(node.ctx, ast.Load) else self.generic_visit(node)


def _expects_empty(nodes, own):
    """Whether something empty stands in a test elsewhere than among the arguments of the solution's functions `own`,
    or as what the test collects something in."""
    passed = {
        id(part)
        for node in nodes
        if isinstance(node, ast.Call) and _root(node.func) in own
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


def _bits(node):
    """Of the whole number that a literal, or a sum, product or power of literals, stands for, at most; 0 of others."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value.bit_length()
    if not isinstance(node, ast.BinOp):
        return 0
    left, right = _bits(node.left), _bits(node.right)
    if isinstance(node.op, (ast.Pow, ast.LShift)):
        times = node.right.value if isinstance(node.right, ast.Constant) and type(node.right.value) is int else right
        return left and (left * times if isinstance(node.op, ast.Pow) else left + times)
    return left + right if isinstance(node.op, ast.Mult) and left and right else max(left, right)


def _root(node):
    """The name with which ``name.attribute[0]()`` begins, if it does with one."""
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

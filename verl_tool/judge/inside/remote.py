"""Objects of the solution as a test sees them in the judge's process. Sent into the sandbox with the judge."""

import functools
import json
import math
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator

from link import EXCEPTIONS, ProcessLink, take_next, update
from values import CONTAINERS, ValueReader, ValueRecord, ValueRejected, encode

_PLAIN_KINDS = (str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, deque, Counter)
_OTHER_NAMES = (
    "all any equals date isocalendar isoformat isoweekday strftime time timestamp timetuple toordinal total_seconds "
    "weekday"
)
_NAMES = {name for kind in _PLAIN_KINDS for name in dir(kind) if not name.startswith("_")}
PLAIN_METHODS = frozenset(_NAMES.union(_OTHER_NAMES.split()) - {"copy", "items", "keys", "values"})
"""Methods that a test calls on plain data, and that an object must not answer: ``f(1).isupper()``. The methods left out
return everything that a container of the solution's class contains."""
_STRING_METHODS = PLAIN_METHODS & set(dir(str)) - {"count", "format", "index", "replace"}
"""Those that tables and arrays of libraries do not have."""
MAX_COPY_ITEMS = 100_000
"""Maximum number of items of the solution's object over which a test can iterate."""
_READABLE = frozenset({"__name__", "__qualname__", "__doc__", "__dict__"})
"""Attributes with two leading underscores that a test may read. Libraries look for the others."""


class Handle:
    """Stands for an object in the solution's process: a function, a class, or an instance of one.

    It can be called, its attributes can be read and set, and ``str``, ``len``, ``[0]`` and a loop see a copy of its
    contents. Each comparison and each operator raises `ValueRejected`, which fails the test. So an ``__eq__`` of the
    solution never decides, and only plain data can satisfy an assertion.
    """

    __slots__ = ("__link", "__number")

    def __init__(self, link, number):
        object.__setattr__(self, "_Handle__link", link)
        object.__setattr__(self, "_Handle__number", number)

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__") and name not in _READABLE:
            raise AttributeError(name)
        return self.__link.read_member("getattr", self, name)

    def __setattr__(self, name, value):
        self.__link.ask("setattr", self, name, value)

    def __delattr__(self, name):
        self.__link.ask("delattr", self, name)

    def __call__(self, *args, **kwargs):
        return self.__link.ask("call", self, *args, **kwargs)

    def __eq__(self, other):
        if other is None:  # like ``is None``, which cannot be rejected
            return False
        raise self.__link.reject("==")

    def __ne__(self, other):
        if other is None:
            return True
        raise self.__link.reject("!=")

    def __str__(self):
        return self.__text("str")

    def __repr__(self):
        return self.__text("repr")

    def __format__(self, spec):
        return format(self.__text("str"), spec)

    def __len__(self):
        copied = self.__link.copy_items(self)
        length = self.__link.ask("len", self) if copied is None else len(copied)
        if type(length) is not int or length < 0:
            raise self.__link.reject("len")
        return length

    def __getitem__(self, place):
        if isinstance(place, str):  # A key is read like an attribute, an index from a copy.
            return self.__link.read_member("getitem", self, place)
        copied = self.__link.copy_items(self)
        if copied is None or not isinstance(place, (int, slice)):
            raise self.__link.reject("[]")
        return copied[place]

    def __setitem__(self, place, value):
        self.__link.ask("setitem", self, place, value)

    def __delitem__(self, place):
        self.__link.ask("delitem", self, place)

    def __iter__(self):
        copied = self.__link.copy_items(self)
        if copied is None:
            raise self.__link.reject("iter")
        return iter(copied)

    def __instancecheck__(self, instance):
        return isinstance(instance, Handle) and self.__link.ask("isinstance", instance, self) is True

    def __subclasscheck__(self, kind):
        return isinstance(kind, Handle) and self.__link.ask("issubclass", kind, self) is True

    def __enter__(self):
        return self.__link.ask("enter", self)

    def __exit__(self, kind, error, traceback):
        self.__link.ask("exit", self)
        return False

    def _check_field(self, name):
        """Reject a field of a named tuple that is named like a method of plain data: ``f(1).startswith("a")``."""
        if self.__link._is_plain_access("getattr", self, name):
            raise self.__link.reject(f".{name}()")

    def __text(self, operation):
        if self.__link.is_formatting:
            return "<an object of the program>"
        text = self.__link.ask(operation, self)
        if type(text) is not str:
            raise self.__link.reject(operation)
        return text


def _rejection(name):
    def method(self, *_, **__):
        raise self._Handle__link.reject(name)

    return method


_OPERATORS = (
    "lt le gt ge hash bool contains reversed int float complex index bytes neg pos abs invert round "
    "trunc floor ceil array array_ufunc array_function copy deepcopy reduce reduce_ex fspath await aiter"
)
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
for _name in [*_OPERATORS.split(), *(side + name for name in _BINARY.split() for side in ("", "r", "i"))]:
    setattr(Handle, f"__{_name}__", _rejection(_name))


class Stream(Handle):
    """An iterator of the solution's. Its values arrive once: most tests would hold for a second, empty iteration."""

    __slots__ = ("__ended", "__fresh")

    def __init__(self, link, number):
        super().__init__(link, number)
        object.__setattr__(self, "_Stream__ended", False)
        object.__setattr__(self, "_Stream__fresh", True)

    def __iter__(self):
        self.__check()
        return self

    def __next__(self):
        self.__check()
        answer = self._Handle__link.ask("next", self)
        if type(answer) is not list or len(answer) != 2 or answer[0] is not True:
            object.__setattr__(self, "_Stream__ended", True)
            if self.__fresh and self._Handle__link.rejects_empty:
                raise self._Handle__link.reject_test("an empty iterator is returned, which the test does not mention")
            raise StopIteration
        object.__setattr__(self, "_Stream__fresh", False)
        return answer[1]

    def __len__(self):
        raise TypeError("an iterator has no length")  # as ``list(iterator)`` expects

    def __getitem__(self, place):
        raise self._Handle__link.reject("[]")

    def __check(self):
        if self.__ended:
            raise self._Handle__link.reject_test("an iterator of the solution was read again after its end")


class GeneratorStream(Stream):
    """A generator of the solution, which a test may check for being one."""

    __slots__ = ()
    __class__ = property(lambda self: types.GeneratorType)


_VIEWS: "tuple[type, ...]" = (type({}.keys()), type({}.values()), type({}.items()))
_SIZED = frozenset(
    {*_VIEWS, *CONTAINERS, str, bytes, tuple, frozenset, range, OrderedDict, Counter, defaultdict, ValueRecord}
)
_PROVIDED = frozenset({"add", "append", "appendleft", "extend", "extendleft", "update", "count", "get", "index"})
"""Methods of a test's container that a solution may receive, to collect values. None makes the container smaller."""


_NON_FINITE = re.compile(r"(?<!\w)(s?nan\d*|inf|infinity|\d+\.?\d*e\+?\d{3,})(?!\w)", re.IGNORECASE)
"""A word that ``float`` parses as a number that is not finite."""
_HALF, _SINGLE = 2, 4
"""Bytes of a float16 and of a float32 (half of those of a complex64)."""
_SINGLE_EXACT = 1 << 23
"""From here on a float32 has no fractions, and soon not every integer."""
_SQUARES_FIT = 1 << 24
"""The sum of a thousand squares of smaller integers fits an int64."""
_FLOAT_EXACT = 1 << 53
_LARGEST_INT64 = (1 << 63) - 1

_FLAGS = dict.fromkeys(("arrays", "rejects_empty", "parses", "large", "int64", "evaluates"), False)
NO_TEST = types.SimpleNamespace(**_FLAGS, finite=True, accepts_none=True, widths=True, members=True, makers=frozenset())
"""Used for values that are read before there is a test."""


class JudgeReader(ValueReader):
    """Reader of what the solution sends, according to `case`, the current test. It rejects NaN and infinity (`finite`),
    text of them (`parses`) and empty values (`rejects_empty`). It widens narrow numbers of numpy (unless `widths`),
    with regard to `int64` and `large`, and makes its scalars Python's (unless `members`)."""

    def __init__(self, link):
        super().__init__(link.resolve)
        self._link = link
        self.case = NO_TEST

    def read(self, data):
        """Reject empty values: in ``np.allclose([], 3.14)`` everything equals an array without elements."""
        value = super().read(data)
        if value is None and not self.case.accepts_none and self._link.operation == "call":
            self.number(math.nan)
        if self.case.evaluates:
            self._link.record_text(value)
        if self.case.parses and isinstance(value, str) and _NON_FINITE.search(value):
            self.number(math.nan)
        if self.case.rejects_empty and type(value) in _SIZED and not value:
            if self._link.is_reading_call:
                raise ValueError("an empty value")
            raise self._link.reject_test("an empty value is returned, which the test does not mention")
        return value

    def number(self, value):
        """Reject NaN: ``not abs(nan - 3.14) > 1e-6`` holds, unless the test looks for it."""
        if self.case.finite and not math.isfinite(value):
            if self._link.is_reading_call:
                raise ValueError("nan or infinity")
            raise self._link.reject_test("nan or infinity is returned, which the test does not mention")
        return value

    def array(self, array):
        """Widen numbers to those that a test expects: integers and truth values to Python's, and arrays to wide types.
        ``(f(1) - 3) ** 2 < 1e-6`` holds for an int8 of 15 and a uint8 of 19, whose squares wrap around, and nearly for
        a float16, to which the 3 is rounded."""
        kind, size = array.dtype.kind, array.dtype.itemsize
        if self.case.widths:
            return array
        if kind == "b":
            return array if array.ndim or self.case.members else array.astype(object)
        if kind in "fc":
            return self._wide_float(array, size // (2 if kind == "c" else 1))
        return self._wide_whole(array) if kind in "iu" else array

    def _wide_float(self, array, size):
        if size == _HALF or (size == _SINGLE and abs(array).max() >= _SINGLE_EXACT):
            return array.astype(complex if array.dtype.kind == "c" else float)
        return array

    def _wide_whole(self, array):
        largest = max(-int(array.min()), int(array.max()))
        fits = largest <= (_LARGEST_INT64 if self.case.int64 else -1 if self.case.large else _SQUARES_FIT)
        if not array.ndim:
            return array.astype("int64" if fits and self.case.members else object)
        return array.astype("int64" if fits else float if largest <= _FLOAT_EXACT else object)

    def empty_array(self, array):
        """Reject an empty array, unless a test of arrays expects something empty and so can tell it apart."""
        if self.case.arrays and not self.case.rejects_empty:
            return array
        raise self._link.reject_test("an empty array is returned, which the test does not mention")


MAX_MEMBERS = 256
"""Maximum number of copies that are checked for changes. Older ones are dropped."""
_UNSHARED_REFERENCES = 2
"""References to a copy that only `JudgeLink._members` and the call that counts them have."""


class JudgeLink(ProcessLink):
    """The judge's end."""

    def __init__(self, socket, evaluator=None):
        """`evaluator()` returns the link to a process that has never run the solution."""
        super().__init__(socket)
        self._evaluator = evaluator
        self._reader = JudgeReader(self)
        self._handles = {}
        self._streams = {}
        self._functions = {}
        self._iterators = {}
        self._operations = []
        self._last_number = 0
        self._exceptions = {}
        self._globals = {}
        """JSON of the global values. Each test makes its own values of it."""
        self._changes = {}
        """New states of the test's containers by id, with the test's frames at the request, the innermost first."""
        self._copies = {}
        self._members = []
        """The test's copies of parts of the solution's objects. `sent` is their JSON as the solution has it."""
        self._namespace = None
        self._name_by_number = {}
        """The global name or the attribute under which the test has found an object of the solution, by its number."""
        self._built = set()
        """Numbers of objects that the test has constructed: ``Stack()``."""
        self.texts = set()
        """Text of the solution, in a test that evaluates text."""
        self.is_reading_call = False
        """Whether the arguments of a call by the solution are being read."""
        self.rejection = ""
        """Why the running test has failed, even if it has caught the exception."""
        self.is_formatting = False
        """Whether values are being formatted. No requests go to the solution then."""

    def load(self, solution):
        """Run the text of the solution."""
        for name, kind, text in self.ask("load", solution):
            if type(name) is not str or not name.isidentifier() or name.startswith("__") or type(text) is not str:
                continue
            if kind == "exception" and name not in EXCEPTIONS:
                self._exceptions[name] = self._make_exception_class(json.loads(text))
            elif kind == "value":
                self._globals[name] = text

    def list_names(self):
        """Return the global names of the solution that are not modules."""
        return self._globals.keys() | self._exceptions.keys()

    def read_name(self, name):
        """Return the value for a test under one of `list_names`."""
        if name in self._exceptions:
            return self._exceptions[name]
        try:
            value = self._reader.read(json.loads(self._globals[name]))
        except Exception as error:  # noqa: BLE001  a hostile answer may raise anything
            raise self._record_exit(f"an invalid value: {error}") from None
        if isinstance(value, Handle):
            self._record_name(value, name)
            if _is_class_name(name) and not name.isupper():
                self._built.add(value._Handle__number)
        return value

    def _record_name(self, handle, name):
        self._name_by_number[handle._Handle__number] = name

    def record_text(self, value):
        """Record text that may be, or contain, text of the solution."""
        if isinstance(value, str) and value.strip():
            self.texts.add(value)
        return value

    def evaluate_isolated(self, text):
        """Evaluate text that names nothing of the solution, in a fresh process. Returns plain data."""
        apart = self._evaluator()
        apart.begin(self._reader.case)
        try:
            value = apart.ask("eval", text)
        finally:
            self.rejection = self.rejection or apart.rejection
        if isinstance(value, Handle):
            raise self.reject_test("eval: the result is not plain data")
        return value

    def begin(self, case):
        """Start a new test. The solution can no longer call what another test passed to it."""
        self._functions.clear()
        self._iterators.clear()
        self._changes.clear()
        self._copies.clear()
        self._members.clear()
        self._name_by_number.clear()
        self._built.clear()
        self.texts.clear()
        self._reader.case = case
        self.rejection = ""

    def set_namespace(self, namespace):
        """Set the global names whose functions are those of the test."""
        self._namespace = namespace

    @property
    def rejects_empty(self):
        """Whether the test uses arrays and mentions nothing empty."""
        return self._reader.case.rejects_empty

    @property
    def operation(self):
        """The current request to the solution."""
        return self._operations[-1] if self._operations else ""

    def reject(self, what):
        """Return the exception to raise. The test has failed even if it catches it."""
        return self.reject_test(f"{what} is used on a returned value that is not plain data")

    def reject_test(self, why):
        """Like `reject`, with a complete message."""
        self.rejection = self.rejection or why
        return ValueRejected(self.rejection)

    def read_member(self, operation, owner, key):
        """Read an attribute or an item of an object of the solution. A container arrives as a copy. What the test does
        to the copy is applied to the solution's own: ``node.children.append(x)``."""
        if (
            operation == "getitem"
            and owner._Handle__number not in self._built
            and key not in (self.copy_items(owner) or ())
        ):
            raise self.reject("[] with a key that iteration does not yield")
        value = self.ask(operation, owner, key)
        if isinstance(value, Handle):
            if self._is_plain_access(operation, owner, key):
                raise self.reject(f".{key}()")
            self._record_name(value, key)
        if isinstance(value, CONTAINERS):
            sent = encode(value, self.refer)
            self._members.append(types.SimpleNamespace(value=value, sent=sent, source=(operation, owner, key)))
            del self._members[:-MAX_MEMBERS]
        return value

    def _is_plain_access(self, operation, owner, key):
        """Whether the test reads a method of plain data from an object that a function returned: ``f(1).isupper()``. A
        class of the solution may have such methods, so objects that the test has constructed are exempt."""
        if operation != "getattr" or owner._Handle__number in self._built:
            return False
        return key in (_STRING_METHODS if self._reader.case.arrays else PLAIN_METHODS)

    def write_back_members(self):
        """Bring the solution's containers into the state in which the test has left its copies."""
        borrowed, self._members = self._members, []
        for one in borrowed:
            now = encode(one.value, self.refer)
            if now != one.sent:
                self.ask("replace", *one.source, one.value)
                one.sent = now
            if sys.getrefcount(one.value) > _UNSHARED_REFERENCES:
                self._members.append(one)

    def ask(self, operation, *args, **kwargs):
        if self._members:
            self.write_back_members()
        if operation not in ("len", "list"):
            self._copies.clear()
        self._operations.append(operation)
        try:
            value = super().ask(operation, *args, **kwargs)
        finally:
            self._operations.pop()
        if operation == "call" and isinstance(value, Handle):
            name = self._name_by_number.get(args[0]._Handle__number, "")
            if _is_class_name(name) or name in self._reader.case.makers:
                self._built.add(value._Handle__number)
        return value

    def copy_items(self, handle):
        """List the items of a container of the solution until the next request to it. Returns None if it is none."""
        number = handle._Handle__number
        if number not in self._copies:
            items = self.ask("list", handle, MAX_COPY_ITEMS)
            if items is not None and type(items) is not list:
                raise self.reject("iteration")
            self._copies[number] = items
        return self._copies[number]

    def handle_change(self, container, state):
        """Defer the change until the statement is finished: ``f(values) == sorted(values)`` must not pass when `f`
        clears them, nor ``list(f(values)) == sorted(values)``, which sends two requests."""
        frames = list(self._iterate_test_frames(sys._getframe()))
        self._changes[id(container)] = types.SimpleNamespace(container=container, state=state, frames=frames)

    def get_current(self, value):
        """Return the changed state: the solution sees its own changes at once, within one statement too."""
        change = self._changes.get(id(value))
        return value if change is None else change.state

    def apply_changes(self):
        """Bring the test's containers into the state in which the solution has left them. Called at the beginning of
        each statement. Changes of a statement that is not finished, in a caller of this function, stay deferred."""
        if self._members:
            self.write_back_members()
        if not self._changes:
            return
        here, *callers = self._iterate_test_frames(sys._getframe())
        for key, change in list(self._changes.items()):
            if next((frame for frame in change.frames if frame is here or frame in callers), here) is here:
                del self._changes[key]
                update(change.container, change.state)

    def _iterate_test_frames(self, frame):
        """Yield the callers of `frame` that run the test's own text, the innermost first."""
        while frame is not None:
            if frame.f_globals is self._namespace:
                yield frame
            frame = frame.f_back

    def refer(self, value):
        if isinstance(value, Handle):
            return ["solution", value._Handle__number]
        if isinstance(value, Iterator):
            self._last_number += 1
            self._iterators[self._last_number] = value
            return ["iterator", self._last_number]
        path = _find_library_path(value)
        if path is not None:
            return ["library", *path]
        if not self._can_pass(value):
            raise self.reject_test(f"a {type(value).__name__} of the test cannot be passed to the solution")
        self._last_number += 1
        self._functions[self._last_number] = value
        return ["judge", self._last_number]

    def resolve(self, data):
        """Return a handle, or a function of the test that the solution returns. It must not pass one on."""
        side, number = data
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is not the number of an object")
        if side == "judge":
            if self.is_reading_call or not isinstance(self._functions[number], types.FunctionType):
                raise ValueError("a function of the test is returned where none may be")
            return self._functions[number]
        if side in ("iterator", "generator"):
            kind = Stream if side == "iterator" else GeneratorStream
            return self._streams.setdefault(number, kind(self, number))
        if side != "solution":
            raise ValueError(f"{side!r} is not a kind of value")
        return self._handles.setdefault(number, Handle(self, number))

    def perform(self, operation, args, kwargs):
        """Call a function of the test, or read the next item of its iterator. Failed assertions cannot be caught."""
        number, *rest = args
        try:
            if operation == "next":
                return take_next(self._iterators[number])
            if operation != "call":
                raise ValueError(f"the solution requested {operation!r}")
            return self._functions[number](*rest, **kwargs)
        except ValueRejected:
            self.peer_exited = True  # the solution waits for an answer
            raise
        except AssertionError as error:
            self.rejection = self.rejection or f"an assertion in a function of the test failed: {error}"
            raise

    def find_exception_class(self, name):
        return self._exceptions.get(name) or super().find_exception_class(name)

    def receive_output(self, text):
        """Print the text: a test that has replaced stdout finds it there, else it goes nowhere."""
        sys.stdout.write(text)

    def _read_arguments(self, request):
        self.is_reading_call = True
        try:
            return super()._read_arguments(request)
        finally:
            self.is_reading_call = False

    def _read_result(self, container, after):
        # not `container`, whose change is deferred
        return self._reader.read(after)

    def _can_pass(self, value):
        """Whether the solution may call it: a function in the text of the test, or one bound to its plain data."""
        kind = type(value)
        if kind is functools._lru_cache_wrapper:
            return self._can_pass(value.__wrapped__)
        if kind is functools.partial:
            return _find_library_path(value.func) is not None or self._can_pass(value.func)
        if kind is types.MethodType:
            return self._can_pass(value.__func__)
        if kind is types.BuiltinMethodType:
            return type(value.__self__) in CONTAINERS and value.__name__ in _PROVIDED
        return kind is types.FunctionType and value.__globals__ is self._namespace

    def _make_exception_class(self, names):
        first, *rest = [str(name) for name in names]
        base = next(filter(None, map(self.find_exception_class, rest)), Exception)
        return type(first, (base,), {})


def _is_class_name(name):
    return name.lstrip("_")[:1].isupper()


def _find_library_path(value):
    """Return module and name of a function or a class of Python's or numpy's. The solution's process runs its own."""
    of_numpy = type(value).__module__ == "numpy"  # such as a ufunc
    kinds = (type, types.BuiltinFunctionType, types.MethodDescriptorType, types.FunctionType)
    if not of_numpy and not isinstance(value, kinds):
        return None
    owner = getattr(value, "__objclass__", None)
    home = "numpy" if of_numpy else str(getattr(value, "__module__", None) or getattr(owner, "__module__", None))
    module = sys.modules.get(home)
    if module is None or home.partition(".")[0] not in (*sys.stdlib_module_names, "numpy"):
        return None
    name = str(getattr(value, "__qualname__", None) or getattr(value, "__name__", ""))
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return [home, name] if found is value else None

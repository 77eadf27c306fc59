"""Objects of the solution as a test sees them in the judge's process. Sent into the sandbox beside the judge."""

import functools
import json
import math
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator

from link import EXCEPTIONS, ProcessLink, next_of, update
from values import CONTAINERS, ValueReader, ValueRecord, ValueRejected, encode

_PLAIN_KINDS = (str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, deque, Counter)
_OF_DATES = "date isocalendar isoformat isoweekday strftime time timestamp timetuple toordinal total_seconds weekday"
PLAIN_METHODS = frozenset(
    [
        *_OF_DATES.split(),
        "all",
        "any",
        "equals",
        *(name for kind in _PLAIN_KINDS for name in dir(kind) if not name.startswith("_")),
    ]
) - {"copy", "items", "keys", "values"}
"""Methods that a test asks plain data for, and whose answers are not an object's to give: ``f(1).isupper()``. The
others give all that an own container holds."""
_OF_TEXTS = PLAIN_METHODS & set(dir(str)) - {"count", "format", "index", "replace"}
"""Those that libraries' tables and arrays do not have."""
LONGEST_COPY = 100_000
"""Items of an object of the solution's that a test walks through."""
_READABLE = frozenset({"__name__", "__qualname__", "__doc__", "__dict__"})
"""Attributes with two leading underscores that a test may read; the others are what libraries look for."""


class Handle:
    """Stands for an object that lives in the solution's process: a function, a class, an instance of one.

    It can be called, its attributes can be read and set, and ``str``, ``len``, ``[0]`` and a loop see a copy of what it
    holds. Nothing else: each comparison and each operator raises `ValueRejected`, which fails the test. So the
    solution's ``__eq__`` and its like never decide, and only plain data can satisfy an assertion.
    """

    __slots__ = ("__link", "__number")

    def __init__(self, link, number):
        object.__setattr__(self, "_Handle__link", link)
        object.__setattr__(self, "_Handle__number", number)

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__") and name not in _READABLE:
            raise AttributeError(name)
        return self.__link.borrow("getattr", self, name)

    def __setattr__(self, name, value):
        self.__link.ask("setattr", self, name, value)

    def __delattr__(self, name):
        self.__link.ask("delattr", self, name)

    def __call__(self, *args, **kwargs):
        return self.__link.ask("call", self, *args, **kwargs)

    def __eq__(self, other):
        if other is None:  # as ``is None``, which cannot be refused
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
        copied = self.__link.copy_of(self)
        length = self.__link.ask("len", self) if copied is None else len(copied)
        if type(length) is not int or length < 0:
            raise self.__link.reject("len")
        return length

    def __getitem__(self, place):
        if isinstance(place, str):  # A key is asked for as a method is; a place is looked up in what a loop sees.
            return self.__link.borrow("getitem", self, place)
        copied = self.__link.copy_of(self)
        if copied is None or not isinstance(place, (int, slice)):
            raise self.__link.reject("[]")
        return copied[place]

    def __setitem__(self, place, value):
        self.__link.ask("setitem", self, place, value)

    def __delitem__(self, place):
        self.__link.ask("delitem", self, place)

    def __iter__(self):
        copied = self.__link.copy_of(self)
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
        """Refuse what stands in a named tuple under the name of a method of plain data's: ``f(1).startswith("a")``."""
        if self.__link._is_plain_access("getattr", self, name):
            raise self.__link.reject(f".{name}()")

    def __text(self, operation):
        if self.__link.describing:
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
    """An iterator of the solution's. Its values come once: read again it would be empty, which most tests hold for."""

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
            if self.__fresh and self._Handle__link.vector:
                raise self._Handle__link.reject("an iterator of nothing, of which a test of arrays does not speak,")
            raise StopIteration
        object.__setattr__(self, "_Stream__fresh", False)
        return answer[1]

    def __len__(self):
        raise TypeError("an iterator has no length")  # as ``list(iterator)`` expects

    def __getitem__(self, place):
        raise self._Handle__link.reject("[]")

    def __check(self):
        if self.__ended:
            raise self._Handle__link.reject("a second look at the end of an iterator")


class Generated(Stream):
    """A generator of the solution's, which a test may ask for being one."""

    __slots__ = ()
    __class__ = property(lambda self: types.GeneratorType)


_VIEWS: "tuple[type, ...]" = (type({}.keys()), type({}.values()), type({}.items()))
_SIZED = frozenset(
    {*_VIEWS, *CONTAINERS, str, bytes, tuple, frozenset, range, OrderedDict, Counter, defaultdict, ValueRecord}
)
_PROVIDED = frozenset({"add", "append", "appendleft", "extend", "extendleft", "update", "count", "get", "index"})
"""Methods of a test's container that a solution may be given: a collector's, and none that makes it smaller."""


_NO_NUMBER = re.compile(r"(?<!\w)(s?nan\d*|inf|infinity|\d+\.?\d*e\+?\d{3,})(?!\w)", re.IGNORECASE)
"""As a word of a text, of which ``float`` makes no finite number."""
_HALF, _SINGLE = 2, 4
"""Bytes of a float16 and a float32, and half of those of a complex64."""
_SINGLE_EXACT = 1 << 23
"""From here on a float32 has no fractions, and soon not every whole number."""
_SQUARES_FIT = 1 << 24
"""A thousand squares of such whole numbers have a sum that an int64 can hold."""
_FLOAT_EXACT = 1 << 53
_LARGEST_INT64 = (1 << 63) - 1

_REFUSES = dict.fromkeys(("arrays", "vector", "parses", "large", "int64", "evaluates"), False)
NO_TEST = types.SimpleNamespace(**_REFUSES, finite=True, nothing=True, widths=True, members=True, makers=frozenset())
"""What is read before there is a test."""


class JudgeReader(ValueReader):
    """Reads what the solution sends. `case`, the test, says whether a NaN or an infinity (`finite`), a text of one
    (`parses`) and what is empty (`vector`) are refused, and whether numpy's narrow numbers stay so (`widths`), its
    scalars stay numpy's (`members`), whether it speaks of int64 (`int64`), and of whole numbers whose squares an int64
    does not hold (`large`)."""

    def __init__(self, link):
        super().__init__(link.resolve)
        self._link = link
        self.case = NO_TEST

    def read(self, data):
        """``np.allclose([], 3.14)``: what is compared with an array of nothing is equal to it."""
        value = super().read(data)
        if value is None and not self.case.nothing and self._link.operation == "call":
            self.number(math.nan)
        if self.case.evaluates:
            self._link.record_text(value)
        if self.case.parses and isinstance(value, str) and _NO_NUMBER.search(value):
            self.number(math.nan)
        if self.case.vector and type(value) in _SIZED and not value:
            if self._link.calling:
                raise ValueError("an empty value")
            raise self._link.reject("an empty value, of which a test of arrays does not speak,")
        return value

    def number(self, value):
        """``not abs(nan - 3.14) > 1e-6``: it passes wherever a test does not look for it."""
        if self.case.finite and not math.isfinite(value):
            if self._link.calling:
                raise ValueError("nan or infinity")
            raise self._link.reject("nan or infinity, of which the test does not speak,")
        return value

    def array(self, array):
        """``(f(1) - 3) ** 2 < 1e-6``: it passes for an int8 of 15 and a uint8 of 19, for their squares wrap around, and
        near to it for a float16, to which the 3 is rounded. So numbers come as a test's own would be: whole ones and
        truth values as Python's, those of arrays as wide ones."""
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
        """Only a test of arrays that expects something empty can tell it from what is equal to it."""
        if self.case.arrays and not self.case.vector:
            return array
        raise self._link.reject("an empty array")


MAX_BORROWED = 256
"""Copies that are compared with what they were; of more, the latest."""
_NOBODY_ELSES = 2
"""References to a copy that no one but `JudgeLink._borrowed` and the call that counts them has."""


class JudgeLink(ProcessLink):
    """The judge's end."""

    def __init__(self, socket, evaluator=None):
        """`evaluator()` gives the link to a process that has never run the solution."""
        super().__init__(socket)
        self._evaluator = evaluator
        self._reader = JudgeReader(self)
        self._handles = {}
        self._streams = {}
        self._functions = {}
        self._iterators = {}
        self._asked = []
        self._numbers = 0
        self._exceptions = {}
        self._globals = {}
        """As JSON, of which each test makes its own."""
        self._changes = {}
        """What the solution has made of containers of the test's, by their ids, with the frames of the test that were
        asking, the innermost first."""
        self._copies = {}
        self._borrowed = []
        """The test's copies of containers that an object of the solution's has as an attribute or under a key. `sent`:
        their JSON as the solution has it."""
        self._namespace = None
        self._names = {}
        """Of objects of the solution's by their numbers: the global name or the attribute under which the test has
        found them."""
        self._built = set()
        """Numbers of objects that the test has had made: ``Stack()``."""
        self.texts = set()
        """Texts of the solution's, in a test that evaluates texts."""
        self.calling = False
        """While the arguments of a call of the solution's are read."""
        self.refused = ""
        """Why the test that is run has failed, though it may have caught that."""
        self.describing = False
        """While values are shown: the solution is not asked then."""

    def load(self, solution):
        """Run the text of the solution."""
        for name, kind, text in self.ask("load", solution):
            if type(name) is not str or not name.isidentifier() or name.startswith("__") or type(text) is not str:
                continue
            if kind == "exception" and name not in EXCEPTIONS:
                self._exceptions[name] = self._exception_class(json.loads(text))
            elif kind == "value":
                self._globals[name] = text

    def names(self):
        """The global names of the solution that stand for something else than a module."""
        return self._globals.keys() | self._exceptions.keys()

    def value(self, name):
        """What a test finds under one of `names`."""
        if name in self._exceptions:
            return self._exceptions[name]
        try:
            value = self._reader.read(json.loads(self._globals[name]))
        except Exception as error:  # noqa: BLE001  whatever a hostile answer makes of its reader
            raise self._peer_exited(f"no value of the form agreed on: {error}") from None
        if isinstance(value, Handle):
            self._name(value, name)
            if _is_class_name(name) and not name.isupper():
                self._built.add(value._Handle__number)
        return value

    def _name(self, handle, name):
        self._names[handle._Handle__number] = name

    def record_text(self, value):
        """Keep a text that may be the solution's, or have some of it."""
        if isinstance(value, str) and value.strip():
            self.texts.add(value)
        return value

    def evaluate_apart(self, text):
        """What Python makes of a text that names nothing of the solution, in a fresh process: plain data."""
        apart = self._evaluator()
        apart.begin(self._reader.case)
        try:
            value = apart.ask("eval", text)
        finally:
            self.refused = self.refused or apart.refused
        if isinstance(value, Handle):
            raise self.reject("eval of a text")
        return value

    def begin(self, case):
        """A new test: what another has passed to the solution is no longer there to be called."""
        self._functions.clear()
        self._iterators.clear()
        self._changes.clear()
        self._copies.clear()
        self._borrowed.clear()
        self._names.clear()
        self._built.clear()
        self.texts.clear()
        self._reader.case = case
        self.refused = ""

    def enter(self, namespace):
        """Functions with these global names are the test's."""
        self._namespace = namespace

    @property
    def vector(self):
        """Whether the test uses arrays and speaks of nothing empty."""
        return self._reader.case.vector

    @property
    def operation(self):
        """What the solution is asked for at this moment."""
        return self._asked[-1] if self._asked else ""

    def reject(self, what):
        """The exception to raise; the test has failed even if it catches it."""
        return self.reject_test(f"{what} of what the solution gave back: only plain data has it")

    def reject_test(self, why):
        """As `reject`, for another reason."""
        self.refused = self.refused or why
        return ValueRejected(self.refused)

    def borrow(self, operation, owner, key):
        """The attribute or the item of an object of the solution's. A container arrives as a copy; what the test does
        to the copy, the solution's own is brought to: ``node.children.append(x)``."""
        if (
            operation == "getitem"
            and owner._Handle__number not in self._built
            and key not in (self.copy_of(owner) or ())
        ):
            raise self.reject("[] with a key that is none of its own,")
        value = self.ask(operation, owner, key)
        if isinstance(value, Handle):
            if self._is_plain_access(operation, owner, key):
                raise self.reject(f".{key}()")
            self._name(value, key)
        if isinstance(value, CONTAINERS):
            sent = encode(value, self.refer)
            self._borrowed.append(types.SimpleNamespace(value=value, sent=sent, source=(operation, owner, key)))
            del self._borrowed[:-MAX_BORROWED]
        return value

    def _is_plain_access(self, operation, owner, key):
        """Whether an object that a function gave back is asked for a method of plain data's: ``f(1).isupper()``. An own
        class may have such methods, so objects that the test has had made are left out."""
        if operation != "getattr" or owner._Handle__number in self._built:
            return False
        return key in (_OF_TEXTS if self._reader.case.arrays else PLAIN_METHODS)

    def give_back(self):
        """Bring the solution's containers into the state in which the test has left its copies of them."""
        borrowed, self._borrowed = self._borrowed, []
        for one in borrowed:
            now = encode(one.value, self.refer)
            if now != one.sent:
                self.ask("replace", *one.source, one.value)
                one.sent = now
            if sys.getrefcount(one.value) > _NOBODY_ELSES:
                self._borrowed.append(one)

    def ask(self, operation, *args, **kwargs):
        if self._borrowed:
            self.give_back()
        if operation not in ("len", "list"):
            self._copies.clear()
        self._asked.append(operation)
        try:
            value = super().ask(operation, *args, **kwargs)
        finally:
            self._asked.pop()
        if operation == "call" and isinstance(value, Handle):
            name = self._names.get(args[0]._Handle__number, "")
            if _is_class_name(name) or name in self._reader.case.makers:
                self._built.add(value._Handle__number)
        return value

    def copy_of(self, handle):
        """A list of the items of a container of the solution's, the same one until the solution is asked for something
        else; None if it is no container."""
        number = handle._Handle__number
        if number not in self._copies:
            items = self.ask("list", handle, LONGEST_COPY)
            if items is not None and type(items) is not list:
                raise self.reject("a copy")
            self._copies[number] = items
        return self._copies[number]

    def changed(self, mine, state):
        """Held back till the statement is over: ``f(values) == sorted(values)`` must not pass when `f` clears them, nor
        ``list(f(values)) == sorted(values)``, which asks the solution twice."""
        frames = list(self._frames_of_the_test(sys._getframe()))
        self._changes[id(mine)] = types.SimpleNamespace(mine=mine, state=state, frames=frames)

    def latest(self, value):
        """The solution sees what it has done to a container already, in one statement too."""
        change = self._changes.get(id(value))
        return value if change is None else change.state

    def apply_changes(self):
        """Bring the test's containers into the state in which the solution has left them. Called where a statement of
        the test begins; what was changed in a statement that is not over, in a function that calls this one, stays."""
        if self._borrowed:
            self.give_back()
        if not self._changes:
            return
        here, *callers = self._frames_of_the_test(sys._getframe())
        for key, change in list(self._changes.items()):
            if next((frame for frame in change.frames if frame is here or frame in callers), here) is here:
                del self._changes[key]
                update(change.mine, change.state)

    def _frames_of_the_test(self, frame):
        """Those among the callers of `frame` that run the test's own text, the innermost first."""
        while frame is not None:
            if frame.f_globals is self._namespace:
                yield frame
            frame = frame.f_back

    def refer(self, value):
        if isinstance(value, Handle):
            return ["solution", value._Handle__number]
        if isinstance(value, Iterator):
            self._numbers += 1
            self._iterators[self._numbers] = value
            return ["iterator", self._numbers]
        path = _path_of(value)
        if path is not None:
            return ["library", *path]
        if not self._is_of_the_test(value):
            raise self.reject_test(f"a {type(value).__name__} of the test's cannot be passed to the solution")
        self._numbers += 1
        self._functions[self._numbers] = value
        return ["judge", self._numbers]

    def resolve(self, data):
        """A handle; or a function of the test's that the solution gives back, which it may not pass to another."""
        side, number = data
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is no number of an object")
        if side == "judge":
            if self.calling or not isinstance(self._functions[number], types.FunctionType):
                raise ValueError("a function of the test's comes back where none may")
            return self._functions[number]
        if side in ("iterator", "generator"):
            kind = Stream if side == "iterator" else Generated
            return self._streams.setdefault(number, kind(self, number))
        if side != "solution":
            raise ValueError(f"{side!r} is no kind of value")
        return self._handles.setdefault(number, Handle(self, number))

    def perform(self, operation, args, kwargs):
        """Call a function of the test's, or ask an iterator of it for the next item. An assertion in it that fails is
        not the solution's to catch."""
        number, *rest = args
        try:
            if operation == "next":
                return next_of(self._iterators[number])
            if operation != "call":
                raise ValueError(f"the solution asked the judge for {operation!r}")
            return self._functions[number](*rest, **kwargs)
        except ValueRejected:
            self.gone = True  # the solution waits for an answer
            raise
        except AssertionError as error:
            self.refused = self.refused or f"an assertion in a function of the test's failed: {error}"
            raise

    def exception_class(self, name):
        return self._exceptions.get(name) or super().exception_class(name)

    def printed(self, text):
        """A test that has put something in place of stdout finds it there; else it goes nowhere."""
        sys.stdout.write(text)

    def _arguments(self, request):
        self.calling = True
        try:
            return super()._arguments(request)
        finally:
            self.calling = False

    def _result(self, mine, after):
        # Not `mine`, whose change is held back.
        return self._reader.read(after)

    def _is_of_the_test(self, value):
        """Whether the solution may call it: a function whose text is the test's, or one bound to plain data of it."""
        kind = type(value)
        if kind is functools._lru_cache_wrapper:
            return self._is_of_the_test(value.__wrapped__)
        if kind is functools.partial:
            return _path_of(value.func) is not None or self._is_of_the_test(value.func)
        if kind is types.MethodType:
            return self._is_of_the_test(value.__func__)
        if kind is types.BuiltinMethodType:
            return type(value.__self__) in CONTAINERS and value.__name__ in _PROVIDED
        return kind is types.FunctionType and value.__globals__ is self._namespace

    def _exception_class(self, names):
        first, *rest = [str(name) for name in names]
        base = next(filter(None, map(self.exception_class, rest)), Exception)
        return type(first, (base,), {})


def _is_class_name(name):
    return name.lstrip("_")[:1].isupper()


def _path_of(value):
    """Where a function or a class of Python's or numpy's is found in the solution's process, which runs its own."""
    of_numpy = type(value).__module__ == "numpy"  # a ufunc, say
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

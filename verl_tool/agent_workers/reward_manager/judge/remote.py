"""Objects of the solution as a test sees them in the judge's process. Sent into the sandbox beside the judge."""

import types
from importlib import import_module

from link import Link, Unsupported

PLAIN = (int, float, complex, str, bytes)


class Proxy:
    """Stands for an object that lives in the solution's process: a function, a class, an instance of one.

    It equals no plain value, whatever the solution's ``__eq__`` says, and is neither ordered against one nor
    subtracted from one (``abs(f(x) - 3.14) < 1e-6``): only plain values can pass such a test.
    """

    __slots__ = ("_link", "_number")

    def __init__(self, link, number):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name):
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name, value):
        self._link.ask("setattr", self, name, value)

    def __delattr__(self, name):
        self._link.ask("delattr", self, name)

    def __call__(self, *args, **kwargs):
        return self._link.ask("call", self, *args, **kwargs)

    def __eq__(self, other):
        if not isinstance(other, Proxy):
            return NotImplemented
        return self is other or bool(self._link.ask("eq", self, other))

    def __hash__(self):
        return int(self._link.ask("hash", self))

    def __bool__(self):
        return bool(self._link.ask("bool", self))

    def __str__(self):
        return str(self._link.ask("str", self))

    def __repr__(self):
        return str(self._link.ask("repr", self))

    def __format__(self, spec):
        return format(str(self), spec)

    def __iter__(self):
        return self._link.ask("iter", self)

    def __instancecheck__(self, instance):
        return isinstance(instance, Proxy) and bool(self._link.ask("isinstance", instance, self))

    def __exit__(self, kind, error, traceback):
        return self._link.ask("exit", self)


def _unary(operation):
    return lambda self, *args: self._link.ask(operation, self, *args)


def _binary(operation, guarded):
    def method(self, other):
        if guarded and isinstance(other, PLAIN):
            return NotImplemented
        return self._link.ask(operation, self, other)

    return method


def _reflected(operation, guarded):
    def method(self, other):
        if guarded and isinstance(other, PLAIN):
            return NotImplemented
        return self._link.ask(operation, other, self)

    return method


for _name in [
    "len",
    "next",
    "int",
    "float",
    "abs",
    "round",
    "reversed",
    "neg",
    "pos",
    "invert",
    "getitem",
    "setitem",
    "delitem",
    "contains",
    "index",
    "enter",
]:
    setattr(Proxy, f"__{_name}__", _unary(_name))
for _name in ["lt", "le", "gt", "ge"]:
    setattr(Proxy, f"__{_name}__", _binary(_name, guarded=True))
for _name in [
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
]:
    _plain = _name.rstrip("_")
    setattr(Proxy, f"__{_plain}__", _binary(_name, guarded=_name == "sub"))
    setattr(Proxy, f"__r{_plain}__", _reflected(_name, guarded=_name == "sub"))


class JudgeLink(Link):
    """The judge's end. `trusted`: modules that a test may have from here instead of from the solution."""

    def __init__(self, socket, trusted):
        super().__init__(socket)
        self._trusted = trusted
        self._proxies = {}
        self._callables = []
        self._exceptions = {}

    def namespace(self, solution):
        """Run the text of the solution and give what a test finds under its global names.

        What the solution has imported from a trusted module is the judge's own; so are the names of builtins, and names
        with two leading underscores (``__builtins__``!).
        """
        found = {}
        for name, kind, value in self.ask("load", solution):
            if not isinstance(name, str) or name.startswith("__") or name in _BUILTINS:
                continue
            if kind == "module":
                module = self._import(value)
                if module is not None:
                    found[name] = module
            elif kind == "import":
                found[name] = self._imported(*value)
            elif kind == "exception":
                found[name] = self._exceptions[name] = self._exception_class(value)
            else:
                found[name] = value
        return found

    def refer(self, value):
        if isinstance(value, Proxy):
            return ["solution", value._number]
        if isinstance(value, (types.GeneratorType, map, filter, zip)):
            return ["list", [self._plain(item) for item in value]]
        if not callable(value):
            raise Unsupported(f"a {type(value).__name__} of the test's cannot be passed to the solution")
        self._callables.append(value)
        return ["judge", len(self._callables) - 1]

    def resolve(self, data):
        side, number = data
        if side == "judge":
            return self._callables[int(number)]
        if side != "solution":
            raise ValueError(f"{side!r} is no kind of value")
        return self._proxies.setdefault(int(number), Proxy(self, int(number)))

    def perform(self, operation, args, kwargs):
        if operation != "call":
            raise Unsupported(f"the solution asked the judge for {operation!r}")
        number, *rest = args
        return self._callables[number](*rest, **kwargs)

    def exception(self, names, message):
        for name in names:
            if name in self._exceptions:
                return self._exceptions[name](message)
        return super().exception(names, message)

    def _plain(self, item):
        from values import encode

        return encode(item, self.refer)

    def _import(self, name):
        if str(name).partition(".")[0] not in self._trusted:
            return None
        try:
            return import_module(name)
        except ImportError:
            return None

    def _imported(self, home, name, value):
        """The judge's own object of that name in a trusted module, else the solution's."""
        found = self._import(home)
        for part in name.split("."):
            found = getattr(found, part, None)
        return value if found is None else found

    def _exception_class(self, names):
        base = self._exceptions.get(names[1]) or type(super().exception(names[1:], ""))
        return type(names[0], (base,), {})


_BUILTINS = frozenset(dir(__import__("builtins")))

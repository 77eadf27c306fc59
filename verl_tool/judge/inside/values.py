"""Values as JSON, between the judge and the solution's process: data only, nothing that runs when it is read.

Sent into the sandbox beside the judge, so the standard library is all it may import. What is no plain value (an
instance of a class of the solution's, a function) goes by reference, which `refer` and `resolve` provide. The judge
reads what a hostile process may have written: each form is checked before anything is made of it, nothing in it is
looked up, and the types that are made are fixed here.
"""

import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable

SMALL = 1 << 53
"""Whole numbers below it travel as JSON numbers, larger ones as hexadecimal text."""
CONTAINERS = (list, dict, set, bytearray, deque)
"""Arguments that a function may change in place; their state after a call travels back."""
LONGEST_RANGE = 1 << 16
"""A longer range is no plain value: ``x in range(10**12)`` would hold for any answer."""
LONGEST_INT = 1 << 18
"""Hexadecimal digits."""
LARGEST_EXPONENT = 10_000
"""Of a Decimal: to make a whole number of one with a larger exponent takes hours."""

_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_VIEWS = {type({}.keys()): "dict_keys", type({}.values()): "dict_values", type({}.items()): "dict_items"}
_HEXADECIMAL: "dict[str, type[bytes] | type[bytearray]]" = {"bytes": bytes, "bytearray": bytearray}
_DATES = ("datetime", "date", "time")
_NAME_OF: "dict[type, str]" = {
    kind: name for table in (_SEQUENCES, _MAPPINGS, _HEXADECIMAL) for name, kind in table.items()
}
_NUMPY_BYTES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
"""Sizes of an element by its kind of dtype; texts (U, S) may have any. An array of objects is no plain value."""
_NUMPY_TEXTS = "US"
_LONGEST_ARRAY = 16 << 20
"""Bytes."""


class ValueRejected(BaseException):
    """The test asks for what no plain data can answer. No test may catch it, so it is no Exception."""


class ValueRecord(tuple):
    """A named tuple's values under their names. No class is made from names that another process chose."""

    _name: str
    _fields: tuple

    def __getattr__(self, name):
        try:
            value = self[self.__dict__["_fields"].index(name)]
        except (KeyError, ValueError):
            raise AttributeError(name) from None
        check_field = getattr(type(value), "_check_field", None)  # of the solution's object, in the judge
        if check_field is not None:
            check_field(value, name)
        return value

    def __repr__(self):
        values = ", ".join(f"{field}={value!r}" for field, value in zip(self._fields, self, strict=True))
        return f"{self._name}({values})"

    def _asdict(self):
        return dict(zip(self._fields, self, strict=True))


def encode(value, refer):
    """`value` as JSON. `refer(value)` gives the JSON of what is no plain value, or raises."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)  # and not `isinstance`, which asks the value's ``__class__``
    if issubclass(kind, (int, float, str)) and not _is_numpy(value):
        return _encode_scalar(value, kind)
    name = _NAME_OF.get(kind)
    if name in _SEQUENCES:
        return [name, [encode(item, refer) for item in value]]
    if name in _MAPPINGS:
        return [name, [[encode(k, refer), encode(v, refer)] for k, v in value.items()]]
    if name in _HEXADECIMAL:
        return [name, kind.hex(value)]
    return _encode_rare(value, kind, refer)


def _encode_scalar(value, kind):
    """A whole number, a float or a string, or the plain part of an instance of a subclass (of an IntEnum, say)."""
    if issubclass(kind, int):
        plain = int.__index__(value)
        return plain if -SMALL < plain < SMALL else ["int", hex(plain)]
    return float.__float__(value) if issubclass(kind, float) else str.__str__(value)


def _encode_rare(value, kind, refer):
    def many(items):
        return [encode(item, refer) for item in items]

    if kind is complex:
        return ["complex", value.real, value.imag]
    if _is(kind, "decimal", "Decimal"):
        return ["Decimal", str(value)]
    if _is(kind, "fractions", "Fraction"):
        return ["Fraction", *many((value.numerator, value.denominator))]
    if kind is range and not value[LONGEST_RANGE:]:
        return ["range", *many((value.start, value.stop, value.step))]
    if _is(kind, "datetime", "timedelta"):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    for name in _DATES:
        if _is(kind, "datetime", name):
            return [name, kind.isoformat(value)]
    if kind in _VIEWS:
        return [_VIEWS[kind], [many(item) if _VIEWS[kind] == "dict_items" else encode(item, refer) for item in value]]
    if kind is deque:
        return ["deque", many(value), value.maxlen]
    if kind is defaultdict:
        return ["defaultdict", [many(item) for item in value.items()]]
    if kind is ValueRecord or (issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)):
        name = value._name if kind is ValueRecord else kind.__name__
        return ["Record", name, list(value._fields), many(tuple(value))]
    if _is_numpy(value) and _is_numpy_data(value.dtype):
        flat = many(value.reshape(-1).tolist())
        return ["numpy", value.dtype.str, list(value.shape), flat, type(value).__name__ == "ndarray"]
    return refer(value)


def _is(kind, home, name):
    """Whether `kind` is a class of a module, which is not imported for it: an import costs milliseconds."""
    module = sys.modules.get(home)
    return module is not None and kind is getattr(module, name, None)


def _is_numpy(value):
    """Whether it is an array or a scalar of numpy, and of no class derived from it; numpy is not imported for it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))


def _is_numpy_data(dtype):
    return dtype.kind in _NUMPY_TEXTS or dtype.itemsize in _NUMPY_BYTES.get(dtype.kind, ())


class ValueReader:
    """Makes values of `encode`'s JSON. `resolve(data)` gives the object of a reference.

    Raises ValueError or TypeError if the data is not of that form.
    """

    def __init__(self, resolve):
        self._resolve = resolve

    def read(self, data):
        """The value."""
        kind = type(data)
        if data is None or kind in (bool, int, str):
            return data
        if kind is float:
            return self.number(data)
        if kind is not list or not data or type(data[0]) is not str:
            raise ValueError(f"{str(data)[:40]!r} is no value")
        name, *rest = data
        read = _READERS.get(name)
        if read is not None:
            return read(self, name, *rest)
        return self._resolve(data)

    def number(self, value):
        """A float. The judge's reader refuses some."""
        return value

    def empty_array(self, array):
        """An array without elements. The judge's reader refuses it."""
        return array

    def array(self, array):
        """What is made of an array with elements, or of a scalar of numpy's as one without sides."""
        return array

    def many(self, items):
        """A list of values."""
        return [self.read(item) for item in _of(list, items)]

    def pairs(self, items):
        """A dictionary."""
        return {self.read(key): self.read(value) for key, value in _of(list, items)}

    def _whole(self, data):
        return _of(int, self.read(data))


def _of(kind, value):
    if type(value) is not kind:
        raise ValueError(f"a {kind.__name__} was due, not {str(value)[:40]!r}")
    return value


def _read_int(reader, name, text):
    if len(_of(str, text)) > LONGEST_INT:
        raise ValueError(f"a whole number of more than {LONGEST_INT} hexadecimal digits")
    return int(text, 16)


def _read_decimal(reader, name, text):
    from decimal import Decimal

    if len(_of(str, text)) > LARGEST_EXPONENT:
        raise ValueError(f"a Decimal of more than {LARGEST_EXPONENT} digits")
    value = Decimal(text)
    if not value.is_finite():
        reader.number(math.nan)
    elif abs(value.adjusted()) > LARGEST_EXPONENT:
        raise ValueError(f"a Decimal with an exponent beyond {LARGEST_EXPONENT}")
    return value


def _read_fraction(reader, name, numerator, denominator):
    from fractions import Fraction

    return Fraction(reader._whole(numerator), reader._whole(denominator))


def _read_date(reader, name, text):
    import datetime

    return getattr(datetime, name).fromisoformat(_of(str, text))


def _read_timedelta(reader, name, *parts):
    from datetime import timedelta

    return timedelta(*(_of(int, part) for part in parts))


def _read_range(reader, name, start, stop, step):
    value = range(*(reader._whole(part) for part in (start, stop, step)))
    if value[LONGEST_RANGE:]:
        raise ValueError(f"a range longer than {LONGEST_RANGE}")
    return value


def _read_record(reader, name, kind, fields, items):
    value = ValueRecord(reader.many(items))
    value._name, value._fields = _of(str, kind), tuple(_of(str, field) for field in _of(list, fields))
    if len(value) != len(value._fields):
        raise ValueError("a named tuple with more or fewer names than values")
    if any(field.startswith("__") for field in value._fields):
        raise ValueError("a name that libraries look for: numpy reads __array_interface__ of any object")
    return value


def _read_numpy(reader, name, dtype, shape, flat, is_array):
    import numpy  # only where the solution has used it: importing it costs a tenth of a second

    order, kind, size = _of(str, dtype)[:1], dtype[1:2], dtype[2:]
    if order not in "<>|" or not (size.isascii() and size.isdigit() and len(size) < 8):
        raise ValueError(f"dtype {dtype[:20]!r}")
    width = int(size) * (4 if kind == "U" else 1)
    if kind not in _NUMPY_TEXTS and width not in _NUMPY_BYTES.get(kind, ()):
        raise ValueError(f"dtype {dtype[:20]!r}")
    items = reader.many(flat)
    sides = [_of(int, side) for side in _of(list, shape)]
    if min(sides, default=0) < 0 or math.prod(sides) != len(items) or width * len(items) > _LONGEST_ARRAY:
        raise ValueError(f"an array of shape {str(sides)[:40]} with {len(items)} elements")
    array = numpy.array(items, dtype=numpy.dtype(dtype)).reshape(sides)
    if kind in "fc" and not numpy.isfinite(array).all():  # made of a text, or too large for the dtype
        reader.number(math.nan)
    if not array.size:
        return reader.empty_array(array)
    array = reader.array(array)
    return array if is_array is True else array[()]


_READERS: "dict[str, Callable]" = {
    **{name: lambda reader, name, items: _SEQUENCES[name](reader.many(items)) for name in _SEQUENCES},
    **{name: lambda reader, name, items: _MAPPINGS[name](reader.pairs(items)) for name in _MAPPINGS},
    **{name: lambda reader, name, text: _HEXADECIMAL[name].fromhex(_of(str, text)) for name in _HEXADECIMAL},
    **dict.fromkeys(_DATES, _read_date),
    "int": _read_int,
    "complex": lambda reader, name, *parts: complex(*(reader.number(_of(float, part)) for part in parts)),
    "Decimal": _read_decimal,
    "Fraction": _read_fraction,
    "range": _read_range,
    "timedelta": _read_timedelta,
    "dict_keys": lambda reader, name, items: dict.fromkeys(reader.many(items)).keys(),
    "dict_values": lambda reader, name, items: dict(enumerate(reader.many(items))).values(),
    "dict_items": lambda reader, name, items: reader.pairs(items).items(),
    "deque": lambda reader, name, items, longest: deque(
        reader.many(items), None if longest is None else _of(int, longest)
    ),
    "defaultdict": lambda reader, name, items: defaultdict(None, reader.pairs(items)),
    "Record": _read_record,
    "numpy": _read_numpy,
}

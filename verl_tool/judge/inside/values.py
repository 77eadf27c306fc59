"""Encode values as JSON between the judge and the solution's process. Reading them runs no code of theirs.

Sent into the sandbox with the judge, so it may import only the standard library. Values that are not plain (a function,
an instance of a class of the solution) are sent by reference, with `refer` and `resolve`. The judge reads messages that
a hostile process may have written: each form is checked before a value is made, no name in it is looked up, and only
the types below are made.
"""

import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable

JSON_INT_LIMIT = 1 << 53
"""Smaller integers are JSON numbers, larger ones are hexadecimal text."""
CONTAINERS = (list, dict, set, bytearray, deque)
"""Types of arguments that a function may change in place. Their state after a call is sent back."""
MAX_RANGE_ITEMS = 1 << 16
"""A longer range is not a plain value: ``x in range(10**12)`` would hold for any answer."""
MAX_INT_DIGITS = 1 << 18
"""Maximum number of hexadecimal digits."""
MAX_EXPONENT = 10_000
"""Maximum exponent of a Decimal. Converting a larger one to an integer takes hours."""

_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_VIEWS = {type({}.keys()): "dict_keys", type({}.values()): "dict_values", type({}.items()): "dict_items"}
_HEXADECIMAL: "dict[str, type[bytes] | type[bytearray]]" = {"bytes": bytes, "bytearray": bytearray}
_DATES = ("datetime", "date", "time")
_NAME_OF: "dict[type, str]" = {
    kind: name for table in (_SEQUENCES, _MAPPINGS, _HEXADECIMAL) for name, kind in table.items()
}
_NUMPY_BYTES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
"""Sizes of an element by its kind of dtype. Text (U, S) may have any size. An array of objects is not a plain value."""
_NUMPY_TEXTS = "US"
_MAX_ARRAY_BYTES = 16 << 20
"""Maximum size of an array."""


class ValueRejected(BaseException):
    """The test needs more than plain data. It is not an Exception, so that no test catches it."""


class ValueRecord(tuple):
    """The values of a named tuple with their names. No class is made from names that another process chose."""

    _name: str
    _fields: tuple

    def __getattr__(self, name):
        try:
            value = self[self.__dict__["_fields"].index(name)]
        except (KeyError, ValueError):
            raise AttributeError(name) from None
        check_field = getattr(type(value), "_check_field", None)  # of a `Handle` in the judge
        if check_field is not None:
            check_field(value, name)
        return value

    def __repr__(self):
        values = ", ".join(f"{field}={value!r}" for field, value in zip(self._fields, self, strict=True))
        return f"{self._name}({values})"

    def _asdict(self):
        return dict(zip(self._fields, self, strict=True))


def encode(value, refer):
    """Encode `value` as JSON. `refer(value)` returns the JSON of a value that is not plain, or raises."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)  # not `isinstance`, which reads ``__class__`` of the value
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
    """Encode an integer, a float or a string. Of an instance of a subclass (an IntEnum), only the plain part."""
    if issubclass(kind, int):
        plain = int.__index__(value)
        return plain if -JSON_INT_LIMIT < plain < JSON_INT_LIMIT else ["int", hex(plain)]
    return float.__float__(value) if issubclass(kind, float) else str.__str__(value)


def _encode_rare(value, kind, refer):
    def many(items):
        return [encode(item, refer) for item in items]

    if kind is complex:
        return ["complex", value.real, value.imag]
    if _is_class(kind, "decimal", "Decimal"):
        return ["Decimal", str(value)]
    if _is_class(kind, "fractions", "Fraction"):
        return ["Fraction", *many((value.numerator, value.denominator))]
    if kind is range and not value[MAX_RANGE_ITEMS:]:
        return ["range", *many((value.start, value.stop, value.step))]
    if _is_class(kind, "datetime", "timedelta"):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    for name in _DATES:
        if _is_class(kind, "datetime", name):
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


def _is_class(kind, home, name):
    """Whether `kind` is that class of a module. The module is not imported for it, which costs milliseconds."""
    module = sys.modules.get(home)
    return module is not None and kind is getattr(module, name, None)


def _is_numpy(value):
    """Whether it is an array or a scalar of numpy, and not of a derived class. numpy is not imported for it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))


def _is_numpy_data(dtype):
    return dtype.kind in _NUMPY_TEXTS or dtype.itemsize in _NUMPY_BYTES.get(dtype.kind, ())


class ValueReader:
    """Decodes the JSON of `encode`. `resolve(data)` returns the object of a reference.

    Raises ValueError or TypeError if the data has another form.
    """

    def __init__(self, resolve):
        self._resolve = resolve

    def read(self, data):
        """Decode a value."""
        kind = type(data)
        if data is None or kind in (bool, int, str):
            return data
        if kind is float:
            return self.number(data)
        if kind is not list or not data or type(data[0]) is not str:
            raise ValueError(f"{str(data)[:40]!r} is not a value")
        name, *rest = data
        read = _READERS.get(name)
        if read is not None:
            return read(self, name, *rest)
        return self._resolve(data)

    def number(self, value):
        """Return a float. The reader of the judge rejects some."""
        return value

    def empty_array(self, array):
        """Return an array without elements. The reader of the judge may reject it."""
        return array

    def array(self, array):
        """Convert an array with elements, or a scalar as an array without dimensions."""
        return array

    def many(self, items):
        """Decode a list of values."""
        return [self.read(item) for item in _check_type(list, items)]

    def pairs(self, items):
        """Decode a dictionary."""
        return {self.read(key): self.read(value) for key, value in _check_type(list, items)}

    def _whole(self, data):
        return _check_type(int, self.read(data))


def _check_type(kind, value):
    if type(value) is not kind:
        raise ValueError(f"expected a {kind.__name__}, not {str(value)[:40]!r}")
    return value


def _read_int(reader, name, text):
    if len(_check_type(str, text)) > MAX_INT_DIGITS:
        raise ValueError(f"an integer of more than {MAX_INT_DIGITS} hexadecimal digits")
    return int(text, 16)


def _read_decimal(reader, name, text):
    from decimal import Decimal

    if len(_check_type(str, text)) > MAX_EXPONENT:
        raise ValueError(f"a Decimal of more than {MAX_EXPONENT} digits")
    value = Decimal(text)
    if not value.is_finite():
        reader.number(math.nan)
    elif abs(value.adjusted()) > MAX_EXPONENT:
        raise ValueError(f"a Decimal with an exponent beyond {MAX_EXPONENT}")
    return value


def _read_fraction(reader, name, numerator, denominator):
    from fractions import Fraction

    return Fraction(reader._whole(numerator), reader._whole(denominator))


def _read_date(reader, name, text):
    import datetime

    return getattr(datetime, name).fromisoformat(_check_type(str, text))


def _read_timedelta(reader, name, *parts):
    from datetime import timedelta

    return timedelta(*(_check_type(int, part) for part in parts))


def _read_range(reader, name, start, stop, step):
    value = range(*(reader._whole(part) for part in (start, stop, step)))
    if value[MAX_RANGE_ITEMS:]:
        raise ValueError(f"a range longer than {MAX_RANGE_ITEMS}")
    return value


def _read_record(reader, name, kind, fields, items):
    value = ValueRecord(reader.many(items))
    value._name = _check_type(str, kind)
    value._fields = tuple(_check_type(str, field) for field in _check_type(list, fields))
    if len(value) != len(value._fields):
        raise ValueError("a named tuple whose names and values differ in number")
    if any(field.startswith("__") for field in value._fields):
        raise ValueError("a field with a name that libraries look for: numpy reads __array_interface__ of any object")
    return value


def _read_numpy(reader, name, dtype, shape, flat, is_array):
    import numpy  # imported only if the solution has used it: it costs a tenth of a second

    order, kind, size = _check_type(str, dtype)[:1], dtype[1:2], dtype[2:]
    if order not in "<>|" or not (size.isascii() and size.isdigit() and len(size) < 8):
        raise ValueError(f"dtype {dtype[:20]!r}")
    width = int(size) * (4 if kind == "U" else 1)
    if kind not in _NUMPY_TEXTS and width not in _NUMPY_BYTES.get(kind, ()):
        raise ValueError(f"dtype {dtype[:20]!r}")
    items = reader.many(flat)
    sides = [_check_type(int, side) for side in _check_type(list, shape)]
    if min(sides, default=0) < 0 or math.prod(sides) != len(items) or width * len(items) > _MAX_ARRAY_BYTES:
        raise ValueError(f"an array of shape {str(sides)[:40]} with {len(items)} elements")
    array = numpy.array(items, dtype=numpy.dtype(dtype)).reshape(sides)
    if kind in "fc" and not numpy.isfinite(array).all():  # from text, or too large for the dtype
        reader.number(math.nan)
    if not array.size:
        return reader.empty_array(array)
    array = reader.array(array)
    return array if is_array is True else array[()]


_READERS: "dict[str, Callable]" = {
    **{name: lambda reader, name, items: _SEQUENCES[name](reader.many(items)) for name in _SEQUENCES},
    **{name: lambda reader, name, items: _MAPPINGS[name](reader.pairs(items)) for name in _MAPPINGS},
    **{name: lambda reader, name, text: _HEXADECIMAL[name].fromhex(_check_type(str, text)) for name in _HEXADECIMAL},
    **dict.fromkeys(_DATES, _read_date),
    "int": _read_int,
    "complex": lambda reader, name, *parts: complex(*(reader.number(_check_type(float, part)) for part in parts)),
    "Decimal": _read_decimal,
    "Fraction": _read_fraction,
    "range": _read_range,
    "timedelta": _read_timedelta,
    "dict_keys": lambda reader, name, items: dict.fromkeys(reader.many(items)).keys(),
    "dict_values": lambda reader, name, items: dict(enumerate(reader.many(items))).values(),
    "dict_items": lambda reader, name, items: reader.pairs(items).items(),
    "deque": lambda reader, name, items, maxlen: deque(
        reader.many(items), None if maxlen is None else _check_type(int, maxlen)
    ),
    "defaultdict": lambda reader, name, items: defaultdict(None, reader.pairs(items)),
    "Record": _read_record,
    "numpy": _read_numpy,
}

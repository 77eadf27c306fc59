"""Values as JSON, between the judge and the solution's process: data only, nothing that runs when it is read.

Sent into the sandbox beside the judge, so the standard library is all it may import. What is no plain value (an
instance of a class of the solution's, a function) goes by reference, which `refer` and `resolve` provide.
"""

import datetime
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

SMALL = 1 << 53
"""Whole numbers below it travel as JSON numbers, larger ones as hexadecimal text."""
CONTAINERS = (list, dict, set, bytearray, deque)
"""Arguments that a function may change in place; their state after a call travels back."""

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Any] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_TEXTS: dict[str, tuple[Any, Any, Any]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "complex": (complex, repr, complex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}
_NAME_OF: dict[type, str] = {kind: name for table in (_SEQUENCES, _MAPPINGS) for name, kind in table.items()}
_NAME_OF.update({entry[0]: name for name, entry in _TEXTS.items()})
_NUMPY_KINDS = "biufcSU"
"""Kinds of dtype whose elements are plain values; an array of objects is none."""


def encode(value, refer):
    """`value` as JSON. `refer(value)` gives the JSON of what is no plain value, or raises."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, (int, float, str)) and not _is_numpy(value):
        return _encode_scalar(value)
    kind = type(value)
    name = _NAME_OF.get(kind)
    if name in _SEQUENCES:
        return [name, [encode(item, refer) for item in value]]
    if name in _MAPPINGS:
        return [name, [[encode(k, refer), encode(v, refer)] for k, v in value.items()]]
    if name is not None:
        return [name, _TEXTS[name][1](value)]
    return _encode_rare(value, kind, refer)


def decode(data, resolve):
    """The value of `encode`'s JSON; `resolve(data)` gives the object of a reference.

    Raises ValueError, TypeError or KeyError if `data` is not of that form.
    """
    if not isinstance(data, list):
        return data
    name, *rest = data
    if name in _SEQUENCES:
        return _SEQUENCES[name]([decode(item, resolve) for item in rest[0]])
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(k, resolve): decode(v, resolve) for k, v in rest[0]})
    if name in _TEXTS:
        return _TEXTS[name][2](rest[0])
    if name in _RARE:
        return _RARE[name](*rest, lambda item: decode(item, resolve))
    return resolve(data)


def _encode_scalar(value):
    """A whole number, a float or a string, or the plain part of an instance of a subclass (of an IntEnum, say)."""
    if isinstance(value, int):
        plain = int.__index__(value)
        return plain if -SMALL < plain < SMALL else ["int", hex(plain)]
    return float.__float__(value) if isinstance(value, float) else str.__str__(value)


def _encode_rare(value, kind, refer):
    if kind is range:
        return ["range", value.start, value.stop, value.step]
    if kind is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if kind is deque:
        return ["deque", [encode(item, refer) for item in value], value.maxlen]
    if kind is defaultdict:
        return ["defaultdict", [[encode(k, refer), encode(v, refer)] for k, v in value.items()]]
    if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        return ["namedtuple", kind.__name__, list(kind._fields), [encode(item, refer) for item in tuple(value)]]
    if _is_numpy(value) and value.dtype.kind in _NUMPY_KINDS:
        flat = [encode(item, refer) for item in value.reshape(-1).tolist()]
        return ["numpy", value.dtype.str, list(value.shape), flat, type(value).__name__ == "ndarray"]
    return refer(value)


def _is_numpy(value):
    """Whether it is an array or a scalar of numpy; numpy is not imported for it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _numpy(dtype, shape, flat, is_array, decode_item):
    import numpy  # only where the solution has used it: importing it costs a tenth of a second

    array = numpy.array([decode_item(item) for item in flat], dtype=numpy.dtype(dtype)).reshape(shape)
    return array if is_array else array[()]


_RARE: dict[str, Any] = {
    "int": lambda text, _: int(text, 16),
    "range": lambda start, stop, step, _: range(start, stop, step),
    "timedelta": lambda days, seconds, microseconds, _: datetime.timedelta(days, seconds, microseconds),
    "deque": lambda items, maxlen, decode_item: deque(map(decode_item, items), maxlen),
    "defaultdict": lambda items, decode_item: defaultdict(None, {decode_item(k): decode_item(v) for k, v in items}),
    "namedtuple": lambda name, fields, items, decode_item: namedtuple(name, fields)(*map(decode_item, items)),
    "numpy": _numpy,
}

"""Requests and answers between the judge and the solution's process, over one socket, nested as calls are.

Either side may ask; while it waits for its answer it performs what the other side asks (a function that a test passed
to the solution, say). Sent into the sandbox beside the judge: the standard library and `values` are all it may import.
"""

import builtins
import contextlib
import json
import math
import struct
from collections import deque

from values import CONTAINERS, ValueReader, encode

LONGEST_MESSAGE = 16 << 20
"""Bytes. A longer message is not read."""
LONGEST_TEXT = 500
"""Characters of an exception's message."""
DEEPEST = 50
"""Requests within requests."""
LINE = "__judge_line__"
"""Attribute of an exception of the other side's: the line of the solution that raised it."""
MAX_LINES = 1_000_000
_HEADER = struct.Struct(">I")


class PeerExitedError(BaseException):
    """The other process has ended, or has sent what is no message. No test may catch it, so it is no Exception."""


_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)
EXCEPTIONS: "dict[str, type[BaseException]]" = {
    kind.__name__: kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, (Exception, SystemExit)) and not issubclass(kind, _ENDS_OF_LOOPS)
}
"""Python's own exceptions by name. None that ends a loop: ``all(map(f, xs))`` holds for a function that raises
StopIteration."""


class ProcessLink:
    """One end. A subclass says what it refers to, what it performs, and which exceptions it knows by name."""

    def __init__(self, socket):
        self._socket = socket
        self._reader = ValueReader(self.resolve)
        self._depth = 0
        self.gone = False
        """A test may have caught `PeerExitedError`, with a bare ``except``; this tells of it still."""

    def refer(self, value):
        """The JSON that stands for an object of this side's, or of the other's that is held here."""
        raise NotImplementedError

    def resolve(self, data):
        """The object that such JSON stands for."""
        raise NotImplementedError

    def perform(self, operation, args, kwargs):
        """Do what the other side asks."""
        raise NotImplementedError

    def exception_class(self, name):
        """The class of exceptions that is known here by that name, if one is."""
        return EXCEPTIONS.get(name)

    def printed(self, text):
        """The other side has printed it."""

    def changed(self, mine, state):
        """The other side has left its copy of a container of this side's in another state."""
        update(mine, state)

    def latest(self, value):
        """What the other side is sent for an argument."""
        return value

    def ask(self, operation, *args, **kwargs):
        """What the other side answers. Raises what it raised; `PeerExitedError` if it ended."""
        sent = [encode(self.latest(arg), self.refer) for arg in args]
        named = {name: encode(self.latest(arg), self.refer) for name, arg in kwargs.items()}
        self._send_text(json.dumps({"operation": operation, "args": sent, "kwargs": named}))
        answer = self._wait()
        try:
            return self._accept(answer, (*args, *kwargs.values()), (*sent, *named.values()))
        except Exception as error:  # noqa: BLE001  whatever a hostile answer makes of its reader
            raise self._peer_exited(f"no answer of the form agreed on: {error}") from None

    def serve(self):
        """Perform what is asked until the other side closes."""
        while True:
            self._answer(self._receive())

    def _wait(self):
        """The answer; requests that come before it are performed."""
        while True:
            message = self._receive()
            if "operation" not in message:
                break
            self._answer(message)
        if type(message.get("printed")) is str:
            self.printed(message["printed"])
        if "error" in message:
            error = self._error(message["error"])
            if type(message.get("line")) is int and 0 < message["line"] < MAX_LINES:
                setattr(error, LINE, message["line"])
            raise error
        return message

    def _error(self, error):
        """The exception that such an error tells of: of the first of its classes that is known here, made of the
        arguments if that gives the same message."""
        try:
            names, text, args, attributes = error
            own = {name: value for name, value in _PLAIN.pairs(attributes).items() if not name.startswith("__")}
            names, text, args = [str(name) for name in names], str(text)[:LONGEST_TEXT], _PLAIN.many(args)
            candidates = (_made(self.exception_class(name), text, args) for name in names)
            made = next(filter(None, candidates), None) or Exception(text)
            vars(made).update(own)
            return made
        except Exception:  # noqa: BLE001  whatever a hostile answer makes of its reader
            raise self._peer_exited("an error of another form than the one agreed on") from None

    def _accept(self, answer, args, sent):
        """`answer` tells the value, or which argument is the value, and the state of arguments that were changed."""
        for arg, before, after in zip(args, sent, answer["after"], strict=True):
            if after is not None and after != before:
                self.changed(arg, self._state(arg, after))
        if answer.get("same") is None:
            return self._reader.read(answer["value"])
        same = answer["same"]
        return self._result(args[same], answer["after"][same])

    def _state(self, mine, after):
        state = self._reader.read(after)
        if not isinstance(mine, CONTAINERS) or type(state) is not type(mine):
            raise ValueError(f"a {type(mine).__name__} became a {type(state).__name__}")
        return state

    def _result(self, mine, after):
        """The value of an operation that gave back its argument."""
        return mine

    def _answer(self, request):
        self._depth += 1
        try:
            if self._depth > DEEPEST:
                raise RecursionError(f"more than {DEEPEST} requests within requests")
            args, kwargs = self._arguments(request)
            value = self.perform(request["operation"], args, kwargs)
            copied = self._copied(request, (*args, *kwargs.values()))
            same = next((i for i, arg in enumerate(copied) if arg is value and arg is not None), None)
            after = [None if arg is None else encode(arg, self.refer) for arg in copied]
            value = None if same is not None else encode(value, self.refer)
            text = json.dumps({"value": value, "same": same, "after": after, "printed": self.take_printed()})
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the code raises is the asker's to know
            failure = {"error": _description(error), "line": self.line_of(error), "printed": self.take_printed()}
            text = json.dumps(failure)
        finally:
            self._depth -= 1
        self._send_text(text)

    def take_printed(self):
        """What was printed here since it was asked for last; the other side is told."""
        return ""

    def line_of(self, error):
        """The line that an exception of this side's is told to come from; None if that is not the other's to know."""

    def _copied(self, request, values):
        """The arguments that are copies of the other side's containers; None for each other one."""
        sent = (*request["args"], *request["kwargs"].values())
        return [
            value if isinstance(value, CONTAINERS) and data[0] != "solution" else None
            for data, value in zip(sent, values, strict=True)
        ]

    def _arguments(self, request):
        read = self._reader.read
        return [read(arg) for arg in request["args"]], {name: read(arg) for name, arg in request["kwargs"].items()}

    def _peer_exited(self, why):
        self.gone = True
        return PeerExitedError(why)

    def _send_text(self, text):
        body = text.encode()
        try:
            self._socket.sendall(_HEADER.pack(len(body)) + body)
        except OSError as error:
            raise self._peer_exited(str(error)) from None

    def _receive(self):
        (length,) = _HEADER.unpack(self._read(_HEADER.size))
        if length > LONGEST_MESSAGE:
            raise self._peer_exited(f"a message of {length} bytes; at most {LONGEST_MESSAGE} are read")
        try:
            message = json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise self._peer_exited(f"a message that is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise self._peer_exited("a message that is no object")
        return message

    def _read(self, length):
        parts = []
        while length:
            try:
                part = self._socket.recv(min(length, 1 << 20))
            except OSError as error:
                raise self._peer_exited(str(error)) from None
            if not part:
                raise self._peer_exited("the process has ended")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def _description(error):
    """Names of an exception's classes, nearest first, its message, and of its arguments and attributes what is short
    and plain data."""
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  an exception class of the solution's may fail at this too
        text = ""
    args = _short(error.args)
    attributes = [[name, _short([value])] for name, value in vars(error).items() if type(name) is str]
    return [names, text[:LONGEST_TEXT], args or [], [[name, value[0]] for name, value in attributes if value]]


def _short(values):
    """JSON of each, or None if one is no plain data or all together are long."""
    try:
        encoded = [encode(value, _reject) for value in values]
        _PLAIN.many(encoded)
    except Exception:  # noqa: BLE001  objects of the solution's
        return None
    return encoded if len(str(encoded)) <= LONGEST_TEXT else None


def _made(kind, message, args):
    """An exception of `kind`; None if there is no such class or it is made of more than a message."""
    if kind is None:
        return None
    with contextlib.suppress(Exception):
        made = kind(*args)
        if str(made) == message:
            return made
    with contextlib.suppress(TypeError):
        return kind(message)
    return None


def _reject(value):
    raise ValueError(f"{str(value)[:40]!r} is no plain data")


class _PlainReader(ValueReader):
    """Reads what belongs to an exception: no references, and no number that is none."""

    def number(self, value):
        if not math.isfinite(value):
            _reject(value)
        return value

    def empty_array(self, array):
        return _reject(array)


_PLAIN = _PlainReader(_reject)


def next_of(iterator):
    """Whether there is one more, and it. No StopIteration travels."""
    for value in iterator:
        return [True, value]
    return [False, None]


def update(mine, state):
    """Bring a container of this side's into the state that the other side left its copy in."""
    if isinstance(mine, (list, bytearray)):
        mine[:] = state
    else:
        mine.clear()
        (mine.extend if isinstance(mine, deque) else mine.update)(state)

"""Requests and answers between the judge and the solution's process over one socket, nested like calls.

Either side may send requests. While it waits for its answer, it performs the requests of the other side, such as a call
of a function that a test passed to the solution. Sent into the sandbox with the judge, so it may import only the
standard library and `values`.
"""

import builtins
import contextlib
import json
import math
import struct
from collections import deque

from values import CONTAINERS, ValueReader, encode

MAX_MESSAGE_BYTES = 16 << 20
"""A longer message is not read."""
MAX_TEXT_CHARS = 500
"""Maximum length of an exception's message."""
MAX_DEPTH = 50
"""Maximum number of requests within requests."""
LINE = "__judge_line__"
"""Attribute of an exception of the other side's: the line of the solution that raised it."""
MAX_LINE_NUMBER = 1_000_000
_HEADER = struct.Struct(">I")


class PeerExitedError(BaseException):
    """The other process has exited or sent an invalid message. It is not an Exception, so that no test catches it."""


_LOOP_ENDS = (StopIteration, StopAsyncIteration)
EXCEPTIONS: "dict[str, type[BaseException]]" = {
    kind.__name__: kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, (Exception, SystemExit)) and not issubclass(kind, _LOOP_ENDS)
}
"""Python's own exceptions, except those that end a loop: with StopIteration ``all(map(f, xs))`` would hold."""


class ProcessLink:
    """One end of the connection. A subclass encodes references, performs requests and knows exceptions by name."""

    def __init__(self, socket):
        self._socket = socket
        self._reader = ValueReader(self.resolve)
        self._depth = 0
        self.peer_exited = False
        """Whether `PeerExitedError` was raised: a test may have caught it with a bare ``except``."""

    def refer(self, value):
        """Return the JSON of a reference to an object of this side, or to one of the other side that is stored here."""
        raise NotImplementedError

    def resolve(self, data):
        """Return the object of such a reference."""
        raise NotImplementedError

    def perform(self, operation, args, kwargs):
        """Perform a request of the other side."""
        raise NotImplementedError

    def find_exception_class(self, name):
        """Return the class of exceptions with this name, or None if it is unknown here."""
        return EXCEPTIONS.get(name)

    def receive_output(self, text):
        """Handle the text that the other side has printed."""

    def handle_change(self, container, state):
        """Handle the new state of a container of this side's, of which the other side changed its copy."""
        update(container, state)

    def get_current(self, value):
        """Return the value to send for an argument."""
        return value

    def ask(self, operation, *args, **kwargs):
        """Send a request and return the answer. Raises what the other side raised; `PeerExitedError` if it exited."""
        sent = [encode(self.get_current(arg), self.refer) for arg in args]
        named = {name: encode(self.get_current(arg), self.refer) for name, arg in kwargs.items()}
        self._send_text(json.dumps({"operation": operation, "args": sent, "kwargs": named}))
        answer = self._await_answer()
        try:
            return self._read_answer(answer, (*args, *kwargs.values()), (*sent, *named.values()))
        except Exception as error:  # noqa: BLE001  a hostile answer may raise anything
            raise self._record_exit(f"an invalid answer: {error}") from None

    def serve(self):
        """Perform requests until the other side closes the connection."""
        while True:
            self._answer(self._receive())

    def _await_answer(self):
        """Return the answer. Requests that arrive before it are performed."""
        while True:
            message = self._receive()
            if "operation" not in message:
                break
            self._answer(message)
        if type(message.get("printed")) is str:
            self.receive_output(message["printed"])
        if "error" in message:
            error = self._read_error(message["error"])
            if type(message.get("line")) is int and 0 < message["line"] < MAX_LINE_NUMBER:
                setattr(error, LINE, message["line"])
            raise error
        return message

    def _read_error(self, error):
        """Make the exception of the first of its classes that is known here, with its arguments if these fit."""
        try:
            names, text, args, attributes = error
            own = {name: value for name, value in _PLAIN.pairs(attributes).items() if not name.startswith("__")}
            names, text, args = [str(name) for name in names], str(text)[:MAX_TEXT_CHARS], _PLAIN.many(args)
            candidates = (_make_error(self.find_exception_class(name), text, args) for name in names)
            made = next(filter(None, candidates), None) or Exception(text)
            vars(made).update(own)
            return made
        except Exception:  # noqa: BLE001  a hostile answer may raise anything
            raise self._record_exit("an invalid error") from None

    def _read_answer(self, answer, args, sent):
        """`answer` has the value, or the index of the argument that is it, and the state of changed arguments."""
        for arg, before, after in zip(args, sent, answer["after"], strict=True):
            if after is not None and after != before:
                self.handle_change(arg, self._read_state(arg, after))
        if answer.get("same") is None:
            return self._reader.read(answer["value"])
        same = answer["same"]
        return self._read_result(args[same], answer["after"][same])

    def _read_state(self, container, after):
        state = self._reader.read(after)
        if not isinstance(container, CONTAINERS) or type(state) is not type(container):
            raise ValueError(f"a {type(container).__name__} became a {type(state).__name__}")
        return state

    def _read_result(self, container, after):
        """Return the value of an operation that returned its argument."""
        return container

    def _answer(self, request):
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                raise RecursionError(f"more than {MAX_DEPTH} requests within requests")
            args, kwargs = self._read_arguments(request)
            value = self.perform(request["operation"], args, kwargs)
            copied = self._find_copies(request, (*args, *kwargs.values()))
            same = next((i for i, arg in enumerate(copied) if arg is value and arg is not None), None)
            after = [None if arg is None else encode(arg, self.refer) for arg in copied]
            value = None if same is not None else encode(value, self.refer)
            text = json.dumps({"value": value, "same": same, "after": after, "printed": self.take_printed()})
        except (Exception, SystemExit) as error:  # noqa: BLE001  the other side receives any error
            failure = {"error": _describe_error(error), "line": self.find_line(error), "printed": self.take_printed()}
            text = json.dumps(failure)
        finally:
            self._depth -= 1
        self._send_text(text)

    def take_printed(self):
        """Return the text that was printed here since the last call, for the other side."""
        return ""

    def find_line(self, error):
        """Return the line from which an exception of this side's came, or None if the other side must not know it."""

    def _find_copies(self, request, values):
        """Return the arguments that are copies of the other side's containers, and None for each of the rest."""
        sent = (*request["args"], *request["kwargs"].values())
        return [
            value if isinstance(value, CONTAINERS) and data[0] != "solution" else None
            for data, value in zip(sent, values, strict=True)
        ]

    def _read_arguments(self, request):
        read = self._reader.read
        return [read(arg) for arg in request["args"]], {name: read(arg) for name, arg in request["kwargs"].items()}

    def _record_exit(self, why):
        self.peer_exited = True
        return PeerExitedError(why)

    def _send_text(self, text):
        body = text.encode()
        try:
            self._socket.sendall(_HEADER.pack(len(body)) + body)
        except OSError as error:
            raise self._record_exit(str(error)) from None

    def _receive(self):
        (length,) = _HEADER.unpack(self._read_bytes(_HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise self._record_exit(f"a message of {length} bytes; the maximum is {MAX_MESSAGE_BYTES}")
        try:
            message = json.loads(self._read_bytes(length))
        except (ValueError, RecursionError) as error:
            raise self._record_exit(f"a message that is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise self._record_exit("a message that is not an object")
        return message

    def _read_bytes(self, length):
        parts = []
        while length:
            try:
                part = self._socket.recv(min(length, 1 << 20))
            except OSError as error:
                raise self._record_exit(str(error)) from None
            if not part:
                raise self._record_exit("the process has exited")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def _describe_error(error):
    """Return names of an exception's classes, nearest first, its message, and its short plain arguments and fields."""
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  an exception class of the solution may fail here
        text = ""
    args = _encode_short(error.args)
    attributes = [[name, _encode_short([value])] for name, value in vars(error).items() if type(name) is str]
    return [names, text[:MAX_TEXT_CHARS], args or [], [[name, value[0]] for name, value in attributes if value]]


def _encode_short(values):
    """Return the JSON of each value, or None if one is not plain data or all together are too long."""
    try:
        encoded = [encode(value, _reject) for value in values]
        _PLAIN.many(encoded)
    except Exception:  # noqa: BLE001  objects of the solution's
        return None
    return encoded if len(str(encoded)) <= MAX_TEXT_CHARS else None


def _make_error(kind, message, args):
    """Make an exception of `kind`. Returns None if there is no such class or a message is not enough to make one."""
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
    raise ValueError(f"{str(value)[:40]!r} is not plain data")


class _PlainReader(ValueReader):
    """Reader of an exception's data: no references, and only finite numbers."""

    def number(self, value):
        if not math.isfinite(value):
            _reject(value)
        return value

    def empty_array(self, array):
        return _reject(array)


_PLAIN = _PlainReader(_reject)


def take_next(iterator):
    """Return whether there is another item, and the item. A StopIteration is never sent."""
    for value in iterator:
        return [True, value]
    return [False, None]


def update(container, state):
    """Bring a container into the state in which the other side left its copy."""
    if isinstance(container, (list, bytearray)):
        container[:] = state
    else:
        container.clear()
        (container.extend if isinstance(container, deque) else container.update)(state)

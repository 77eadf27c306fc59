"""The policy inside a run (see `verl_tool.sandbox.policy`): what user code may import and call.

*User code* is all that is not in the standard library, the installed packages or this package, told by the file name
that its code objects bear. Imports are judged by who asks: the innermost frame that does not import for another.
Calls are judged by who is behind them: any frame of user code, unless an import is under way in between, so that a
library may open files to load itself.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types

TYPE_CHECKING = False  # `typing` itself makes every fork dearer
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_IMPORT_MACHINERY = ("<frozen importlib", "<frozen zipimport")
_IMPORTS_FOR_OTHERS = ("importlib", "runpy", "pkgutil", "pydoc", "imp", "unittest.mock")
"""Library modules that import what their caller names: they ask in its name."""
_TAKES_SCOPE = ("eval", "exec")
_SAME_AS_BUILTIN = ("exec", "import")
"""Audit events that every import raises too: the wrapped builtin is judged instead."""
_FORGES_CODE = {"compile": 1, "code.__new__": 1}
"""Audit events that give a code object its file name, and where the name stands among their arguments."""
_EVENTS = {"open": "open", "io.open": "open", "socket.socket": "socket.__new__"}
"""Audit events (PEP 578) by which the interpreter reports a restricted function whatever name it was called by. Those
that are not here are looked for under their own name, as `os.system` and `subprocess.Popen` have it."""
_BEHIND_LIBRARIES = ("open", "input")
"""Builtins that are refused to user code even through a library. Others (`eval`, `exec`, `compile`) are used by the
library's own workings, as `namedtuple` does, and are refused only to user code that calls them itself."""


class PolicyHooks:
    """Holds user code to the policy. It steers a model; it is no wall (the isolation is)."""

    def __init__(
        self, allowed_modules: list[str] | None, restricted_functions: list[str], pre_import: list[str]
    ) -> None:
        """As the fields of `Policy`."""
        self._allowed = None if allowed_modules is None else frozenset(allowed_modules)
        self._restricted = tuple(restricted_functions)
        self._pre_import = tuple(pre_import)
        self._trusted: tuple[str, ...] = ()
        self._events = {_EVENTS.get(name, name): name for name in self._restricted}
        self._import_name = _import_name() if "__import__" in self._restricted else -1

    def activate(self, main: types.ModuleType) -> None:
        """Bind the user's program, whose main module this is, to the policy; then run what the policy pre-imports."""
        for statement in self._pre_import:
            exec(statement, main.__dict__)
        if self._allowed is None and not self._restricted:
            return
        self._trusted = _library_folders()
        if self._allowed is not None:
            self._wrap_imports()
        for name in self._restricted:
            self._wrap_function(name)
        sys.addaudithook(self._audit)

    def _wrap_imports(self) -> None:
        """`import` of a module that is loaded already raises no audit event, so both ways to import are wrapped."""
        plain_import, plain_import_module = builtins.__import__, importlib.import_module

        def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
            if level == 0:
                self._judge_import(name)
            return plain_import(name, globals, locals, fromlist, level)

        def guarded_import_module(name: str, package: str | None = None) -> types.ModuleType:
            if not name.startswith("."):
                self._judge_import(name)
            return plain_import_module(name, package)

        builtins.__import__ = importlib.__import__ = guarded_import
        importlib.import_module = guarded_import_module

    def _judge_import(self, name: str) -> None:
        top = name.partition(".")[0]
        if self._allowed is not None and top not in self._allowed and self._requested_by_user():
            raise ImportError(
                f"module {top!r} is not allowed here; allowed: {', '.join(sorted(self._allowed)) or 'none'}", name=top
            )

    def _wrap_function(self, name: str) -> None:
        """Put a guarded function in the place of the one by this name, if there is one."""
        owner_name, _, attribute = name.rpartition(".")
        try:
            owner = importlib.import_module(owner_name) if owner_name else builtins
            plain = getattr(owner, attribute)
        except (ImportError, AttributeError):  # not in this interpreter: nothing to call
            return
        if isinstance(plain, type):
            return  # a class must stay one; its audit event guards it
        setattr(owner, attribute, self._guarded(name, plain))

    def _guarded(self, name: str, plain: Callable[..., object]) -> Callable[..., object]:
        through_libraries = "." in name or name in _BEHIND_LIBRARIES
        is_rejected = self._called_by_user if through_libraries else self._requested_by_user

        def guarded(*args: object, **kwargs: object) -> object:
            if is_rejected() and not (name == "__import__" and self._is_import_statement(sys._getframe(1))):
                raise _refusal(name)
            if name in _TAKES_SCOPE:
                args = _with_scope(args, sys._getframe(1))
            return plain(*args, **kwargs)

        guarded.__name__ = guarded.__qualname__ = name.rpartition(".")[2]
        return guarded

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        name = self._events.get(event)
        if name is not None and event not in _FORGES_CODE:
            if event not in _SAME_AS_BUILTIN and self._called_by_user():
                raise _refusal(name)
        elif event == "import" and self._allowed is not None:
            self._judge_import(str(args[0]))
        elif event in _FORGES_CODE:
            claimed = args[_FORGES_CODE[event]]
            if isinstance(claimed, bytes):
                claimed = os.fsdecode(claimed)
            if isinstance(claimed, str) and self._is_library(claimed) and self._requested_by_user():
                raise PermissionError(f"code may not claim to come from {claimed!r}")

    def _is_import_statement(self, caller: types.FrameType) -> bool:
        """Whether the caller stands at an ``import``, which calls `__import__` too and is not what was restricted."""
        return caller.f_code.co_code[caller.f_lasti] == self._import_name

    def _is_library(self, filename: str) -> bool:
        return filename.startswith(self._trusted)

    def _requested_by_user(self) -> bool:
        """Whether the innermost frame that asks for itself is user code. The import machinery does: it needs `_io` and
        `exec` on its way to a module that was judged already."""
        for filename, module in _callers():
            on_behalf = self._is_library(filename) and module.startswith(_IMPORTS_FOR_OTHERS)
            if filename.startswith(_IMPORT_MACHINERY) or not on_behalf:
                return not self._is_library(filename)
        return False

    def _called_by_user(self) -> bool:
        """Whether user code is behind the call, with no import in between."""
        for filename, _ in _callers():
            if filename.startswith(_IMPORT_MACHINERY):
                return False
            if not self._is_library(filename):
                return True
        return False


def _callers() -> Iterator[tuple[str, str]]:
    """File name and module of each frame from the innermost on, down to where this package calls the user's code."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename != __file__:
            if filename.startswith(_HERE):
                return
            yield filename, str(frame.f_globals.get("__name__"))
        frame = frame.f_back


def _library_folders() -> tuple[str, ...]:
    """Where code that is not the user's comes from. Its own folder stands first on the path and is left out."""
    folders = [os.path.join(folder, "") for folder in sys.path[1:] if folder]
    return (*folders, "<frozen ", "<__array_function__")


def _import_name() -> int:
    """The instruction of an ``import`` statement."""
    import opcode  # only for a policy that asks: each module more makes every fork dearer

    return opcode.opmap["IMPORT_NAME"]


def _refusal(name: str) -> PermissionError:
    return PermissionError(f"{name} is not allowed here")


def _with_scope(args: tuple[object, ...], caller: types.FrameType) -> tuple[object, ...]:
    """`eval` and `exec` take their caller's scope if given none; a wrapper has to hand it on."""
    return args if len(args) > 1 else (*args, caller.f_globals, caller.f_locals)

"""Enforce the policy inside a run (see `verl_tool.sandbox.policy`): what user code may import and call.

*User code* is all code outside the standard library, the installed packages and this package, recognized by the file
names of its code objects. An import is checked if the innermost frame that does not import on behalf of another is user
code. A call is checked if any frame is user code, unless there is an import in between, so that a library may open
files to load itself.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types

TYPE_CHECKING = False  # importing `typing` makes every fork slower
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_IMPORT_MACHINERY = ("<frozen importlib", "<frozen zipimport")
_IMPORTS_FOR_OTHERS = ("importlib", "runpy", "pkgutil", "pydoc", "imp", "unittest.mock")
"""Library modules that import on behalf of their caller."""
_TAKES_SCOPE = ("eval", "exec")
_CHECKED_BY_WRAPPER = ("exec", "import")
"""Audit events that every import raises too, so the wrapped builtin is checked instead."""
_SETS_FILE_NAME = {"compile": 1, "code.__new__": 1}
"""Audit events that give a code object its file name, and the index of the name in their arguments."""
_EVENTS = {"open": "open", "io.open": "open", "socket.socket": "socket.__new__"}
"""Audit events (PEP 578) of restricted functions, which the interpreter raises whatever name a function is called by.
Other events have the names of their functions, such as `os.system` and `subprocess.Popen`."""
_CHECKED_THROUGH_LIBRARIES = ("open", "input")
"""Builtins that are rejected even if user code calls them through a library. Libraries use others (`eval`, `exec`,
`compile`) internally, as `namedtuple` does, so these are rejected only if user code calls them directly."""


class PolicyHooks:
    """Enforces the policy. It guides a model but is not a security boundary; the isolation is."""

    def __init__(
        self, allowed_modules: list[str] | None, restricted_functions: list[str], pre_import: list[str]
    ) -> None:
        """For the arguments see `Policy`."""
        self._allowed = None if allowed_modules is None else frozenset(allowed_modules)
        self._restricted = tuple(restricted_functions)
        self._pre_import = tuple(pre_import)
        self._library_prefixes: tuple[str, ...] = ()
        self._events = {_EVENTS.get(name, name): name for name in self._restricted}
        self._import_opcode = _find_import_opcode() if "__import__" in self._restricted else -1

    def activate(self, main: types.ModuleType) -> None:
        """Run the policy's pre-imports in the main module of the user's program, then enforce the policy."""
        for statement in self._pre_import:
            exec(statement, main.__dict__)
        if self._allowed is None and not self._restricted:
            return
        self._library_prefixes = _find_library_prefixes()
        if self._allowed is not None:
            self._wrap_imports()
        for name in self._restricted:
            self._wrap_function(name)
        sys.addaudithook(self._audit)

    def _wrap_imports(self) -> None:
        """Wrap both ways to import, because importing a loaded module raises no audit event."""
        original_import, original_import_module = builtins.__import__, importlib.import_module

        def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
            if level == 0:
                self._check_import(name)
            return original_import(name, globals, locals, fromlist, level)

        def guarded_import_module(name: str, package: str | None = None) -> types.ModuleType:
            if not name.startswith("."):
                self._check_import(name)
            return original_import_module(name, package)

        builtins.__import__ = importlib.__import__ = guarded_import
        importlib.import_module = guarded_import_module

    def _check_import(self, name: str) -> None:
        top = name.partition(".")[0]
        if self._allowed is not None and top not in self._allowed and self._is_requested_by_user():
            raise ImportError(
                f"module {top!r} is not allowed here; allowed: {', '.join(sorted(self._allowed)) or 'none'}", name=top
            )

    def _wrap_function(self, name: str) -> None:
        """Replace the function of this name, if it exists, with a checked one."""
        owner_name, _, attribute = name.rpartition(".")
        try:
            owner = importlib.import_module(owner_name) if owner_name else builtins
            original = getattr(owner, attribute)
        except (ImportError, AttributeError):  # does not exist in this interpreter
            return
        if isinstance(original, type):
            return  # a class must remain one; its audit event is checked
        setattr(owner, attribute, self._wrap(name, original))

    def _wrap(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        through_libraries = "." in name or name in _CHECKED_THROUGH_LIBRARIES
        is_rejected = self._is_called_by_user if through_libraries else self._is_requested_by_user

        def guarded(*args: object, **kwargs: object) -> object:
            if is_rejected() and not (name == "__import__" and self._is_import_statement(sys._getframe(1))):
                raise _make_error(name)
            if name in _TAKES_SCOPE:
                args = _add_scope(args, sys._getframe(1))
            return original(*args, **kwargs)

        guarded.__name__ = guarded.__qualname__ = name.rpartition(".")[2]
        return guarded

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        name = self._events.get(event)
        if name is not None and event not in _SETS_FILE_NAME:
            if event not in _CHECKED_BY_WRAPPER and self._is_called_by_user():
                raise _make_error(name)
        elif event == "import" and self._allowed is not None:
            self._check_import(str(args[0]))
        elif event in _SETS_FILE_NAME:
            claimed = args[_SETS_FILE_NAME[event]]
            if isinstance(claimed, bytes):
                claimed = os.fsdecode(claimed)
            if isinstance(claimed, str) and self._is_library(claimed) and self._is_requested_by_user():
                raise PermissionError(f"code may not claim to come from {claimed!r}")

    def _is_import_statement(self, caller: types.FrameType) -> bool:
        """Whether the caller executes an ``import`` statement, which calls `__import__` too but is not restricted."""
        return caller.f_code.co_code[caller.f_lasti] == self._import_opcode

    def _is_library(self, filename: str) -> bool:
        return filename.startswith(self._library_prefixes)

    def _is_requested_by_user(self) -> bool:
        """Whether the innermost frame that does not act on behalf of another is user code. The import machinery acts
        for itself: it needs `_io` and `exec` to load a module that was checked already."""
        for filename, module in _iterate_callers():
            on_behalf = self._is_library(filename) and module.startswith(_IMPORTS_FOR_OTHERS)
            if filename.startswith(_IMPORT_MACHINERY) or not on_behalf:
                return not self._is_library(filename)
        return False

    def _is_called_by_user(self) -> bool:
        """Whether the call comes from user code without an import in between."""
        for filename, _ in _iterate_callers():
            if filename.startswith(_IMPORT_MACHINERY):
                return False
            if not self._is_library(filename):
                return True
        return False


def _iterate_callers() -> Iterator[tuple[str, str]]:
    """Yield file name and module of each frame, from the innermost to the one where this package calls user code."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename != __file__:
            if filename.startswith(_HERE):
                return
            yield filename, str(frame.f_globals.get("__name__"))
        frame = frame.f_back


def _find_library_prefixes() -> tuple[str, ...]:
    """Return the prefixes of file names of library code. The first folder on the path is the user's."""
    folders = [os.path.join(folder, "") for folder in sys.path[1:] if folder]
    return (*folders, "<frozen ", "<__array_function__")


def _find_import_opcode() -> int:
    """Return the opcode of an ``import`` statement."""
    import opcode  # only if the policy needs it, since each module makes every fork slower

    return opcode.opmap["IMPORT_NAME"]


def _make_error(name: str) -> PermissionError:
    return PermissionError(f"{name} is not allowed here")


def _add_scope(args: tuple[object, ...], caller: types.FrameType) -> tuple[object, ...]:
    """Add the caller's scope, which `eval` and `exec` use by default, to the arguments."""
    return args if len(args) > 1 else (*args, caller.f_globals, caller.f_locals)

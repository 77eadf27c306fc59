"""What a model writes to the browser: calls as BrowserGym has them, or WebArena's commands.

click("12")
fill("7", "Paris"); press("7", "Enter")
type [7] [Paris] [1]
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_ACTIONS = 10
"""Of one call of the tool."""
MAX_CHARACTERS = 20_000
_COMMAND = re.compile(r"(?P<name>[a-z_]+)(?P<rest>\s*(\[.*)?)", re.DOTALL)
_GAP = re.compile(r"\]\s*\[")
_PAGE = {"down": 1.0, "up": -1.0}


class ActionSyntaxError(ValueError):
    """The text is no action. The message is for the model."""


@dataclass(frozen=True)
class BrowserAction:
    """One action, not checked yet."""

    name: str
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


def parse_actions(text: str) -> list[BrowserAction]:
    """Return the actions of a text, in order. Raises ActionSyntaxError."""
    text = text.strip()
    if not text:
        return [BrowserAction("noop")]
    if len(text) > MAX_CHARACTERS:
        raise ActionSyntaxError(f"the action has {len(text)} characters; write at most {MAX_CHARACTERS}")
    command = _COMMAND.fullmatch(text)
    actions = [_command(command["name"], command["rest"].strip())] if command else _calls(text)
    if len(actions) > MAX_ACTIONS:
        raise ActionSyntaxError(f"{len(actions)} actions in one call; write at most {MAX_ACTIONS}")
    return actions


def parse_arguments(arguments: Mapping[str, Any]) -> list[BrowserAction]:
    """Return the actions of a JSON call: ``{"action": "click", "id": 12}``, or a text as `action`. Raises
    ActionSyntaxError."""
    rest = {name: value for name, value in arguments.items() if name not in ("action", "input")}
    action = arguments.get("action", arguments.get("input"))
    if not isinstance(action, str):
        raise ActionSyntaxError('give the argument "action", such as {"action": "click", "id": 12}')
    if rest and action.strip().isidentifier():
        return [BrowserAction(action.strip(), (), rest)]
    if rest:
        raise ActionSyntaxError(f'"action" is a whole action already; leave out {", ".join(sorted(rest))}')
    return parse_actions(action)


def _calls(text: str) -> list[BrowserAction]:
    """Function calls; nothing is evaluated but literals."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ActionSyntaxError(f"{_excerpt(text)} is no action; {_HOW}") from None
    return [_call(statement) for statement in body]


def _call(statement: ast.stmt) -> BrowserAction:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ActionSyntaxError(f"only calls are actions; {_HOW}")
    try:
        arguments = [ast.literal_eval(each) for each in call.args]
        keywords = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ActionSyntaxError(f"the arguments of {call.func.id[:40]} must be plain texts and numbers") from None
    return BrowserAction(call.func.id, arguments, keywords)


def _command(name: str, rest: str) -> BrowserAction:
    """WebArena's: a name, and arguments in brackets."""
    if rest and not rest.endswith("]"):
        raise ActionSyntaxError(f"{_excerpt(rest)} is not closed; write {name} [first] [second]")
    parts = [part.strip() for part in _GAP.split(rest[1:-1])] if rest else []
    if name == "type" and len(parts) > 1:
        *first, last = parts
        enter = last in ("0", "1") and len(first) > 1
        words = first if enter else parts
        text = "] [".join(words[1:])
        return BrowserAction("type", [words[0], text], {"press_enter": not enter or last == "1"})
    if name == "scroll":
        direction = (parts or ["down"])[0].removeprefix("direction=").lower()
        if direction not in _PAGE:
            raise ActionSyntaxError(f"scroll takes [down] or [up], not [{direction[:40]}]")
        return BrowserAction("scroll_page", [_PAGE[direction]])
    if name == "press" and len(parts) == 1:
        return BrowserAction("keyboard_press", parts)
    if name == "tab_focus":
        return BrowserAction(name, [part.removeprefix("tab_index=") for part in parts])
    return BrowserAction(_COMMANDS.get(name, name), parts)


_COMMANDS = {"close_tab": "tab_close", "page_close": "tab_close", "none": "noop", "page_focus": "tab_focus"}
"""WebArena's names, where BrowserGym has others."""
_HOW = 'write calls such as click("12") or fill("7", "some text"), one a line'


def _excerpt(text: str) -> str:
    return json.dumps(text[:80], ensure_ascii=False)

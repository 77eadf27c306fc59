"""What a model wrote in a call, as the arguments of a typed function, or what is wrong with it in words for the model.

A JSON call gives arguments by name. Any other call is a text, and becomes

- arguments by name, if it is a JSON object and the function does not take a text alone;
- the one argument that must be given (or, if none must, the first one), read as JSON if its type is not a text.

A JSON call whose only argument is ``input``, a name that the function does not have, is such a text too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from verl_tool.formats import Call
from verl_tool.formats.json_call import decode
from verl_tool.servers.tools.base import InvalidCall
from verl_tool.servers.tools.typed.problems import describe_problems, errors_of
from verl_tool.servers.tools.typed.signature import Signature
from verl_tool.util.json_text import excerpt

MAX_DEPTH = 32
"""Deepest nesting of lists and objects in the arguments of a call."""
MAX_VALUES = 4000
"""Most values (texts, numbers, lists, objects) in them: to check one takes a microsecond, and some microseconds more
for each type of a union that it is not."""
_TEXT = "input"
"""The name that formats give to a text where JSON needs one."""


def read_arguments(signature: Signature, call: Call) -> dict[str, Any]:
    """The keyword arguments for the function. Raises InvalidCall, whatever the call holds, and nothing else."""
    text = call.input if call.arguments is None else _single_text_argument(signature, call.arguments)
    arguments = call.arguments if text is None else _of_text(signature, text)
    return _checked(signature, arguments or {})


def _single_text_argument(signature: Signature, arguments: Mapping[str, Any]) -> str | None:
    text = arguments.get(_TEXT)
    known = any(argument.name == _TEXT for argument in signature.arguments)
    return text if len(arguments) == 1 and isinstance(text, str) and not known else None


def _of_text(signature: Signature, text: str) -> Mapping[str, Any]:
    names = [argument.name for argument in signature.arguments]
    written = _decoded(text) if text.lstrip().startswith("{") else None
    if isinstance(written, dict) and (len(names) != 1 or set(written) == set(names)):
        return written
    trimmed = _trimmed(text)
    if not names:
        if trimmed:
            raise InvalidCall(f"{signature.display} takes no arguments, and was given {excerpt(trimmed)}")
        return {}
    argument = signature.free_text
    if argument is None:
        raise InvalidCall(
            f"write the arguments of {signature.display} as one JSON object with the names {', '.join(names)}"
        )
    if not trimmed and not argument.required:
        return {}
    if argument.is_text:
        return {argument.name: trimmed}
    value = _decoded(trimmed)
    return {argument.name: trimmed if value is None or not _fits(signature, {argument.name: value}) else value}


def _trimmed(text: str) -> str:
    """Without the line breaks around it; a text of one line without the blanks either."""
    bare = text.strip("\r\n")
    return bare if "\n" in bare else bare.strip()


def _decoded(text: str) -> Any:
    """The JSON value that the text is; None if it is none."""
    try:
        return decode(text)
    except ValueError:
        return None


def _fits(signature: Signature, given: Mapping[str, Any]) -> bool:
    """Whether to keep what a text is as JSON: it fits, or it is a list or an object and its errors say more."""
    if any(isinstance(value, (list, dict)) for value in given.values()):
        return True
    try:
        signature.checked(given)
    except ValidationError:
        return False
    return True


def _checked(signature: Signature, given: Mapping[str, Any], last: bool = False) -> dict[str, Any]:
    _reject_too_large(signature, given)
    try:
        return signature.checked(given)
    except ValidationError as error:
        errors = errors_of(error)
    if not last:
        # Models write lists and objects as texts that hold their JSON.
        wrong = {str(each["loc"][0]) for each in errors if each["loc"]}
        texts = {name: given[name] for name in wrong & set(given) if isinstance(given[name], str)}
        values = {name: value for name, text in texts.items() if isinstance(value := _decoded(text), (list, dict))}
        if values:
            return _checked(signature, {**given, **values}, last=True)
    raise InvalidCall(f"wrong arguments for {signature.display}: {describe_problems(errors)}")


def _reject_too_large(signature: Signature, given: Mapping[str, Any]) -> None:
    level: list[Any] = [given]
    count = 0
    for _ in range(MAX_DEPTH + 1):
        level = [child for each in level for child in (each.values() if isinstance(each, Mapping) else each)]
        count += len(level)
        level = [each for each in level if isinstance(each, (list, dict))]
        if count > MAX_VALUES:
            raise InvalidCall(f"the arguments of {signature.name} hold more than {MAX_VALUES} values; send fewer")
        if not level:
            return
    raise InvalidCall(f"the arguments of {signature.name} are nested deeper than {MAX_DEPTH} levels; send flatter ones")

"""What a function's signature and docstring say of it as a tool: its arguments, their types, and what they mean."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from docstring_parser import ParseError, parse
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from verl_tool.errors import ConfigError
from verl_tool.servers.tools.base import Context, ToolOptions
from verl_tool.servers.tools.typed.recursion import ambiguous_unions

_RULES = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
"""An argument of an unknown name is refused, 5 is taken for "5", and infinity is no number."""
_LIST_LINE = re.compile(r"\s|[-*+] |\d+[.)] ")


@dataclass(frozen=True)
class Argument:
    """One argument that the model writes."""

    name: str
    annotation: Any
    default: Any
    """`Parameter.empty` if the model must give it."""

    @property
    def required(self) -> bool:
        return self.default is Parameter.empty

    @property
    def is_text(self) -> bool:
        """Whether nothing but a text fits."""
        return _without_none(self.annotation) is str

    def display(self) -> str:
        return self.name if self.required else f"{self.name}={self.default!r:.40}"


@dataclass(frozen=True)
class Signature:
    """A function as a model calls it."""

    name: str
    description: str
    arguments: tuple[Argument, ...]
    model: type[BaseModel]
    """Checks the arguments, and brings them to their types. Its fields are numbered; their aliases are the names."""
    context: str | None
    """Name of the parameter that is annotated with `Context`."""
    options: str | None
    """Name of the parameter that is annotated with a subclass of `ToolOptions`."""
    options_model: type[ToolOptions]

    @property
    def display(self) -> str:
        """As it stands in an error message, such as ``weather(city, days=3)``."""
        return f"{self.name}({', '.join(argument.display() for argument in self.arguments)})"

    @property
    def free_text(self) -> Argument | None:
        """The argument that a text without names is: the one that must be given, or the first if none must.

        None if there is no argument, or if several must be given.
        """
        required = [argument for argument in self.arguments if argument.required]
        return (required or self.arguments or (None,))[0] if len(required) < 2 else None

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` as keyword arguments. Raises pydantic's ValidationError."""
        made = self.model.model_validate(given)
        fields = type(made).model_fields
        # What was not given is left out: the function has its own default.
        return {str(fields[field].alias): getattr(made, field) for field in sorted(made.model_fields_set)}

    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        schema = self.model.model_json_schema(schema_generator=_Untitled)
        for part in (schema, *schema.get("$defs", {}).values()):
            part.pop("title", None)
        # That nothing else is taken goes without saying, and models pay for each token.
        schema.pop("additionalProperties", None)
        return {"type": "object", "properties": {}, **schema}


class _Untitled(GenerateJsonSchema):
    """A title says no more than the name that it stands at, and a type comes first."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value


def read_signature(function: Callable[..., object], name: str, *, method: bool = False) -> Signature:
    """What `function` says. `method`: its first parameter is the instance. Raises ConfigError, in words for who wrote
    the function, if it cannot be a tool."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"tool {name} yields, and a tool returns its whole answer at once; return a text")
    hints = _hints(function, name)
    parameters = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    arguments, context, options = [], None, None
    options_model = ToolOptions
    for parameter in parameters:
        annotation = _annotation(parameter, hints, name)
        bare = _without_none(annotation)
        if bare is Context:
            context = parameter.name
        elif inspect.isclass(bare) and issubclass(bare, ToolOptions):
            options, options_model = parameter.name, bare
        else:
            arguments.append(Argument(parameter.name, annotation, _default(parameter, name)))
    description, words = _documentation(function, name, [parameter.name for parameter in parameters])
    model = _model(name, arguments, words)
    return Signature(name, description, tuple(arguments), model, context, options, options_model)


def _hints(function: Callable[..., object], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"the types of tool {name} cannot be read: {error}; annotate it with types that the file defines or imports"
        ) from error


def _annotation(parameter: Parameter, hints: Mapping[str, Any], name: str) -> Any:
    if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
        raise ConfigError(
            f"tool {name} takes {parameter}, and a model gives each argument by its name; list the arguments one by one"
        )
    if parameter.name not in hints:
        raise ConfigError(
            f"argument {parameter.name!r} of tool {name} has no type; annotate it, such as {parameter.name}: str, or "
            f"{parameter.name}: Context for what is known of the call"
        )
    return hints[parameter.name]


def _default(parameter: Parameter, name: str) -> Any:
    if isinstance(parameter.default, FieldInfo):
        raise ConfigError(
            f"argument {parameter.name!r} of tool {name} has a pydantic Field for its default; write "
            f"{parameter.name}: Annotated[TYPE, Field(…)], and the default itself behind it"
        )
    return parameter.default


def _documentation(
    function: Callable[..., object], name: str, parameters: typing.Sequence[str]
) -> tuple[str, dict[str, str]]:
    """The description, and the words on each argument."""
    try:
        parsed = parse(inspect.getdoc(function) or "")
    except ParseError as error:
        raise ConfigError(f"the docstring of tool {name} cannot be read: {error}") from error
    description = _unwrapped(parsed.description or "")
    if not description:
        raise ConfigError(f"tool {name} has no docstring; its first lines tell the model what the tool does")
    words = {each.arg_name.lstrip("*"): _unwrapped(each.description or "") for each in parsed.params}
    unknown = [each for each in words if each not in parameters]
    if unknown:
        known = ", ".join(parameters) or "none"
        raise ConfigError(f"the docstring of tool {name} describes {unknown[0]!r}; its arguments are: {known}")
    return description, words


def _unwrapped(text: str) -> str:
    """Each paragraph as one line, except for lists and what is indented."""
    paragraphs = [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    lines = (part.split("\n") for part in paragraphs)
    return "\n\n".join(
        ("\n" if any(_LIST_LINE.match(line) for line in part) else " ").join(line.rstrip() for line in part)
        for part in lines
    )


def _model(name: str, arguments: typing.Sequence[Argument], words: Mapping[str, str]) -> type[BaseModel]:
    # Numbered, because an argument may be called as an attribute of pydantic's models is, or begin with "_".
    fields: dict[str, Any] = {}
    for number, argument in enumerate(arguments):
        display: dict[str, Any] = {"description": words[argument.name]} if words.get(argument.name) else {}
        default: Any = ... if argument.required else argument.default
        fields[f"a{number:03}"] = (argument.annotation, Field(default, alias=argument.name, **display))
    try:
        model: type[BaseModel] = create_model(name, __config__=_RULES, **fields)
        schema = model.model_json_schema()
    except (PydanticUserError, TypeError) as error:
        raise ConfigError(
            f"an argument of tool {name} has a type that no JSON can give: {str(error).splitlines()[0]}; use str, int, "
            "float, bool, list, dict, Literal, a pydantic model, or unions of them"
        ) from error
    ambiguous = ambiguous_unions(schema.get("$defs", {}))
    if ambiguous:
        raise ConfigError(
            f"an argument of tool {name} has the type {ambiguous[0]}, which holds a union of several types like it; "
            "each level would be read once for each of them, and a nested argument would take for ever. Give the union "
            "a discriminator: Annotated[A | B, Field(discriminator='kind')]"
        )
    return model


def _without_none(annotation: Any) -> Any:
    """The type in ``Annotated[TYPE, …]`` or ``TYPE | None``; any other annotation as it is."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _without_none(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [each for each in typing.get_args(annotation) if each is not type(None)]
        return _without_none(rest[0]) if len(rest) == 1 else annotation
    return annotation

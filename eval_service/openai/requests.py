"""What clients send: OpenAI's ``/v1/chat/completions`` and ``/v1/completions``, and a few fields of our own.

Ours: ``return_trajectory``, ``extra_fields``, ``verification``, ``max_turns``, and vLLM's names for sampling that
OpenAI has not (``top_k``, ``min_p``, ``repetition_penalty``). A field that is unknown, or asks for something that is
not done here, is an error: an evaluation must not run under other settings than it believes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from eval_service.openai.errors import bad_request
from verl_tool.agent_loop.row import MEDIA_COLUMNS, is_present
from verl_tool.content.packed_files import unpack
from verl_tool.http.messages import HttpError
from verl_tool.protocol import FILES_FIELD, SENT_ONCE
from verl_tool.util.json_text import BadJsonError, decode_request_json, encode_json, excerpt
from verl_tool.verification import AnyVerification

MAX_CHOICES = 1024
"""Most answers (`n` times the number of prompts) of one request."""
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_STOPS = 32
MAX_BIASES = 1024
NAME_CHARACTERS = 256
STOP_CHARACTERS = 1024
EXTRA_BYTES = 256 << 10
"""Of `extra_fields`, which goes to the tools with every call."""

Request = TypeVar("Request", bound="GenerationRequest")
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Float = Annotated[float, Field(allow_inf_nan=False)]
_Name = Annotated[str, Field(max_length=NAME_CHARACTERS)]
_Stop = Annotated[str, Field(max_length=STOP_CHARACTERS)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds = Annotated[list[int], Field(fail_fast=True)]
"""Which of them the model knows is for the service to say."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    """A last chunk without choices that holds the usage."""
    include_obfuscation: Literal[False] = False


class FunctionName(BaseModel):
    """A tool of the request; only its name counts, the tool server knows the rest."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: _Name


class ToolName(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["function"] = "function"
    function: FunctionName


class ResponseFormat(_Strict):
    type: Literal["text"] = "text"


class GenerationRequest(_Strict):
    """What both ways of asking have in common. None: the service's default."""

    model: str
    n: _Count | None = None
    temperature: Annotated[_Float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[_Float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[_Float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[_Float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[_Float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[_Float, Field(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[dict[_TokenId, Annotated[_Float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
    ) = None
    max_tokens: _Count | None = None
    """Most tokens that the model writes in one answer, over all its turns."""
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    """The model's turn ends before one of these, and with it the answer."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63 - MAX_CHOICES)] | None = None
    """Choice `i` of a request draws with ``seed + i``."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: _Name | None = None
    """Recorded in the trajectory."""
    tools: Annotated[list[ToolName], Field(max_length=MAX_TOOLS)] | None = None
    """The only tools that may be used. None: all that the tool server has. An empty list: none."""
    tool_choice: Literal["auto", "none"] | None = None
    max_turns: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Most tool turns of an answer, as the column of this name for a row. None: the option's."""
    min_turns: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """As `max_turns`."""
    extra_fields: dict[str, Any] | None = None
    """Sent to the tools with every call, as in training; ``workspace_files`` and ``environment`` with the first. Put no
    gold answer into it."""
    verification: AnyVerification | None = None
    """Sent to the tools once the answer is written, to be run in the workspace that it leaves, or for the environment
    to judge by. The verdict is in the trajectory (`return_trajectory`)."""
    return_trajectory: bool = False
    """Add the trajectory to each choice: segments of tokens, calls, timings."""
    response_format: ResponseFormat | None = None
    store: Literal[False] | None = None

    @field_validator("extra_fields")
    @classmethod
    def _not_too_large(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        rest = {name: entry for name, entry in (value or {}).items() if name not in SENT_ONCE}
        if rest and len(encode_json(rest)) > EXTRA_BYTES:
            raise ValueError(f"it is larger than {EXTRA_BYTES} bytes of JSON, and goes to the tools with every call")
        unpack((value or {}).get(FILES_FIELD))
        return value

    @field_validator("stop")
    @classmethod
    def _some_text(cls, value: str | list[str] | None) -> str | list[str] | None:
        if "" in ([value] if isinstance(value, str) else value or []):
            raise ValueError("an empty string stands in every text; leave it out")
        return value

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is only taken with stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def tool_names(self) -> tuple[str, ...] | None:
        """The tools that may be used; None: all."""
        if self.tool_choice == "none":
            return ()
        return None if self.tools is None else tuple(tool.function.name for tool in self.tools)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def top_log_probs(self) -> int | None:
        """How many of the likeliest tokens are to be told; None: no log-probabilities."""
        raise NotImplementedError


class TextContent(_Strict):
    type: Literal["text"]
    text: str


class ImageUrl(_Strict):
    url: Annotated[str, Field(repr=False)]
    """A data URI; or an address, if the service fetches any."""
    detail: Literal["auto", "high"] | None = None
    """The model is given all of the image in any case."""


class ImageContent(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


_Part = Annotated[TextContent | ImageContent, Field(discriminator="type")]
_Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[_Part], Tag("parts")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
]
CARRIED = ("text", "image_url")
"""Types of parts that a message may hold."""


class Message(BaseModel):
    """One message of the conversation, as the chat template takes it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_and_images_only(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        held = [name for name in MEDIA_COLUMNS if is_present(value.get(name))]
        content = value.get("content")
        parts = content if isinstance(content, list) else []
        kinds = [part.get("type") for part in parts if isinstance(part, Mapping) and part.get("type") not in CARRIED]
        for other in (*held, *kinds):
            raise ValueError(
                f"{str(other)[:80]!r} is not carried here: this endpoint takes text and images (image_url)"
            )
        return value

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one text; with images, as a list of texts and of places for images."""
        fields = self.model_dump(exclude={"content"}, exclude_none=True)
        content = self.content or ""
        if isinstance(content, str):
            return fields | {"content": content}
        if not self.images:
            return fields | {"content": self.text}
        parts = [
            {"type": "text", "text": part.text} if isinstance(part, TextContent) else {"type": "image"}
            for part in content
        ]
        return fields | {"content": parts}

    @property
    def text(self) -> str:
        content = self.content or ""
        if isinstance(content, str):
            return content
        return "".join(part.text for part in content if isinstance(part, TextContent))

    @property
    def images(self) -> list[tuple[int, str]]:
        """Of each image, which part of the content it is and where it is to be had."""
        content = self.content
        parts = enumerate(content if isinstance(content, list) else ())
        return [(n, part.image_url.url) for n, part in parts if isinstance(part, ImageContent)]


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: _Count | None = None
    """OpenAI's new name of `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parallel_tool_calls: Literal[True] | None = None

    @model_validator(mode="after")
    def _no_contradiction(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("'max_tokens' and 'max_completion_tokens' are one setting under two names; give just one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' is only taken with logprobs=true")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def top_log_probs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: (
        str
        | _TokenIds
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[_TokenIds], Field(fail_fast=True)]
    )
    """A text, its token ids, or several of either."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _whole_numbers(cls, value: object) -> object:
        """Neither ``1.0`` nor ``true`` nor ``"1"`` is a token id, though all could be read as one."""
        if isinstance(value, list) and value and not isinstance(value[0], str):
            for ids in value if isinstance(value[0], list) else [value]:
                if isinstance(ids, list) and set(map(type, ids)) - {int}:
                    i, wrong = next((i, one) for i, one in enumerate(ids) if type(one) is not int)
                    raise ValueError(f"entry {i} of its token ids is {excerpt(wrong)}; a token id is a whole number")
        return value

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if all(isinstance(item, int) for item in prompt):
            return [[item for item in prompt if isinstance(item, int)]]
        return [item for item in prompt if not isinstance(item, int)]

    @property
    def top_log_probs(self) -> int | None:
        return self.logprobs


def read_request(body: bytes, model: type[Request]) -> Request:
    """The request in a body. Raises HttpError 400 that names the field, what is wrong with it, and how to fix it."""
    try:
        value = decode_request_json(body)
    except BadJsonError as error:
        raise bad_request(str(error), code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body is not a JSON object", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _field_error(error, model) from None


def _field_error(error: ValidationError, model: type[GenerationRequest]) -> HttpError:
    problems = error.errors(include_url=False, include_context=False)
    for problem in problems:
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            known = ", ".join(sorted(model.model_fields))
            name = str(problem["loc"][0])[:NAME_CHARACTERS]
            message = f"Unrecognized request argument supplied: {name}. Known: {known}"
            return bad_request(message, param=name, code="unknown_parameter")
    first = problems[0]
    param = ".".join(str(part)[:NAME_CHARACTERS] for part in first["loc"]) or None
    if first["type"] == "missing":
        return bad_request(f"'{param}' is missing", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if param is not None:
        message = f"'{param}' is {excerpt(first['input'])}: {message}"
    return bad_request(message, param=param, code="invalid_value")

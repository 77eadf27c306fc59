"""What the checks look at: a model's tokenizer and template, the loop's options, the tools, and rows of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.observation_renderer import ObservationRenderer
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.conversation import without_images
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.rendering.template_text import MODEL_MARK
from verl_tool.agent_loop.rendering.tool_messages import TemplateCalls
from verl_tool.agent_loop.row import build_call_extra, listed_tools, uses_tools
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.checks.example_call import ExampleCall, example_of
from verl_tool.errors import ConfigError
from verl_tool.formats import HERMES, Format
from verl_tool.formats.native import NATIVE
from verl_tool.protocol import ToolDescription
from verl_tool.verification import ENVIRONMENT_STYLE, STYLE

QUESTION: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": "What is the weather in Oslo tomorrow?"},)
"""The prompt where there are no data."""
MADE_UP_TOOL = ToolDescription(
    name="weather",
    description="Forecast for a city.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city."},
            "days": {"type": "integer", "description": "Days ahead.", "default": 3},
        },
        "required": ["city"],
    },
    usage="",
    example_actions=['<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'],
)
"""The tool where none is named."""


@dataclass(frozen=True)
class Row:
    where: str
    """Such as ``row 3 of data/train.parquet``."""
    content: Mapping[str, Any]
    prompt_key: str = "prompt"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt. Raises ConfigError if it is none that the loop can use."""
        if self.content.get(self.prompt_key) is None:
            raise ConfigError(f"{self.where} has no {self.prompt_key!r}")
        return without_images(self.content[self.prompt_key], self.where)

    @property
    def listed(self) -> tuple[str, ...] | None:
        """The only tools that its trajectories may use; (): it uses no tool; None: all. Raises ConfigError."""
        if not uses_tools(self.content.get("use_tool"), self.where):
            return ()
        return listed_tools(self._tools_kwargs, self.content.get("extra_info"), self.where)

    @property
    def sent(self) -> dict[str, Any]:
        """What its calls send to the tools besides the action. Raises ConfigError."""
        return build_call_extra(self._tools_kwargs, self.listed, self.where)

    @property
    def ground_truth(self) -> object:
        """The gold answer; None if there is none, or another judge in its place."""
        graded_by = self.content.get("reward_model")
        if not isinstance(graded_by, Mapping) or graded_by.get("style") in (STYLE, ENVIRONMENT_STYLE):
            return None
        return graded_by.get("ground_truth")

    @property
    def _tools_kwargs(self) -> Mapping[str, Any] | None:
        extra = self.content.get("extra_info")
        return extra.get("tools_kwargs") if isinstance(extra, Mapping) else None


@dataclass(frozen=True)
class Setup:
    """A training or an evaluation, as far as the checks look at it."""

    tokenizer: Tokenizer
    options: EpisodeOptions
    tools: tuple[ToolDescription, ...] = ()
    """What the server has; empty if nobody knows."""
    rows: tuple[Row, ...] = ()
    """Of all files, a part of each."""
    drops_overlong: bool = False
    """Rows whose prompt is longer than `max_prompt_length` without any tools are left out before the training."""
    context_length: int | None = None
    """Tokens that the model has positions for."""

    @cached_property
    def prompts(self) -> PromptRenderer:
        """That of the training. Raises ConfigError."""
        return PromptRenderer(self.tokenizer, self.options, self.tools)

    @cached_property
    def loop_formats(self) -> LoopFormats:
        """Those in which the loop finds calls, row by row. Raises ConfigError."""
        return LoopFormats(self.options.formats, self.tools)

    @property
    def formats(self) -> tuple[Format, ...]:
        """All of them. Raises ConfigError."""
        return self.loop_formats.all

    @cached_property
    def renderer(self) -> ObservationRenderer:
        """That of the training. Raises ConfigError if the template cannot serve."""
        return self.prompts.observations()

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens at which generation ends. Raises ConfigError."""
        return self.renderer.end_token_ids | self.tokenizer.eos_token_ids

    @cached_property
    def taught(self) -> Format:
        """The format that a prompt teaches: the one that ends at the stop strings, or whose usage stands in the prompt,
        or of the calls that the template writes, or the first that is named. Raises ConfigError."""
        stops = set(self.options.action_stop_tokens)
        named = self.options.formats is not None
        if stops:
            return next((each for each in self.formats if stops.intersection(each.stop)), self.formats[0])
        ordered = self.formats if named else (HERMES, *NATIVE, *self.formats)
        described = self.prompts.described_tools()
        if described and ordered[0].usage(described).strip() in (self.prompt_text(None) or ""):
            return ordered[0]
        return next(filter(self.template_writes, ordered), ordered[0])

    def template_writes(self, fmt: Format) -> bool:
        """Whether the calls that the chat template writes are of that format."""
        try:
            return TemplateCalls(self.tokenizer, [fmt]).found
        except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
            return False

    @cached_property
    def example_tools(self) -> tuple[ToolDescription, ...]:
        """The tools of an example: those that a prompt tells of, else all of the server's, else a made-up one."""
        return self.prompts.described_tools() or self.tools or (MADE_UP_TOOL,)

    @cached_property
    def example(self) -> ExampleCall | None:
        """A call as the model would write it, in the format that the prompt teaches; None if none is known."""
        return example_of(self.taught, self.example_tools, self.options.action_stop_tokens)

    @cached_property
    def closing_text(self) -> str:
        """What the chat template writes behind the last word of an answer; empty if it refuses a turn of the model."""
        text = self.rendered([*QUESTION, {"role": "assistant", "content": MODEL_MARK}]) or ""
        return text.partition(MODEL_MARK)[2]

    def prompt(self, row: Row | None) -> str:
        """What the model sees first, of a row or of `QUESTION`. Raises ConfigError, and what the template raises."""
        if row is None:
            return self.prompts.text(QUESTION)
        return self.prompts.text(row.messages, row.listed)

    def prompt_text(self, row: Row | None) -> str | None:
        """As `prompt`; None if there is none, which `problem_of_prompt` explains."""
        try:
            return self.prompt(row)
        except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
            return None

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation: bool = False,
    ) -> str | None:
        """A conversation as the chat template renders it; None if it refuses it."""
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=generation, tools=tools)
        except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
            return None

    def problem_of_prompt(self, row: Row | None) -> str | None:
        """Why a row has no prompt, if it has none."""
        try:
            self.prompt(row)
        except ConfigError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - a template is a program, and raises what it likes
            return f"the chat template fails: {type(error).__name__}: {error}"
        return None

"""Run a trajectory of the real loop in which a scripted model writes one call and an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_tool.agent_loop.action_tokens import action_mask
from verl_tool.agent_loop.actions import stopped_action
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.opened_prompt import PromptOpener
from verl_tool.agent_loop.tool_channel import Tools
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.checks.setup import Row, Setup
from verl_tool.formats import Call
from verl_tool.formats.find import calls_sent, find_calls
from verl_tool.formats.scan import THOUGHTS
from verl_tool.protocol import ENVIRONMENT_FIELD, StepResult

ANSWER = "That is the answer."
SUMMARY = "These are my notes."
THOUGHT = "<think>"


@dataclass(frozen=True)
class Demonstration:
    """The trajectory, and how its first turn was understood."""

    trajectory: Trajectory
    action_mask: tuple[int, ...]
    """1 on tokens of a call. [response_length]"""
    turn: str
    calls: tuple[Call, ...]
    end_reason: str
    """The stop string or the token that ended this turn. Empty if it was cut."""


class _Script:
    """Writes its turns one after the other, each up to `max_tokens`."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self._turns = [list(turn) for turn in turns]

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        turn = self._turns.pop(0) if len(self._turns) > 1 else self._turns[0]
        maximum = sampling_params.get("max_tokens", len(turn))
        return Generation(turn[:maximum], stop_reason="length" if maximum < len(turn) else "stop")


class StandIn:
    """Replaces missing tools. Answers every call with the same text, like a server."""

    def __init__(self, setup: Setup, words: str = "(the tool's answer)") -> None:
        self._setup, self._words = setup, words

    async def call(
        self,
        trajectory_id: str,
        action: str,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        finish: bool = False,
        is_last_step: bool = False,
    ) -> StepResult:
        """See `Tools`."""
        calls = calls_sent(action, self._setup.formats)
        render = calls[0].format.render if calls else self._setup.taught.render
        return StepResult(trajectory_id, render(self._words, calls[0] if calls else None))


async def demonstrate(setup: Setup, tools: Tools, row: Row | None = None, turn: str | None = None) -> Demonstration:
    """Run one trajectory from the prompt of `row`, or of a question if it is None. The model first writes `turn`.

    Without `turn`, it writes the example call, or an answer if there is none. The turn ends as that of a model: by a
    stop string, or by the end token that the chat template writes there. A context that is not append-only is cut as
    early as possible, so that the trajectory has several training rows.

    Raises ConfigError if options, template and formats do not fit together.
    """
    example = setup.example.text if setup.example is not None else ANSWER
    text = example if turn is None else turn
    prompt = setup.tokenizer.encode(setup.prompt(row))
    first, end_reason = _ended(setup, text, behind_a_call=True)
    last, _ = _ended(setup, ANSWER, behind_a_call=False)
    call, answer = setup.tokenizer.encode(text) + first, setup.tokenizer.encode(ANSWER) + last
    options, between = _cut_early(setup.options), []
    if options.context == "window":
        between = [call]
    elif options.context == "summarise":
        between = [setup.tokenizer.encode(SUMMARY) + last]
    elif options.context == "drop_thoughts" and turn is None and setup.example is not None:
        opening = "" if setup.tokenizer.decode(prompt).rstrip().endswith(THOUGHT) else f"{THOUGHT}\n"
        call = setup.tokenizer.encode(f"{opening}I need the tool.\n{THOUGHTS[THOUGHT]}\n\n{text}") + first
    turns = [call, *between, answer]
    script = _Script(turns)
    episode = Episode(script, tools, setup.tokenizer, options, formats=setup.formats)
    listed = None if row is None else row.listed
    formats = setup.loop_formats.of(listed)
    extra, open_prompt = {} if row is None else row.sent, None
    begins = row is not None and extra.pop(ENVIRONMENT_FIELD, None)
    if row is not None and begins is not None and not isinstance(tools, StandIn):
        extra[ENVIRONMENT_FIELD] = begins
        opener = PromptOpener(setup.prompts, setup.loop_formats.of)
        prompt, open_prompt = opener.of(row.messages, listed, row.where)
    trajectory = await episode.run(
        prompt,
        trajectory_id="doctor",
        use_tool=listed != () or open_prompt is not None,
        extra=extra,
        formats=formats,
        open_prompt=open_prompt,
        max_turns=None if open_prompt is None else len(turns),
    )
    await episode.aclose()
    return Demonstration(
        trajectory,
        tuple(action_mask(trajectory, setup.tokenizer, formats)),
        text,
        tuple(calls_sent(text, formats)),
        end_reason,
    )


def _cut_early(options: EpisodeOptions) -> EpisodeOptions:
    """Return options with which the context is cut as early as possible, so that the cut is visible."""
    enough_turns = {"max_turns": max(options.max_turns, 2)}
    updates: dict[str, dict[str, int | None]] = {
        "window": {"context_turns": 1, "context_tokens": None, **enough_turns},
        "summarise": {"context_tokens": 1, **enough_turns},
    }
    return options.model_copy(update=updates.get(options.context, {}))


def _ended(setup: Setup, text: str, *, behind_a_call: bool) -> tuple[list[int], str]:
    """Return the end token that a model writes after `text`, if needed, and a description of the end of the turn."""
    tokenizer, stops = setup.tokenizer, setup.options.action_stop_tokens
    stop = next((stop for stop in stops if stop in text), None)
    if stop is not None and stopped_action(text, stops) is not None:
        return [], f"the stop string {stop!r}"
    last = tokenizer.encode(text)[-1:]
    if last and last[0] in setup.ends:
        return [], f"the end token {tokenizer.decode(last)!r}"
    token = _end_token(setup, text if behind_a_call else None)
    return ([], "") if token is None else ([token], f"the end token {tokenizer.decode([token])!r}")


def _end_token(setup: Setup, call: str | None) -> int | None:
    """Return the end token that the chat template writes after a call or after an answer, or else any known one."""
    if call is not None and setup.options.enable_mtrl:
        renderer = setup.renderer
        segments = renderer.next(setup.tokenizer.encode(call), renderer.parts("…"), find_calls(call, setup.formats))
        behind = [token for segment in segments for token in segment.tokens]
    else:
        behind = setup.tokenizer.encode(setup.closing_text)
    return next((token for token in behind if token in setup.ends), min(setup.ends, default=None))

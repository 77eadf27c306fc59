"""A trajectory that goes on from a turn of another: the loop as ever, behind tokens and tool states that are there."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_tool.agent_loop.actions import length_to_stop
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation, Generator
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.tool_channel import Tools
from verl_tool.agent_loop.trajectory import Author, Segment, Trajectory
from verl_tool.errors import ConfigError
from verl_tool.protocol import TOOLS_FIELD, StepResult
from verl_tool.replay.branch.branch_point import BranchPoint
from verl_tool.replay.branch.model import Model
from verl_tool.replay.branch.run_loop import RunLoop


class FixedTurn:
    """A generator whose first turn is given; the model writes those behind it."""

    def __init__(self, turn: Generation, generator: Generator, tokenizer: Tokenizer) -> None:
        self._turn: Generation | None = turn
        self._generator, self._tokenizer = generator, tokenizer

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        """As `Generator.generate`. Raises ConfigError if the loop would never have let the model write such a turn."""
        turn, self._turn = self._turn, None
        if turn is None:
            return await self._generator.generate(prompt_ids, sampling_params, request_id)
        written, maximum = len(turn.token_ids), sampling_params.get("max_tokens")
        if maximum is not None and written > maximum:
            raise ConfigError(
                f"the action has {written} tokens, and the run's limits leave {maximum} to this turn; shorten it"
            )
        end = length_to_stop(turn.token_ids, sampling_params.get("stop") or (), self._tokenizer)
        if end is not None and end < written:
            rest = self._tokenizer.decode(turn.token_ids[end:])
            raise ConfigError(f"the action goes on behind its stop string with {rest[:80]!r}; leave that out")
        return turn


class FixedAnswer:
    """Tools whose first answer is given; nothing is called for it."""

    def __init__(self, answer: StepResult, tools: Tools) -> None:
        self._answer: StepResult | None = answer
        self._tools = tools

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
        if self._answer is not None and not finish:
            answer, self._answer = self._answer, None
            return replace(answer, trajectory_id=trajectory_id)
        return await self._tools.call(
            trajectory_id, action, step=step, extra=extra, finish=finish, is_last_step=is_last_step
        )


@dataclass(frozen=True)
class Continuation:
    """Goes on from branch points, with the loop of a run."""

    loop: RunLoop
    model: Model
    tools: Tools | None

    async def run(self, point: BranchPoint, trajectory_id: str) -> Trajectory:
        """The trajectory from `point` to its end. The tools have the state of then under `trajectory_id`.

        The tokens before the point are those of the record, with their log-probabilities. What is edited is encoded as
        the loop encodes it, and marked (`Segment.edited`). Raises what `Episode.run` raises, and ConfigError if an
        edited action is one that the model could not have written.
        """
        row, loop, partial = point.row, self.loop, point.partial
        uses_tools = self.tools is not None and row.use_tool and row.tools != ()
        episode = Episode(
            self._generator(point),
            self._tools(point),
            loop.tokenizer,
            loop.options,
            renderer=loop.prompts.observations(row.tools if uses_tools else ()),
            formats=loop.formats.of(row.tools),
        )
        extra = dict(row.tools_kwargs)
        if row.tools is not None:
            extra[TOOLS_FIELD] = list(row.tools)
        try:
            trajectory = await episode.run(
                partial.prompt_ids,
                partial=partial,
                sampling_params=self.model.sampling_params,
                trajectory_id=trajectory_id,
                use_tool=uses_tools,
                extra=extra,
                max_turns=row.max_turns,
                verification=row.verification,
                task_prompt=functools.partial(loop.prompts.task_ids, row.messages, row.tools),
            )
        finally:
            await episode.aclose()
        return replace(trajectory, segments=_marked(trajectory.segments, len(partial.segments), point))

    def _generator(self, point: BranchPoint) -> Generator:
        if point.edit is None:
            return self.model.generator
        if point.edit.part == "action":
            turn = Generation(self.loop.tokenizer.encode(point.edit.text), stop_reason="stop")
        else:
            recorded = point.recorded_turn
            turn = Generation(recorded.tokens, recorded.log_probs, "stop")
        return FixedTurn(turn, self.model.generator, self.loop.tokenizer)

    def _tools(self, point: BranchPoint) -> Tools | None:
        answer = point.edited_answer
        return self.tools if answer is None or self.tools is None else FixedAnswer(answer, self.tools)


def _marked(segments: Sequence[Segment], first: int, point: BranchPoint) -> tuple[Segment, ...]:
    """`segments` with the edited ones marked; `first`: where those behind the beginning start."""
    if point.edit is None:
        return tuple(segments)
    beginning, new = segments[:first], list(segments[first:])
    if point.edit.part == "action":
        return (*beginning, replace(new[0], edited=True), *new[1:])
    end = next((i for i, s in enumerate(new) if i and s.is_turn), len(new))
    results = [replace(s, edited=True) if s.author is Author.TOOL else s for s in new[1:end]]
    return (*beginning, new[0], *results, *new[end:])

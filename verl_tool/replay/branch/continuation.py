"""Continue a trajectory from a turn: the usual loop, after recorded tokens and with a rebuilt tool state."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_tool.agent_loop.actions import length_to_stop
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation, Generator
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.tool_channel import Tools, queue_timeout_of
from verl_tool.agent_loop.trajectory import Author, Segment, Trajectory
from verl_tool.errors import ConfigError
from verl_tool.protocol import TOOLS_FIELD, StepResult
from verl_tool.replay.branch.branch_point import BranchPoint
from verl_tool.replay.branch.model import Model
from verl_tool.replay.branch.run_loop import RunLoop


class FixedTurn:
    """A generator that returns a fixed first turn. The model writes the later ones."""

    def __init__(self, turn: Generation, generator: Generator, tokenizer: Tokenizer) -> None:
        self._turn: Generation | None = turn
        self._generator, self._tokenizer = generator, tokenizer

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        """Implement `Generator.generate`. Raises ConfigError if the loop would not allow the fixed turn."""
        turn, self._turn = self._turn, None
        if turn is None:
            return await self._generator.generate(prompt_ids, sampling_params, request_id)
        length, maximum = len(turn.token_ids), sampling_params.get("max_tokens")
        if maximum is not None and length > maximum:
            raise ConfigError(
                f"the action has {length} tokens, but the run's limits leave {maximum} for this turn; shorten it"
            )
        end = length_to_stop(turn.token_ids, sampling_params.get("stop") or (), self._tokenizer)
        if end is not None and end < length:
            rest = self._tokenizer.decode(turn.token_ids[end:])
            raise ConfigError(f"the action has text after its stop string: {rest[:80]!r}; leave that out")
        return turn


class FixedAnswer:
    """Tools with a fixed answer to the first call, which is not run."""

    def __init__(self, answer: StepResult, tools: Tools) -> None:
        self._answer: StepResult | None = answer
        self._tools = tools
        self.queue_timeout = queue_timeout_of(tools)

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
    """Continues from branch points, with the loop of a run."""

    loop: RunLoop
    model: Model
    tools: Tools | None

    async def run(self, point: BranchPoint, trajectory_id: str) -> Trajectory:
        """Run the trajectory from `point` to its end. The tools must have the state at `point` under `trajectory_id`.

        Tokens before the point come from the record, with their log-probabilities. An edit is encoded as in the loop
        and marked (`Segment.edited`). Raises ConfigError if the model could not have written an edited action, and the
        errors of `Episode.run`.
        """
        row, loop, partial = point.row, self.loop, point.partial
        uses_tools = self.tools is not None and row.use_tool and row.tools != ()
        episode = Episode(
            self._make_generator(point),
            self._make_tools(point),
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
        return replace(trajectory, segments=_mark_edited(trajectory.segments, len(partial.segments), point))

    def _make_generator(self, point: BranchPoint) -> Generator:
        if point.edit is None:
            return self.model.generator
        if point.edit.part == "action":
            turn = Generation(self.loop.tokenizer.encode(point.edit.text), stop_reason="stop")
        else:
            recorded = point.recorded_turn
            turn = Generation(recorded.tokens, recorded.log_probs, "stop")
        return FixedTurn(turn, self.model.generator, self.loop.tokenizer)

    def _make_tools(self, point: BranchPoint) -> Tools | None:
        answer = point.edited_answer
        return self.tools if answer is None or self.tools is None else FixedAnswer(answer, self.tools)


def _mark_edited(segments: Sequence[Segment], first: int, point: BranchPoint) -> tuple[Segment, ...]:
    """Mark the edited segments. `first` is the index of the first segment after the recorded ones."""
    if point.edit is None:
        return tuple(segments)
    recorded, new = segments[:first], list(segments[first:])
    if point.edit.part == "action":
        return (*recorded, replace(new[0], edited=True), *new[1:])
    end = next((i for i, s in enumerate(new) if i and s.is_turn), len(new))
    results = [replace(s, edited=True) if s.author is Author.TOOL else s for s in new[1:end]]
    return (*recorded, new[0], *results, *new[end:])

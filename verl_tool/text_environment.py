"""A model and its tools in a notebook, with the interface of TRL's former `TextEnvironment`.

    env = TextEnvironment(model, tokenizer, [SimpleCalculatorTool], reward_fn, prompt)
    queries, responses, masks, rewards, histories = env.run(["13.1-3 is", "2*2 is"])
    histories[0].show_text()

The dialect is TRL's: ``<request><Tool>query<call>answer<response> … <submit>``. The loop is the one that trains.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from verl_tool.agent_loop.episode import Episode, Tools
from verl_tool.agent_loop.function_tools import Function, FunctionTools
from verl_tool.agent_loop.generator import Generator
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.rollout import Start, rollout
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.client import ToolClient
from verl_tool.formats import TRL
from verl_tool.text_history import TextHistory

_Result = TypeVar("_Result")
RewardFunction = Callable[..., Sequence[Any]]


class TextEnvironment:
    """Runs tasks, all at once, and gives what a trainer needs."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tools: str | Mapping[str, Function] | Iterable[Function] = (),
        reward_fn: RewardFunction | None = None,
        prompt: str = "",
        max_turns: int = 4,
        max_tool_response: int = 100,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        `model`: a transformers model, or any `Generator` (its ``generate`` is a coroutine function).
        `tokenizer`: transformers'.
        `tools`: Python functions by the names that the model calls, functions or callable objects (named as the
        function, or as the object's class), or the URL of a tool server.
        `reward_fn`: is given the last text segment of each history, and the keyword arguments of `run`.
        `prompt`: stands before each task.
        `max_turns`: turns of the model; a tool's answer to the last one is kept and not continued.
        `max_tool_response`: characters of a function's output; tokens of an observation if `tools` is a URL.
        `max_length`: tokens of a whole history.
        `generation_kwargs`: for ``model.generate``; sampling parameters if `model` is a `Generator`.
        """
        self.model, self.tokenizer, self.reward_fn, self.prompt = model, tokenizer, reward_fn, prompt
        self._tokenizer = HFTokenizer(tokenizer)
        self._tools: str | FunctionTools = (
            tools if isinstance(tools, str) else FunctionTools(tools, (TRL,), max_tool_response)
        )
        self._kwargs = dict(generation_kwargs or {})
        self._is_generator = inspect.iscoroutinefunction(model.generate)
        self._options = EpisodeOptions(
            action_stop_tokens=TRL.stop,
            max_turns=max_turns,
            force_finish_for_last_turn=True,
            max_obs_length=max_tool_response if isinstance(tools, str) else None,
            max_model_len=max_length,
            max_action_length=None if self._is_generator else self._kwargs.pop("max_new_tokens", None),
            enable_tqdm=False,
        )

    def run(
        self, tasks: Sequence[str], **rewards_kwargs: Any
    ) -> tuple[list[Any], list[Any], list[Any], list[Any], list[TextHistory]]:
        """Queries, responses, masks, rewards and histories, one a task, in order.

        Token ids and masks are tensors if the model is transformers', else lists. A mask is 1 on tokens of the model;
        it is 0 throughout if the tool server failed (`TextHistory.fault`). Works within a running event loop too.
        """
        trajectories = _run(self._trajectories(tasks))
        histories = [TextHistory(trajectory) for trajectory in trajectories]
        if self.reward_fn is not None:
            rewards = self.reward_fn([history.last_text_segment for history in histories], **rewards_kwargs)
            for history, reward in zip(histories, rewards, strict=True):
                history.reward = reward
        return (
            [self._ids(t.prompt_ids) for t in trajectories],
            [self._ids(t.response_ids) for t in trajectories],
            [self._ids(t.loss_mask) for t in trajectories],
            [history.reward for history in histories],
            histories,
        )

    async def _trajectories(self, tasks: Sequence[str]) -> list[Trajectory]:
        if isinstance(self._tools, str):
            async with ToolClient(self._tools) as client:
                return await self._rollout(client, tasks)
        return await self._rollout(self._tools, tasks)

    async def _rollout(self, tools: Tools, tasks: Sequence[str]) -> list[Trajectory]:
        queries = [self.prompt + task for task in tasks]
        params = self._kwargs if self._is_generator else {}
        # As in TRL, a query is encoded with the tokenizer's start token, if it has one.
        starts = [Start(self.tokenizer.encode(q, add_special_tokens=True), sampling_params=params) for q in queries]
        return await rollout(Episode(self._generator(), tools, self._tokenizer, self._options), starts)

    def _generator(self) -> Generator:
        if self._is_generator:
            generator: Generator = self.model
            return generator
        # torch is imported only where a model of it is used.
        from verl_tool.agent_loop.transformers_generator import TransformersGenerator

        return TransformersGenerator(self.model, self._tokenizer, self._kwargs)

    def _ids(self, ids: list[int]) -> Any:
        if self._is_generator:
            return ids
        import torch

        return torch.tensor(ids, dtype=torch.long)


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, in a thread of its own if this one already runs an event loop, as notebooks do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: list[_Result | BaseException] = []

    def target() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that called
            outcome.append(error)

    thread = threading.Thread(target=target, name="TextEnvironment.run")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]

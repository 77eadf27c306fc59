"""A model and its tools in a notebook, with the interface of TRL's former `TextEnvironment`.

    env = TextEnvironment(model, tokenizer, [SimpleCalculatorTool], reward_fn, prompt)
    queries, responses, masks, rewards, histories = env.run(["13.1-3 is", "2*2 is"])
    histories[0].show_text()

The tool-call format is TRL's unless `formats` names others: ``<request><Tool>query<call>answer<response> … <submit>``.
The loop is that of training. See assets/docs/text_environment.md.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.function_arguments import Function
from verl_tool.agent_loop.function_tools import FunctionTools, by_name
from verl_tool.agent_loop.generators.base import Generator
from verl_tool.agent_loop.generators.qwen_images import QwenImages
from verl_tool.agent_loop.options import EpisodeOptions, ToolPrompt, ToolSchemas
from verl_tool.agent_loop.prompt.opened_prompt import PromptOpener
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.prompt.subagents import DELEGATE
from verl_tool.agent_loop.rollout import RolloutStart, rollout
from verl_tool.agent_loop.row import build_call_extra
from verl_tool.agent_loop.tokenizer import HFTokenizer, token_ids
from verl_tool.agent_loop.tool_channel import Tools
from verl_tool.agent_loop.trajectory import Excluded, Trajectory
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import Format, Tag, claim, format_by_name
from verl_tool.formats.tags import OwnTagFormat
from verl_tool.notebook.text_history import TextHistory
from verl_tool.protocol import ENVIRONMENT_FIELD, FILES_FIELD, ToolDescription
from verl_tool.verification import (
    AnyVerification,
    EnvironmentVerification,
    Verification,
    read_verification,
)

_Result = TypeVar("_Result")
RewardFunction = Callable[..., Sequence[Any]]
OWN_TAGS = "tags"
"""The format in which each tool has a tag of its own name; with functions, ``<finish/>`` ends the trajectory."""


@dataclass(frozen=True)
class _Task:
    """One of those that `TextEnvironment.run` is given."""

    text: str
    extra: Mapping[str, Any]
    """Sent to the tools."""
    verification: AnyVerification | None


class TextEnvironment:
    """Runs tasks, all at once, and gives what a trainer needs."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tools: str | Mapping[str, Function] | Iterable[Function] | None = (),
        reward_fn: RewardFunction | None = None,
        prompt: str | None = "",
        max_turns: int = 4,
        max_tool_response: int | None = None,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        max_tool_reponse: int | None = None,
        formats: str | Format | Sequence[str | Format] = "trl",
        chat: bool = False,
        tool_schemas: ToolSchemas = "auto",
        tool_prompt: ToolPrompt = "auto",
        image_processor: Any = None,
        subagents: bool = False,
        fault_reward: float = 0.0,
    ) -> None:
        """
        `model`: a transformers model, or any `Generator` (its ``generate`` is a coroutine function).
        `tokenizer`: transformers'.
        `tools`: Python functions by the names that the model calls, functions or callable objects (named as the
        function, or as the object's class), or the URL of a tool server. How a call becomes a function's arguments:
        `verl_tool.agent_loop.function_arguments`.
        `reward_fn`: is given the last text segment of each history, and the keyword arguments of `run`.
        `prompt`: stands before each task; with `chat`, the system message.
        `max_turns`: turns of the model; a tool's answer to the last one is kept and not continued.
        `max_tool_response`: characters of a function's output; tokens of an observation if `tools` is a URL. Default:
        100. `max_tool_reponse` is TRL's spelling of it.
        `max_length`: tokens of a whole history.
        `generation_kwargs`: for ``model.generate``, TRL's ``eos_token_id=-1`` (none ends a turn) included; sampling
        parameters if `model` is a `Generator`.
        `formats`: tool-call formats, by name (see `format_by_name`) or as objects; ``tags`` is ``<name>…</name>`` for
        each function, or for each tool of the server, which is asked for them at once. A tool server finds calls in the
        formats of its own tools: there these say where a turn stops.
        `chat`: a task is a user's message, rendered by the tokenizer's chat template; the model's turn ends where the
        template ends one, and an observation is the next message. Else all is one text, and a turn stops at the
        formats' stop strings.

        `image_processor`: transformers', of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL, with which the model reads images of
        tools; a `Generator` takes them then (`ImageGenerator`). None: the model reads text only.

        `subagents`: the model may delegate tasks, as with the loop's option. `run` gives the main agent's tokens; those
        of sub-agents are in `TextHistory.trajectory.rows`.

        `fault_reward`: of a trajectory whose own action may have caused the fault that ended it, if a verification or
        an environment was to judge it. Set it to the lowest reward there is.

        `tool_schemas`, `tool_prompt`: which tools a chat's prompt tells of, and how; as the loop's options
        (`EpisodeOptions`). Default: all of them.

        Raises ConfigError for arguments that contradict each other, and for a server that does not tell its tools where
        `formats` needs them.
        """
        if not chat and tool_schemas not in ("auto", "none"):
            raise ConfigError(
                f"tool_schemas={tool_schemas!r} with chat=False: a text has no place for schemas; write `usage()` into "
                "`prompt`, or set chat=True"
            )
        visible = _only_one(max_tool_response=max_tool_response, max_tool_reponse=max_tool_reponse)
        max_visible = 100 if visible is None else visible
        # TRL's models with a value head hold the one that generates.
        self.model = getattr(model, "pretrained_model", model)
        self.tokenizer, self.reward_fn, self.prompt = tokenizer, reward_fn, prompt or ""
        provided = [formats] if isinstance(formats, (str, Format)) else list(formats)
        functions = None if isinstance(tools, str) else by_name(tools or ())
        own_tags = [*(functions or {}), *([DELEGATE.name] if subagents else []), "finish"]
        self._formats = _formats(provided, tools if isinstance(tools, str) else own_tags)
        self._tools = tools if isinstance(tools, str) else FunctionTools(functions or {}, self._formats, max_visible)
        self._kwargs = dict(generation_kwargs or {})
        self._is_generator = inspect.iscoroutinefunction(self.model.generate)
        # A model may name further end tokens than its tokenizer.
        more = () if self._is_generator else token_ids(self.model.generation_config.eos_token_id)
        self._tokenizer = HFTokenizer(tokenizer, more_eos_token_ids=more)
        if not self._is_generator and "eos_token_id" in self._kwargs:
            # The loop must take the same tokens for a turn's end as the model does.
            self._tokenizer.eos_token_ids = frozenset(token_ids(self._kwargs["eos_token_id"]))
        self._options = EpisodeOptions(
            action_stop_tokens=() if chat else _stops(self._formats),
            enable_mtrl=chat,
            tool_schemas=tool_schemas,
            tool_prompt=tool_prompt,
            subagents=subagents,
            max_turns=max_turns,
            force_finish_for_last_turn=True,
            max_obs_length=max_visible if isinstance(tools, str) else None,
            max_model_len=max_length,
            max_action_length=None if self._is_generator else self._kwargs.pop("max_new_tokens", None),
            enable_tqdm=False,
        )
        self._fault_reward = fault_reward
        self._images = QwenImages(image_processor, self._tokenizer) if image_processor is not None else None

    def usage(self) -> str:
        """How to call the tools, in words for a prompt, in the first of `formats`."""
        own = [DELEGATE] if self._options.subagents else []
        return self._formats[0].usage([*_run(self._descriptions()), *own])

    def run(
        self,
        tasks: Sequence[str] | None = None,
        *,
        queries: Sequence[str] | None = None,
        files: Sequence[Any] | None = None,
        verifications: Sequence[Any] | None = None,
        environments: Sequence[Mapping[str, Any]] | None = None,
        **rewards_kwargs: Any,
    ) -> tuple[list[Any], list[Any], list[Any], list[Any], list[TextHistory]]:
        """Queries, responses, masks, rewards and histories, one a task, in order.

        Token ids and masks are tensors if the model is transformers', else lists. A mask is 1 on tokens of the model;
        it is 0 throughout if the tool server failed and no call can have caused it (`TextHistory.fault`). Works within
        a running event loop too. `queries` is TRL's name of `tasks`.

        `files`, one a task: what is in its workspace when its first call comes, as a row's ``workspace_files``, or
        None. `verifications`, one a task: what looks at the workspace after the trajectory's end and gives the reward
        in place of `reward_fn`, as a `Verification`, its JSON or a mapping, or None: the reward is 0. Both need a tool
        server with a workspace.

        `environments`, one a task: the arguments of the environment in which it begins, as a row's
        ``tools_kwargs.environment``; ``{}`` if there are none. It shows its own first messages behind the task, which
        may be empty, and gives the reward. Needs `chat` and the URL of a tool server that serves one.

        Raises ConfigError if tasks are no texts, files or a verification cannot be read or have no workspace, or if a
        tool answers with an image and there is no `image_processor`.
        """
        requested = self._request(_texts(_only_one(tasks=tasks, queries=queries)), files, verifications, environments)
        trajectories = _run(self._trajectories(requested))
        trajectories = [
            _graded(trajectory, task, self._fault_reward)
            for trajectory, task in zip(trajectories, requested, strict=True)
        ]
        histories = [TextHistory(trajectory, trajectory.reward or 0.0) for trajectory in trajectories]
        if self.reward_fn is not None:
            rewards = self.reward_fn([history.last_text_segment for history in histories], **rewards_kwargs)
            for history, reward in zip(histories, rewards, strict=True):
                history.reward = reward
        main = [trajectory.rows[-1] for trajectory in trajectories]
        return (
            [self._ids(t.prompt_ids) for t in main],
            [self._ids(t.response_ids) for t in main],
            [self._ids(t.loss_mask) for t in main],
            [history.reward for history in histories],
            histories,
        )

    async def _descriptions(self) -> list[ToolDescription]:
        if not isinstance(self._tools, str):
            return self._tools.describe()
        async with ToolClient(self._tools) as client:
            return await client.tools()

    def _request(
        self,
        texts: Sequence[str],
        files: Sequence[Any] | None,
        verifications: Sequence[Any] | None,
        environments: Sequence[Mapping[str, Any]] | None,
    ) -> list[_Task]:
        if environments is not None:
            return self._in_environments(texts, environments, exclusive=[files, verifications, self.reward_fn])
        if not isinstance(self._tools, str) and (files is not None or verifications is not None):
            raise ConfigError(
                "files and verifications need a workspace, and functions have none; give as `tools` the URL of a tool "
                "server that has one, such as bash_terminal's"
            )
        if verifications is not None and self.reward_fn is not None:
            raise ConfigError("reward_fn and verifications both give the reward; leave one of them out")
        requested = []
        for i, (text, packed, verification) in enumerate(
            zip(texts, _one_each("files", files, texts), _one_each("verifications", verifications, texts), strict=True)
        ):
            extra = build_call_extra({FILES_FIELD: packed}, None, f"task {i}")
            if not isinstance(verification, Verification | None):
                verification = read_verification(verification, f"task {i}")
            requested.append(_Task(text, extra, verification))
        return requested

    def _in_environments(
        self, texts: Sequence[str], environments: Sequence[Mapping[str, Any]], exclusive: Sequence[object]
    ) -> list[_Task]:
        if not isinstance(self._tools, str) or not self._options.enable_mtrl:
            raise ConfigError("environments need chat=True, and as `tools` the URL of a tool server that serves one")
        if any(each is not None for each in exclusive):
            raise ConfigError("an environment gives the reward; leave out files, verifications and reward_fn")
        tasks = zip(texts, _one_each("environments", environments, texts), strict=True)
        return [
            _Task(text, build_call_extra({ENVIRONMENT_FIELD: arguments}, None, f"task {i}"), EnvironmentVerification())
            for i, (text, arguments) in enumerate(tasks)
        ]

    async def _trajectories(self, tasks: Sequence[_Task]) -> list[Trajectory]:
        if not isinstance(self._tools, str):
            return await self._rollout(self._tools, tasks, self._options)
        options = self._options
        seconds = {"timeout": options.tool_call_timeout, "queue_timeout": options.tool_queue_timeout}
        async with ToolClient(self._tools, **seconds) as client:  # type: ignore[arg-type]
            return await self._rollout(client, tasks, options)

    async def _rollout(self, tools: Tools, tasks: Sequence[_Task], options: EpisodeOptions) -> list[Trajectory]:
        params = self._kwargs if self._is_generator else {}
        description: list[ToolDescription] = []
        if self._options.describes_tools:
            description = await (tools.tools() if isinstance(tools, ToolClient) else self._descriptions())
        prompts = PromptRenderer(self._tokenizer, self._options, description, self._formats)
        opener = PromptOpener(prompts, lambda listed: self._formats)
        starts = []
        for task in tasks:
            open_prompt = None
            if ENVIRONMENT_FIELD in task.extra:
                prompt_ids, open_prompt = opener.of(self._messages(task.text), None, f"task {task.text!r:.80}")
            else:
                prompt_ids = self._prompt_ids(task.text, prompts)
            starts.append(
                RolloutStart(
                    prompt_ids,
                    sampling_params=params,
                    extra=task.extra,
                    verification=task.verification,
                    task_prompt=functools.partial(self._prompt_ids, prompts=prompts),
                    open_prompt=open_prompt,
                )
            )
        episode = Episode(
            *(self._generator(), tools, self._tokenizer, options),
            renderer=prompts.observations(),
            formats=self._formats,
            image_tokens=self._images,
        )
        return await rollout(episode, starts)

    def _prompt_ids(self, task: str, prompts: PromptRenderer) -> list[int]:
        if self._options.enable_mtrl:
            return prompts.ids(self._messages(task), None, f"task {task!r:.80}")
        # As in TRL, a query is encoded with the tokenizer's start token, if it has one.
        ids: list[int] = self.tokenizer.encode(self.prompt + task, add_special_tokens=True)
        return ids

    def _messages(self, task: str) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.prompt}] if self.prompt else []
        return [*system, {"role": "user", "content": task}] if task else system

    def _generator(self) -> Generator:
        if self._is_generator:
            generator: Generator = self.model
            return generator
        # torch is imported only where a model of it is used.
        from verl_tool.agent_loop.generators.transformers_generator import TransformersGenerator

        return TransformersGenerator(self.model, self._tokenizer, self._kwargs, images=self._images)

    def _ids(self, ids: list[int]) -> Any:
        if self._is_generator:
            return ids
        import torch

        return torch.tensor(ids, dtype=torch.long)


def _formats(given: Sequence[str | Format], named: str | Sequence[str]) -> tuple[Format, ...]:
    """The formats by name or as they are. `named`: what gets tags, names of functions or the URL of a tool server."""
    if not given:
        raise ConfigError("formats is empty; name at least one, such as 'trl' or 'hermes'")
    found: list[Format] = []
    for each in given:
        if not isinstance(each, str):
            found.append(each)
        elif each != OWN_TAGS:
            found.append(format_by_name(each))
        else:
            found.append(_tags_of(_run(_tag_names(named)) if isinstance(named, str) else named))
    return tuple(found)


async def _tag_names(url: str) -> list[str]:
    """The names by which the tools of a server are called as tags. Raises ConfigError if it does not tell any."""
    try:
        async with ToolClient(url, max_retries=0) as client:
            names = [spec[1:-1] for tool in await client.tools() for spec in tool.formats if spec.startswith("<")]
    except ToolFault as fault:
        raise ConfigError(
            f"formats='tags' takes the names of the tools, and {url} does not tell them: {fault.message}; start it, or "
            "give the tags themselves, such as formats=['<calculator>']"
        ) from fault
    if not names:
        raise ConfigError(f"formats='tags', and no tool of {url} is called by a tag of its name; name other formats")
    return names


def _tags_of(names: Sequence[str]) -> OwnTagFormat:
    wrong = [name for name in names if not Tag.can_be(name)]
    if wrong:
        raise ConfigError(
            f"the tool {wrong[0]!r} cannot be called by a tag; give it a name: tools={{'name': function}}"
        )
    tags = OwnTagFormat(OWN_TAGS, [Tag.named(name) for name in dict.fromkeys(names)])
    claim(*tags.markers())
    return tags


def _stops(formats: Sequence[Format]) -> tuple[str, ...]:
    for each in formats:
        if not each.stop:
            raise ConfigError(f"the format {each.name!r} has no stop string that ends a call in a text; set chat=True")
    return tuple(dict.fromkeys(stop for each in formats for stop in each.stop))


def _only_one(**names: _Result | None) -> _Result | None:
    """The one that was given, of two names of one argument. Raises ConfigError if both were, with two values."""
    provided = {name: value for name, value in names.items() if value is not None}
    first = next(iter(provided.values()), None)
    if any(value is not first and value != first for value in provided.values()):
        raise ConfigError(f"{' and '.join(provided)} are one argument under two names; give just one of them")
    return first


def _one_each(name: str, given: Sequence[Any] | None, tasks: Sequence[str]) -> Sequence[Any]:
    if given is None:
        return [None] * len(tasks)
    if len(given) != len(tasks):
        raise ConfigError(f"{name} has {len(given)} entries for {len(tasks)} tasks; give one a task, None for none")
    return given


def _graded(trajectory: Trajectory, task: _Task, fault_reward: float) -> Trajectory:
    """With its verdict's reward, as the reward managers ``terminal`` and ``environment`` give it. Out of the loss
    without one, unless the trajectory's own action may be why."""
    verdict = trajectory.verdict
    if verdict is None:
        is_own_fault = trajectory.fault is not None and trajectory.excluded is None
        return trajectory.with_reward(fault_reward) if task.verification is not None and is_own_fault else trajectory
    if verdict.score is None:
        return replace(trajectory, excluded=trajectory.excluded or Excluded.GRADER)
    return trajectory.with_reward(fault_reward if verdict.reward is None else verdict.score)


def _texts(tasks: Sequence[str] | None) -> Sequence[str]:
    if tasks is None or isinstance(tasks, str):
        raise ConfigError(f"run takes a list of tasks, and was given {tasks!r}")
    for i, task in enumerate(tasks):
        if not isinstance(task, str):
            raise ConfigError(f"task {i} is a {type(task).__name__}; this environment carries text only")
    return tasks


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

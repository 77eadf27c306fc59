"""The loop inside verl: an `AgentLoopBase` that runs an `Episode`. Written for verl 0.9.0 and 0.9.1.

verl makes one agent loop a trajectory; those of one worker process share an `Episode`, so that limits on how many run
at once and connections to the tool server are the worker's.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from pydantic import Field
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_tool.agent_loop.action_tokens import action_mask
from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.verl.config import options_in
from verl_tool.agent_loop.end_tokens import generation_end_tokens
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.verl.progress_report import ProgressReport
from verl_tool.agent_loop.verl.told_tools import tools_in
from verl_tool.agent_loop.row import (
    VALIDATION,
    listed_tools,
    own_max_turns,
    refuse_media,
    sent_to_tools,
    text_messages,
    uses_tools,
)
from verl_tool.agent_loop.generators.single_engine import without_detour
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import LOOP_FAULT, Excluded, Trajectory
from verl_tool.agent_loop.generators.verl_generator import EngineUse, VerlGenerator
from verl_tool.client import ToolClient
from verl_tool.formats import ALL_FORMATS, Format
from verl_tool.errors import ConfigError
from verl_tool.verification import verification_of


class ToolLoopOutput(AgentLoopOutput):
    """What verl takes from an agent loop, which tokens are calls, and which turn each is of."""

    action_mask: list[int] = Field(default_factory=list)
    """1 on tokens of a call. [response_length]"""
    turn_ids: list[int] = Field(default_factory=list)
    """As `Trajectory.turn_ids`. [response_length]"""

    def as_dict(self) -> dict[str, Any]:
        """verl's newer trainer stores these fields as they are."""
        fields = super().as_dict()
        for name in ("action_mask", "turn_ids"):
            fields[name] = torch.tensor(fields[name], dtype=torch.int64)
        extra = fields["extra_fields"]
        if extra[LOOP_FAULT]:
            # A filter of groups must not take faults for answers that are all wrong, and sample anew for ever.
            extra["reward_extra_info"] = {
                name: math.nan if isinstance(value, int | float) else value
                for name, value in extra.get("reward_extra_info", {}).items()
            }
        return fields


class _Worker:
    """What the agent loops of one worker process share."""

    def __init__(self, config: DictConfig, client: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        self.options = options_in(config)
        self.validation = self.options.of_validation()
        model = config.actor_rollout_ref.model
        more = generation_end_tokens(
            model.get("hf_config_path") or model.path, trust_remote_code=bool(model.get("trust_remote_code", False))
        )
        self.tokenizer = HFTokenizer(tokenizer, template_kwargs, more)
        tools = tools_in(config)
        self.prompts = PromptRenderer(self.tokenizer, self.options, tools)
        if self.options.tells_of_tools and not self.prompts.tools:
            raise ConfigError(
                "the prompts shall tell of the tools, and the config does not have them (tool_server.tools); "
                "verl_tool.trainer.main_ppo asks the tool server for them. To tell of none: "
                "actor_rollout_ref.agent.tool_schemas=none"
            )
        self.generator = VerlGenerator(without_detour(client), config.actor_rollout_ref.rollout.get("name"))
        self.formats = LoopFormats(self.options.formats, tools)
        self.episode = Episode(
            *(self.generator, self._tools(), self.tokenizer, self.options),
            renderer=self.prompts.observations(),
            formats=self.formats.all,
        )
        self.progress = ProgressReport() if self.options.enable_tqdm else None

    def _tools(self) -> ToolClient | None:
        if not self.options.enable_agent or self.options.tool_server_url is None:
            return None
        key = os.environ.get("VERL_TOOL_API_KEY")
        return ToolClient(self.options.tool_server_url, api_key=key, **self.options.client_settings())  # type: ignore[arg-type]


_workers: weakref.WeakKeyDictionary[Any, _Worker] = weakref.WeakKeyDictionary()
"""By the engine client, of which verl makes one a worker process."""


class VerlToolAgentLoop(AgentLoopBase):
    """One row of the data set, answered with tools."""

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: Any,
        tokenizer: Any,
        processor: Any,
        dataset_cls: type[RLHFDataset],
        data_config: DictConfigWrap,
        **_others: Any,
    ) -> None:
        # In place of verl's own, which also prepares, for every trajectory, to put turns together in verl's way. That of
        # 0.9.1 refuses a model whose tokenizer lacks the markers of its family, as DeepSeek's distilled Qwen models do.
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config.config
        worker = _workers.get(self.server_manager)
        if worker is None:
            template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
            worker = _Worker(self.config, self.server_manager, self.tokenizer, template_kwargs)
            _workers[self.server_manager] = worker
        self._worker = worker

    async def run(
        self,
        sampling_params: dict[str, Any],
        *,
        raw_prompt: list[dict[str, Any]],
        use_tool: bool | None = True,
        tools_kwargs: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        priority: int = 0,
        global_steps: int = 0,
        index: int | None = None,
        **row: Any,
    ) -> AgentLoopOutput:
        """Run one trajectory.

        Of the row's columns, `use_tool=False` answers it in one turn without tools, `max_turns` is its own limit, and
        `tools_kwargs` is all that the tools are sent of it before the trajectory's end. The gold answer is among the
        rest; if that is a verifier, it is sent then. Raises ConfigError for a row with images, for one whose files or
        verifier cannot be read, and for one that what it is told of tools makes too long.
        """
        worker = self._worker
        where = f"row {'?' if index is None else index} of the data"
        refuse_media(row, where)
        prompt = text_messages(raw_prompt, where)
        listed = listed_tools(tools_kwargs, row.get("extra_info"), where)
        limits = worker.validation if row.get(VALIDATION) else worker.options
        turns = own_max_turns(max_turns, where)
        with_tools = uses_tools(use_tool, where) and listed != ()
        prompt_ids = worker.prompts.ids(prompt, listed if with_tools else (), where)
        formats = worker.formats.of(listed)
        renderer = worker.prompts.observations(listed) if with_tools else None
        trajectory_id = os.urandom(16).hex()
        worker.generator.begin(trajectory_id, int(priority))
        try:
            trajectory = await worker.episode.run(
                prompt_ids,
                sampling_params=sampling_params,
                trajectory_id=trajectory_id,
                use_tool=with_tools,
                extra=sent_to_tools(tools_kwargs, listed, where),
                max_turns=limits.max_turns if turns is None else turns,
                max_response_length=limits.max_response_length,
                formats=formats,
                renderer=renderer,
                verification=verification_of(row.get("reward_model"), where),
            )
        finally:
            use = worker.generator.end(trajectory_id)
        if worker.progress is not None:
            worker.progress.add(len(trajectory.calls))
        if use.first_version is None:
            use.first_version = use.last_version = int(global_steps)
        record = replace(trajectory, extra={"index": None if index is None else int(index)})
        with_log_probs = bool(self.config.actor_rollout_ref.rollout.calculate_log_probs)
        return as_verl_output(record, use, worker.tokenizer, with_log_probs=with_log_probs, formats=formats)


def as_verl_output(
    trajectory: Trajectory,
    use: EngineUse,
    tokenizer: HFTokenizer,
    *,
    with_log_probs: bool = True,
    formats: Sequence[Format] = ALL_FORMATS,
) -> ToolLoopOutput:
    """A trajectory in the form in which verl trains on it.

    verl's ``response_mask`` is the mask of the loss. A trajectory without any token behind its prompt gets one end
    token with mask 0, since verl's batches hold at least one. `with_log_probs`: whether the engine was asked for any;
    all rows of a batch must have them or none. `formats`: those in which the loop found the calls.
    """
    ids, mask, log_probs = trajectory.response_ids, trajectory.loss_mask, trajectory.response_log_probs
    calls, turns = action_mask(trajectory, tokenizer, formats), trajectory.turn_ids
    if not ids:
        ids, mask, log_probs, calls, turns = [min(tokenizer.eos_token_ids, default=0)], [0], [0.0], [0], [0]
    return ToolLoopOutput(
        prompt_ids=trajectory.prompt_ids,
        response_ids=ids,
        response_mask=mask,
        response_logprobs=log_probs if with_log_probs else None,
        num_turns=1 + trajectory.num_turns + len(trajectory.calls),
        metrics=AgentLoopMetrics(
            generate_sequences=trajectory.timings.generate,
            tool_calls=trajectory.timings.tools,
            num_preempted=use.preemptions,
        ),
        action_mask=calls,
        turn_ids=turns,
        extra_fields={
            "trajectory": trajectory.to_json(),
            LOOP_FAULT: trajectory.excluded in (Excluded.FAULT, Excluded.ABORTED),
            "action_mask": calls,
            "turn_ids": turns,
            "turn_scores": [],
            "tool_rewards": trajectory.tool_rewards,
            "min_global_steps": use.first_version,
            "max_global_steps": use.last_version,
        },
    )

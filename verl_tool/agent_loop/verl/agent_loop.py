"""The loop inside verl: an `AgentLoopBase` that runs an `Episode`. Written for verl 0.9.0 and 0.9.1.

verl makes one agent loop a trajectory; those of one worker process share an `Episode`, so that limits on how many run
at once and connections to the tool server are the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from pydantic import Field
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_tool.agent_loop.action_tokens import action_mask
from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.end_tokens import generation_end_tokens
from verl_tool.agent_loop.generators.qwen_images import QwenImages
from verl_tool.agent_loop.generators.seeds import seed_of
from verl_tool.agent_loop.generators.single_engine import direct_client
from verl_tool.agent_loop.generators.verl_generator import EngineUse, VerlGenerator
from verl_tool.agent_loop.prompt.conversation import IMAGES_COLUMN, OTHER_MEDIA, Conversation, read_conversation
from verl_tool.agent_loop.prompt.opened_prompt import PromptOpener
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.rendering.images import ImagePlacer
from verl_tool.agent_loop.row import (
    VALIDATION,
    build_call_extra,
    is_present,
    listed_tools,
    reject_media,
    row_turns,
    uses_tools,
)
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import (
    LOOP_FAULT,
    RECORD_PLACES,
    ROW_REWARDS,
    Author,
    Excluded,
    Segment,
    StopReason,
    Trajectory,
    save_images,
)
from verl_tool.agent_loop.verl.config import options_in
from verl_tool.agent_loop.verl.expert_routes import ExpertRoutes
from verl_tool.agent_loop.verl.image_reading import image_reading, why_no_images
from verl_tool.agent_loop.verl.progress_report import ProgressReport
from verl_tool.agent_loop.verl.stored_rollouts import StoredRollouts
from verl_tool.agent_loop.verl.stored_step import STORED_LINE, StoredStep
from verl_tool.agent_loop.verl.tool_descriptions import tools_in
from verl_tool.client import ToolClient
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError, ContentError, VerlToolError
from verl_tool.formats import ALL_FORMATS, Format
from verl_tool.platforms.vision.packed_images import PACKED, pack
from verl_tool.platforms.vision.sent_images import send
from verl_tool.protocol import ENVIRONMENT_FIELD, Fault, FaultKind
from verl_tool.verification import verification_of


class ToolLoopOutput(AgentLoopOutput):
    """What verl takes from an agent loop.

    Among its ``extra_fields`` are ``action_mask``, 1 on tokens of a call, ``turn_ids``, as `Trajectory.turn_ids`, and
    of a final row the ``trajectory``, without images.
    """

    row: int = Field(default=0, exclude=True)
    """Which of the rollout's rows this is."""
    is_final: bool = Field(default=True, exclude=True)
    """Whether this is its rollout's last row, which carries the reward and the record."""
    of_validation: bool = Field(default=False, exclude=True)
    """Whether it is of a validation, where verl reads the reward of the last row only."""
    model_inputs: dict[str, Any] | None = Field(default=None, exclude=True)
    """Of a model that reads images: what it is given beside the tokens (verl's ``multi_modal_inputs``)."""

    routed_experts: Any = Field(default=None, exclude=True)
    """`ExpertRoutes.align`. [prompt_length + response_length, layers, top_k]"""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Leave ``extra_fields`` as they are; pydantic makes dicts of dataclasses."""
        return super().model_dump(exclude={"extra_fields"}, **options) | {"extra_fields": dict(self.extra_fields)}

    def as_dict(self) -> dict[str, Any]:
        """verl's newer trainer stores these fields as they are."""
        fields = super().as_dict()
        if self.routed_experts is not None:
            fields["routed_experts"] = torch.from_numpy(self.routed_experts)
        extra = fields["extra_fields"]
        for name in ("action_mask", "turn_ids"):
            fields[name] = torch.tensor(extra.pop(name), dtype=torch.int64)
        if self.is_final:  # TransferQueue, too, makes a dict of a dataclass; and a checkpoint must outlive a version
            extra["trajectory"] = extra["trajectory"].to_json()
        if "rm_scores" in fields:  # verl copies the rollout's reward to each of its rows
            own = json.loads(extra.get("reward_extra_info", {}).get(ROW_REWARDS, "[]"))
            own = [] if self.of_validation else own[:-1]
            if not self.is_final:
                fields["rm_scores"][-1] = own[self.row] if own else 0.0
            elif own:
                fields["rm_scores"][-1] -= sum(own)
        if extra[LOOP_FAULT]:
            # A filter of groups must not take faults for answers that are all wrong, and sample anew for ever.
            extra["reward_extra_info"] = {
                name: math.nan if isinstance(value, int | float) else value
                for name, value in extra.get("reward_extra_info", {}).items()
            }
        return fields


class _Worker:
    """What the agent loops of one worker process share."""

    def __init__(
        self, config: DictConfig, client: Any, tokenizer: Any, processor: Any, template_kwargs: Mapping[str, Any]
    ) -> None:
        self.options = options_in(config)
        self._trajectories_dir = config.get("trajectories_dir")
        self.validation = self.options.for_validation()
        model = config.actor_rollout_ref.model
        folder, trusted = model.get("hf_config_path") or model.path, bool(model.get("trust_remote_code", False))
        more = generation_end_tokens(folder, trust_remote_code=trusted)
        self.tokenizer = HFTokenizer(tokenizer, template_kwargs, more)
        tools = tools_in(config)
        self.prompts = PromptRenderer(self.tokenizer, self.options, tools)
        if self.options.describes_tools and not tools:
            raise ConfigError(
                "the prompts shall tell of the tools, and the config does not have them (tool_server.tools); "
                "verl_tool.trainer.main_ppo asks the tool server for them. To tell of none: "
                "actor_rollout_ref.agent.tool_schemas=none"
            )
        rollout = config.actor_rollout_ref.rollout
        engine, max_images = rollout.get("name"), rollout.get("limit_images")
        way = send if engine == "vllm" else ImagePart.decode
        self.generator = VerlGenerator(direct_client(client), engine, way, max_images)
        self.why_no_images = why_no_images(folder, trust_remote_code=trusted)
        self.images = image_reading(processor, self.tokenizer) if self.why_no_images is None else None
        self.placer = ImagePlacer(self.images, self.tokenizer) if self.images is not None else None
        self.routes = None
        if rollout.get("enable_rollout_routing_replay", False):
            self.routes = ExpertRoutes.of_model(folder, trust_remote_code=trusted)
        self.formats = LoopFormats(self.options.formats, tools)
        self.opener = PromptOpener(self.prompts, self.formats.of)
        self.tools = self._tools()
        self.episode = Episode(
            *(self.generator, self.tools, self.tokenizer, self.options),
            renderer=self.prompts.observations(),
            formats=self.formats.all,
            image_tokens=self.images,
        )
        replay = config.actor_rollout_ref.get("replay")
        step = config.actor_rollout_ref.get("replay_step")
        self.stored = StoredRollouts(Path(replay)) if replay is not None and step is None else None
        self.step = StoredStep(Path(replay), int(step), int(rollout.n)) if step is not None else None
        self.progress = ProgressReport() if self.options.enable_tqdm else None

    def folder_of_images(self, validation: bool) -> Path | None:
        """Where the images of a trajectory are kept; None: nowhere."""
        requested = ("all", "validation") if validation else ("all",)
        folder = self._trajectories_dir if self.options.record_images in requested else None
        return Path(folder) / "images" if folder else None

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
        # In place of verl's own, which also prepares, for every trajectory, to put turns together in verl's way. That
        # of 0.9.1 refuses a model whose tokenizer lacks the markers of its family, as DeepSeek's distilled Qwen models
        # do.
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config.config
        worker = _workers.get(self.server_manager)
        if worker is None:
            template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
            worker = _Worker(self.config, self.server_manager, self.tokenizer, self.processor, template_kwargs)
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
        min_turns: int | None = None,
        priority: int = 0,
        global_steps: int = 0,
        index: int | None = None,
        **row: Any,
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one trajectory. Several outputs are its training rows, the last of which carries record and reward.

        Of the row's columns, `use_tool=False` answers it in one turn without tools, `max_turns` and `min_turns` are its
        own limits, and `tools_kwargs` is all that the tools are sent of it before the trajectory's end. The gold answer
        is among the rest; if a verifier or an environment judges by it, it is sent then. Raises ConfigError for a row
        with images that the model does not read, for one whose images, files, environment or verifier cannot be read,
        and for one that what it is told of tools makes too long.
        """
        worker = self._worker
        if worker.step is not None:
            return one_or_several(self._made_again(worker.step, int(priority), row))
        if worker.stored is not None:
            replayed = self._replayed(worker.stored, index, int(global_steps), validation=bool(row.get(VALIDATION)))
            return one_or_several(replayed)
        where = f"row {'?' if index is None else index} of the data"
        conversation = await self._conversation(raw_prompt, row, where)
        listed = listed_tools(tools_kwargs, row.get("extra_info"), where)
        limits = worker.validation if row.get(VALIDATION) else worker.options
        turns = row_turns(max_turns, where)
        extra = build_call_extra(tools_kwargs, listed, where)
        begins = ENVIRONMENT_FIELD in extra
        with_tools = uses_tools(use_tool, where) and (listed != () or begins)
        open_prompt = None
        if begins and with_tools:
            prompt_ids, open_prompt = worker.opener.of(conversation.messages, listed, where)
        else:
            prompt_ids = self._prompt_ids(conversation, listed if with_tools else (), where)
        formats = worker.formats.of(listed)
        renderer = worker.prompts.observations(listed) if with_tools else None
        trajectory_id = os.urandom(16).hex()
        worker.generator.begin(trajectory_id, int(priority), self._seed(row, index, int(global_steps), int(priority)))
        try:
            trajectory = await worker.episode.run(
                prompt_ids,
                images=conversation.images,
                sampling_params=sampling_params,
                trajectory_id=trajectory_id,
                use_tool=with_tools,
                extra=extra,
                max_turns=limits.max_turns if turns is None else turns,
                max_response_length=limits.max_response_length,
                formats=formats,
                renderer=renderer,
                verification=verification_of(row.get("reward_model"), where, in_environment=begins),
                task_prompt=functools.partial(worker.prompts.task_ids, conversation.messages, listed),
                open_prompt=open_prompt,
                min_turns=row_turns(min_turns, where, "min_turns"),
            )
        except ContentError as error:
            trajectory = self._misplaced(trajectory_id, prompt_ids, f"{where}: {error}")
        finally:
            use = worker.generator.end(trajectory_id)
        if worker.progress is not None:
            worker.progress.add(len(trajectory.calls))
        return await self._outputs(trajectory, use, row, index, int(global_steps), formats)

    async def _outputs(
        self,
        trajectory: Trajectory,
        use: EngineUse,
        row: Mapping[str, Any],
        index: int | None,
        step: int,
        formats: Sequence[Format],
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """The training rows of a sampled trajectory, whose record names its row of the data set."""
        worker = self._worker
        if use.first_version is None:
            # Nothing was sampled. A step trains on what the weights of the step before it sampled.
            use.first_version = use.last_version = max(0, step - (not row.get(VALIDATION)))
        extra: dict[str, Any] = {**trajectory.extra, "index": None if index is None else int(index)}
        if (source := row.get("data_source")) is not None:
            extra["data_source"] = str(source)  # a question may stand in several data sets
        record = replace(trajectory, extra=extra)
        with_log_probs = bool(self.config.actor_rollout_ref.rollout.calculate_log_probs)
        outputs = as_verl_outputs(
            *(record, use, worker.tokenizer),
            with_log_probs=with_log_probs,
            formats=formats,
            validation=bool(row.get(VALIDATION)),
        )
        if worker.routes is not None and len(outputs) == 1:
            [output] = outputs
            total = len(output.prompt_ids) + len(output.response_ids)
            output.routed_experts = worker.routes.align(use.routed_experts, total)
        if worker.images is not None:
            folder = worker.folder_of_images(bool(row.get(VALIDATION)))
            for output, part in zip(outputs, trajectory.rows or (trajectory,), strict=True):
                visible = part.visible_images
                output.model_inputs = await asyncio.to_thread(model_inputs, worker.images, visible, folder)
        return one_or_several(outputs)

    def _seed(self, row: Mapping[str, Any], index: int | None, step: int, priority: int) -> int | None:
        """Of this sample, the same in each run; None if runs need not be the same."""
        if not self.config.get("deterministic", False):
            return None
        # The older trainer numbers the samples of a batch, of which a validation has several; the newer names the
        # prompt (`SequentialIds`) and its sample. A row of the data may have a column `session_id`, too.
        sample: tuple[object, ...] = step, bool(row.get(VALIDATION)), priority, None if index is None else int(index)
        if self.config.trainer.use_v1:
            sample = str(row["uid"]), int(row["session_id"])
        return seed_of(int(self.config.actor_rollout_ref.rollout.seed), *sample)

    def _replayed(
        self, stored: StoredRollouts, index: int | None, step: int, *, validation: bool
    ) -> list[ToolLoopOutput]:
        """What an earlier run stored of this row."""
        trajectory = stored.next(None if index is None else int(index), validation=validation)
        record = replace(trajectory, trajectory_id=os.urandom(16).hex(), extra=trajectory.sampled_extra)
        use = EngineUse(first_version=step, last_version=step)
        with_log_probs = bool(self.config.actor_rollout_ref.rollout.calculate_log_probs)
        formats = self._worker.formats.all
        return as_verl_outputs(
            *(record, use, self._worker.tokenizer),
            with_log_probs=with_log_probs,
            formats=formats,
            validation=validation,
        )

    def _made_again(self, step: StoredStep, place: int, row: Mapping[str, Any]) -> list[ToolLoopOutput]:
        """What stands at this place of the step's batch, graded as it was."""
        # The older trainer numbers the samples of a batch, the newer names the prompt and numbers its samples.
        line = step.sample_of(str(row["uid"]), int(row["session_id"])) if "session_id" in row else place
        then = step.at(line)
        use = EngineUse(first_version=step.number, last_version=step.number)
        with_log_probs = bool(self.config.actor_rollout_ref.rollout.calculate_log_probs)
        formats, tokenizer = self._worker.formats.all, self._worker.tokenizer
        outputs = as_verl_outputs(then.trajectory, use, tokenizer, with_log_probs=with_log_probs, formats=formats)
        outputs[-1].reward_score = then.reward
        for output in outputs:
            output.extra_fields |= {"reward_extra_info": then.told, STORED_LINE: line}
        return outputs

    async def _conversation(self, messages: list[dict[str, Any]], row: Mapping[str, Any], where: str) -> Conversation:
        """The prompt's messages and images. Raises ConfigError as `run`."""
        worker = self._worker
        reject_media(row, where, OTHER_MEDIA)
        in_column = row.get(IMAGES_COLUMN)
        is_text = not is_present(in_column) and all(isinstance(m.get("content"), str) for m in messages)
        if is_text:
            return read_conversation(messages, None, where)
        conversation = await asyncio.to_thread(read_conversation, messages, in_column, where)
        if conversation.images and worker.why_no_images is not None:
            raise ConfigError(f"{where} has images, and the model {worker.why_no_images}. Leave such rows out")
        return conversation

    def _prompt_ids(self, conversation: Conversation, listed: Sequence[str] | None, where: str) -> list[int]:
        placer, further = self._worker.placer, 0
        if placer is not None:
            with contextlib.suppress(ContentError):  # the episode raises it
                further = placer.further_tokens(conversation.images)
        return self._worker.prompts.ids(conversation.messages, listed, where, further)

    def _misplaced(self, trajectory_id: str, prompt_ids: Sequence[int], words: str) -> Trajectory:
        """In place of a trajectory whose prompt has other places for images than images: a fault, with its text."""
        worker = self._worker
        banned = worker.images.banned_ids if worker.images is not None else ()
        stored = [token for token in prompt_ids if token not in banned]
        prompt = Segment(Author.PROMPT, tuple(stored[-(worker.options.max_prompt_length or len(stored)) :]))
        fault = Fault(kind=FaultKind.MISCONFIGURED, message=words, retryable=False)
        return Trajectory(trajectory_id, (prompt,), StopReason.FAULT, fault=fault, excluded=Excluded.FAULT)


def model_inputs(images: QwenImages, shown: Sequence[ImagePart], record: Path | None = None) -> dict[str, Any]:
    """What a model is given for the images of a trajectory, as verl's trainers carry it. Copies the images' files, and
    writes them into the folder `record`."""
    # verl only looks whether it is there, and makes its own from the tokens.
    inputs: dict[str, Any] = {"mm_token_type_ids": torch.zeros(0, dtype=torch.int64)}
    if shown:
        if record is not None:
            save_images(record, shown)
        grid = torch.tensor([images.grid(image) for image in shown])
        inputs |= {
            PACKED: pack(images.processor, shown),
            "image_grid_thw": grid,
            # Patches of each frame.
            "images_seqlens": torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]),
        }
    return inputs


def one_or_several(outputs: Sequence[ToolLoopOutput]) -> AgentLoopOutput | list[AgentLoopOutput]:
    """As verl takes them; its older trainer takes one."""
    return outputs[0] if len(outputs) == 1 else list(outputs)


def as_verl_outputs(
    trajectory: Trajectory,
    use: EngineUse,
    tokenizer: HFTokenizer,
    *,
    with_log_probs: bool = True,
    formats: Sequence[Format] = ALL_FORMATS,
    validation: bool = False,
) -> list[ToolLoopOutput]:
    """The training rows of a trajectory in the form in which verl trains on them, the last one with its record.

    verl's ``response_mask`` is the mask of the loss. A trajectory without any token behind its prompt gets one end
    token with mask 0, since verl's batches hold at least one. `with_log_probs`: whether the engine was asked for any;
    all rows of a batch must have them or none. `formats`: those in which the loop found the calls. `validation`: the
    trajectory was sampled to validate.
    """
    columns: dict[str, list[Any]] = {
        "response_ids": trajectory.response_ids,
        "response_mask": trajectory.loss_mask,
        "action_mask": action_mask(trajectory, tokenizer, formats),
        "turn_ids": trajectory.turn_ids,
    }
    if with_log_probs and (log_probs := trajectory.response_log_probs) is not None:
        columns["response_logprobs"] = log_probs
    prompts = [trajectory.prompt_ids, *(list(context.tokens) for context in trajectory.contexts)]
    row_spans = trajectory.row_spans
    pieces = [(prompts[row], row_spans[row]) for row in trajectory.row_numbers]
    if not pieces:
        pieces = [(prompts[0], [(0, 1)])]
        columns = {name: [0] for name in columns} | {"response_ids": [min(tokenizer.eos_token_ids, default=0)]}
    outputs = []
    for number, (prompt, places) in enumerate(pieces):
        row = {name: [v for start, n in places for v in column[start : start + n]] for name, column in columns.items()}
        fields = {
            LOOP_FAULT: trajectory.excluded in (Excluded.FAULT, Excluded.ABORTED),
            "action_mask": row.pop("action_mask"),
            "turn_ids": row.pop("turn_ids"),
            "turn_scores": [],
            "tool_rewards": trajectory.tool_rewards,
            "min_global_steps": use.first_version,
            "max_global_steps": use.last_version,
        }
        outputs.append(
            ToolLoopOutput(
                **({"response_logprobs": None} | row),
                prompt_ids=prompt,
                num_turns=1 + trajectory.num_turns + len(trajectory.calls),
                metrics=AgentLoopMetrics(
                    generate_sequences=trajectory.timings.generate,
                    tool_calls=trajectory.timings.tools,
                    num_preempted=use.preemptions,
                ),
                extra_fields=fields if len(pieces) == 1 else fields | {RECORD_PLACES: places},
                row=number,
                is_final=False,
                of_validation=validation,
            )
        )
    outputs[-1].is_final = True
    outputs[-1].extra_fields = {"trajectory": replace(trajectory, images={})} | outputs[-1].extra_fields
    check_trained_once(trajectory, outputs)
    return outputs


def check_trained_once(trajectory: Trajectory, outputs: Sequence[AgentLoopOutput]) -> None:
    """Raise VerlToolError unless the rows of a rollout train each of its generated tokens at most once."""
    generated, trained = sum(trajectory.loss_mask), sum(sum(output.response_mask) for output in outputs)
    if trained > generated:
        raise VerlToolError(
            f"rollout {trajectory.trajectory_id} has {generated} tokens to train and its {len(outputs)} rows train "
            f"{trained}; a token that is fed again belongs to a row's prompt"
        )

"""A training's config, and its loop as verl makes it, over a scripted engine."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from quick_compose import quick_compose
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from verl_tool.agent_loop.verl.agent_loop import VerlToolAgentLoop
from verl_tool.client import ToolClient
from verl_tool.trainer import config_completion


def composed(*overrides: str) -> DictConfig:
    """Compose the config of a command line."""
    return quick_compose(config_completion.AGENT_LOOPS.parent, "agent_ppo_trainer", overrides)


def reference_config(config: DictConfig) -> Any:
    """Return the config object of the reference model. verl's worker renames its batch sizes first."""
    group: Any = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref.ref, resolve=True))
    for name in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"):
        value = group.pop(f"log_prob_{name}", None)
        group[name if name == "use_dynamic_bsz" else f"ppo_{name}"] = value
    group.ppo_mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    return omega_conf_to_dataclass(group)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


class ScriptedEngine:
    """Writes its lines, one per call, like verl's client."""

    def __init__(self, tokenizer, *lines: str) -> None:
        self._tokenizer, self._lines = tokenizer, list(lines)
        self.asked: list[Any] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, priority=0):
        self.asked.append((request_id, list(prompt_ids), sampling_params, priority))
        ids = self._tokenizer.encode(self._lines.pop(0), add_special_tokens=False)
        version = len(self.asked)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            extra_fields={"min_global_steps": version, "max_global_steps": version},
        )


def make_loop(tokenizer, engine, *overrides: str) -> VerlToolAgentLoop:
    """Make the agent loop of a training with these overrides, over `engine`."""
    return loop_of(composed("data.max_response_length=64", *overrides), tokenizer, engine)


def loop_of(config: DictConfig, tokenizer, engine, processor: Any = None) -> VerlToolAgentLoop:
    """Make the agent loop of a training with this config, over `engine`."""
    made = VerlToolAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=engine,
        tokenizer=tokenizer,
        processor=processor,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
    )
    _made.append(made)
    return made


_made: list[VerlToolAgentLoop] = []


async def close_clients() -> None:
    """Close the tool clients of all loops, which in a training live as long as their process."""
    while _made:
        tools = _made.pop()._worker.episode._channel.tools
        if isinstance(tools, ToolClient):
            await tools.close()

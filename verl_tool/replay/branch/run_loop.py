"""The loop of a run: its options, prompts, formats and sampling, with the tokenizer of the current model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval_service.model.checkpoint import newest_checkpoint
from eval_service.model.run_config import read_run, run_config
from eval_service.model.tokenizer import ServedTokenizer, load_tokenizer
from eval_service.settings import Sampling
from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.trajectory import Author, Trajectory
from verl_tool.agent_loop.verl.config import options_in
from verl_tool.agent_loop.verl.tool_descriptions import tools_in
from verl_tool.errors import ConfigError


@dataclass(frozen=True)
class RunLoop:
    """Everything but the model that a run's trajectories used. Load it with `load_run_loop`."""

    model: Path
    tokenizer: ServedTokenizer
    options: EpisodeOptions
    sampling: Sampling
    prompts: PromptRenderer
    formats: LoopFormats
    dtype: str
    """That of the run's engine."""
    trust_remote_code: bool

    def check_tokens(self, trajectory: Trajectory) -> None:
        """Raise ConfigError if the tokenizer decodes the tokens of `trajectory` to a different text than its record."""
        for number, segment in enumerate(trajectory.segments):
            if segment.author not in (Author.PROMPT, Author.MODEL) or not segment.text:
                continue
            decoded = self.tokenizer.decode(segment.tokens)
            if decoded != segment.text:
                raise ConfigError(
                    f"the tokenizer of {self.model} decodes segment {number} to {decoded[:60]!r}, but the record has "
                    f"{segment.text[:60]!r}; give a model with the run's tokenizer"
                )


def load_run_loop(folder: Path, model: Path | None, *, validation: bool, temperature: float | None = None) -> RunLoop:
    """Load the loop of the run in `folder`, as in its training or its validation. `model`, a folder in Hugging Face's
    format, replaces the run's newest weights; `temperature` replaces the run's. Raises ConfigError if the run or the
    model cannot be read."""
    config = run_config(folder)
    checkpoint = newest_checkpoint(folder) if model is None else None
    model = checkpoint.model if checkpoint is not None else Path(str(model))
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} has no config.json; give the folder of a model in Hugging Face's format")
    run = read_run(folder, str(model))
    tokenizer = load_tokenizer(
        str(model),
        trust_remote_code=run.trust_remote_code,
        chat_template_kwargs=run.chat_template_kwargs,
        chat_template=run.custom_chat_template,
    )
    options, tools, rollout = options_in(config), tools_in(config), config.actor_rollout_ref.rollout
    training = run.sampling.model_copy(
        update={"temperature": float(rollout.temperature), "top_p": float(rollout.top_p), "top_k": int(rollout.top_k)}
    )
    sampling = run.sampling if validation else training
    if temperature is not None:
        sampling = sampling.model_copy(update={"temperature": temperature})
    limits = {"enable_tqdm": False, "max_model_len": options.max_model_len or run.max_model_len}
    return RunLoop(
        model,
        tokenizer,
        (options.for_validation() if validation else options).model_copy(update=limits),
        sampling,
        PromptRenderer(tokenizer, options, tools),
        LoopFormats(options.formats, tools),
        run.dtype,
        run.trust_remote_code,
    )

"""A tiny model to try a recipe on without an accelerator.

    python examples/train/tiny_model.py --data data/train.parquet --output outputs/model

A byte-level tokenizer with Qwen2's chat template and a Qwen3-style model are made from scratch and trained by
supervised learning (transformers' `Trainer`) on solutions of the recipe's own rows (`traces.py`), until a solution
comes out right with the wanted probability. What is left to learn is left to reinforcement learning.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.console import Console
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import IterableDataset
from traces import END, Trace, trace_of
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

IGNORED = -100
"""Label of a token that is not learned from (PyTorch's cross entropy)."""
START = "<|im_start|>"
PADDING = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2's tokenizer splits text before merging: every digit by itself."""
console = Console(stderr=True)


@dataclass(frozen=True)
class Lesson:
    """A prompt and a solution."""

    messages: list[dict[str, str]]
    trace: Trace


def lessons_in(files: Sequence[Path]) -> list[Lesson]:
    """Of all rows with a known solution. Raises ValueError if there is none."""
    rows = [row for file in files for row in pd.read_parquet(file).to_dict("records")]
    found = [Lesson([dict(message) for message in row["prompt"]], trace_of(row) or []) for row in rows]
    known = [lesson for lesson in found if lesson.trace]
    if not known:
        raise ValueError(f"no row of {', '.join(map(str, files))} has a solution that traces.py knows")
    return known


def make_tokenizer(lessons: Sequence[Lesson], vocabulary: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE learned from the lessons. Any text can be encoded; digits stay single tokens."""
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PADDING, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [m["content"] for lesson in lessons for m in [{"content": "system\nuser\nassistant\n"}, *lesson.messages]]
    texts += [part.text.removesuffix(END) for lesson in lessons for part in lesson.trace]
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=END,
        pad_token=PADDING,
        unk_token=None,
        additional_special_tokens=[START],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerBase, hidden: int, layers: int, seed: int) -> Qwen3ForCausalLM:
    """A random model whose vocabulary is exactly the tokenizer's."""
    torch.manual_seed(seed)
    heads = hidden // 32
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float()


def encode(tokenizer: PreTrainedTokenizerBase, lesson: Lesson) -> dict[str, list[int]]:
    """Token ids and labels. Each part is encoded alone, as the agent loop does."""
    prompt = tokenizer.apply_chat_template(lesson.messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    labels = [IGNORED] * len(ids)
    for part in lesson.trace:
        tokens = tokenizer.encode(part.text, add_special_tokens=False)
        ids += tokens
        labels += tokens if part.learned else [IGNORED] * len(tokens)
    return {"input_ids": ids, "labels": labels}


def collate(padding: int, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad on the right to ``[batch, length]``."""
    length = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", padding), "labels": padded("labels", IGNORED), "attention_mask": mask}


class Endless(IterableDataset):
    """The rows again and again, in random order."""

    def __init__(self, rows: Sequence[dict[str, list[int]]], seed: int) -> None:
        self._rows, self._seed = rows, seed

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        rng = random.Random(self._seed)
        while True:
            yield rng.choice(self._rows)


@torch.no_grad()
def success_probability(model: Qwen3ForCausalLM, batch: dict[str, torch.Tensor]) -> float:
    """Mean probability, at temperature 1, that the model writes its parts of a solution exactly so."""
    model.eval()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = (log_probs * (labels != IGNORED)).sum(-1)
    model.train()
    return total.exp().mean().item()


class StopWhenGoodEnough(TrainerCallback):
    """Ends the training as soon as solutions come out right with probability `target`."""

    def __init__(self, batch: dict[str, torch.Tensor], target: float, every: int) -> None:
        self._batch, self._target, self._every = batch, target, every
        self.success = 0.0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._every:
            return
        self.success = success_probability(kwargs["model"], self._batch)
        console.print(f"[dim]warm-up step {state.global_step}: success {self.success:.1%}[/]")
        control.should_training_stop = self.success >= self._target


def warm_up(
    model: Qwen3ForCausalLM,
    rows: Sequence[dict[str, list[int]]],
    padding: int,
    arguments: TrainingArguments,
    target: float,
) -> float:
    """Train until `target` or the arguments' last step; the success reached."""
    sample = random.Random(0).sample(rows, min(64, len(rows)))
    callback = StopWhenGoodEnough(collate(padding, sample), target, every=10)
    Trainer(
        model=model,
        args=arguments,
        train_dataset=Endless(rows, arguments.seed),
        data_collator=lambda batch: collate(padding, batch),
        callbacks=[callback],
    ).train()
    return callback.success


def main(
    data: Annotated[str, typer.Option("--data", help="Parquet files of verl's rows: a path, or [a,b].")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    target: Annotated[float, typer.Option("--target", min=0.0, max=1.0, help="Stop at this success, sampled.")] = 0.3,
    max_steps: Annotated[int, typer.Option("--max_steps", min=1, help="Give up after so many steps.")] = 1500,
    batch_size: Annotated[int, typer.Option("--batch_size", min=1)] = 16,
    learning_rate: Annotated[float, typer.Option("--learning_rate")] = 1e-3,
    vocabulary: Annotated[int, typer.Option("--vocabulary", min=300, help="Most tokens.")] = 640,
    hidden: Annotated[int, typer.Option("--hidden", min=32, help="Width; a multiple of 32.")] = 128,
    layers: Annotated[int, typer.Option("--layers", min=1)] = 3,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make a tiny model and teach it the form of the recipe's solutions. Exits with 1 if `target` is not reached."""
    lessons = lessons_in([Path(file) for file in data.strip("[]").split(",")])
    tokenizer = make_tokenizer(lessons, vocabulary)
    model = make_model(tokenizer, hidden, layers, seed)
    rows = [encode(tokenizer, lesson) for lesson in lessons]
    longest = max(len(row["input_ids"]) for row in rows)
    weights = sum(p.numel() for p in model.parameters())
    console.print(f"{weights:,} weights, {len(tokenizer)} tokens, {len(rows)} solutions of at most {longest} tokens")
    arguments = TrainingArguments(
        output_dir=str(output / "warmup"),
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=20,
        lr_scheduler_type="constant_with_warmup",
        adam_beta2=0.95,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        seed=seed,
    )
    success = warm_up(model, rows, tokenizer.pad_token_id, arguments, target)
    if success < target:
        console.print(f"[red]success {success:.1%} after {max_steps} steps; wanted {target:.1%}. Raise --max_steps[/]")
        raise typer.Exit(1)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    console.print(f"saved to {output}: success {success:.1%} before reinforcement learning")


if __name__ == "__main__":
    typer.run(main)

"""A tokenizer and a Qwen3-style model made from scratch, and the supervised learning that gives reinforcement learning
a start: for recipes on machines without an accelerator."""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import IterableDataset
from tqdm import tqdm
from transformers import (
    PreTrainedModel,
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
START, END, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2's tokenizer splits text before merging: every digit by itself."""
THREADS = 2
"""Most that a model this small gains from; a recipe's other processes are told to take one each."""
LOOK_EVERY = 10
"""Steps between looks at the success."""
SECONDS_BETWEEN_LINES = 5.0
Row = dict[str, list[Any]]
"""``input_ids`` and ``labels`` of one solution, and ``images`` if it has some."""
Batch = dict[str, torch.Tensor]
console = Console(stderr=True)


@dataclass(frozen=True)
class WarmUp:
    """How to learn, and when to stop."""

    target: float
    """Success, sampled, at which to stop."""
    max_steps: int
    """Give up after so many."""
    learning_rate: float
    """At its highest; it falls to nothing over `max_steps`."""
    seed: int
    batch_size: int = 32
    give_up_after: int | None = None
    """Steps after which a model that is not halfway to the target is given up: some initialisations learn to copy late,
    and another one is faster."""


class Endless(IterableDataset):
    """The rows again and again, in random order."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self._rows, self._seed = rows, seed

    def __iter__(self) -> Iterator[Row]:
        rng = random.Random(self._seed)
        while True:
            yield rng.choice(self._rows)


def make_tokenizer(
    texts: Iterable[str], vocabulary: int, chat_template: str, special: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """A byte-level BPE of at most `vocabulary` tokens learned from `texts`. Any text can be encoded; digits stay single
    tokens. `special`: control tokens beyond those of a chat."""
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PADDING, START, END, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=END,
        pad_token=PADDING,
        unk_token=None,
        additional_special_tokens=[START, *special],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(
    tokenizer: PreTrainedTokenizerBase, hidden: int, layers: int, seed: int, deviation: float = 0.02
) -> Qwen3ForCausalLM:
    """A random model whose vocabulary is exactly the tokenizer's. `hidden` is a multiple of 32; `deviation` is the
    standard deviation of its weights."""
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
        initializer_range=deviation,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    console.print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens")
    return model


def encode(tokenizer: PreTrainedTokenizerBase, parts: Iterable[tuple[str, bool]]) -> Row:
    """Token ids and labels of a text in parts, each with whether it is learned. Each is encoded alone, as the agent
    loop does."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in parts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        ids += tokens
        labels += tokens if learned else [IGNORED] * len(tokens)
    return {"input_ids": ids, "labels": labels}


def once_begun(row: Row) -> Row:
    """The row with its first learned token given: what is left is how well the rest is carried out."""
    labels = list(row["labels"])
    labels[next(i for i, label in enumerate(labels) if label != IGNORED)] = IGNORED
    return {**row, "labels": labels}


def without_token(row: Row, token: int) -> Row:
    """The row with `token` given wherever it is learned, such as one that stands for a decision."""
    return {**row, "labels": [IGNORED if label == token else label for label in row["labels"]]}


def collate(padding: int, rows: Sequence[Row]) -> Batch:
    """Pad on the right to ``[batch, length]``."""
    length = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", padding), "labels": padded("labels", IGNORED), "attention_mask": mask}


@torch.no_grad()
def success_probability(model: PreTrainedModel, batch: Batch) -> float:
    """Mean probability, at temperature 1, that the model writes its parts of these solutions exactly so."""
    model.eval()
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = (log_probs * (labels != IGNORED)).sum(-1)
    model.train()
    return total.exp().mean().item()


class StopWhenGoodEnough(TrainerCallback):
    """Ends the training as soon as the solutions of a batch come out right with probability `target`."""

    def __init__(self, batch: Batch, how: WarmUp) -> None:
        self._batch, self._target = batch, how.target
        self._give_up_after = how.give_up_after or how.max_steps
        # Where no terminal draws over the last state, a line every few seconds.
        terminal = sys.stderr.isatty()
        self._bar = tqdm(desc="warm-up", unit="step", disable=not terminal)
        self._next_line = math.inf if terminal else time.monotonic()
        self.success = 0.0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._bar.update()
        if state.global_step % LOOK_EVERY:
            return
        self.success = success_probability(kwargs["model"], self._batch)
        told = f"success {self.success:.1%}, stops at {self._target:.1%}"
        self._bar.set_postfix_str(told)
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            console.print(f"warm-up: step {state.global_step}, {told}", highlight=False)
        late = state.global_step >= self._give_up_after and self.success < self._target / 2
        control.should_training_stop = late or self.success >= self._target

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._bar.close()


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row] | IterableDataset,
    held: Sequence[Row],
    how: WarmUp,
    output: Path,
    collate: Callable[[int, Sequence[Row]], Batch] = collate,
) -> None:
    """Learn from `rows`, drawn at random, until solutions such as those of `held` come out right often enough; save to
    `output`.

    If they do not, that is told, nothing is saved, and the command ends with 1 (raises typer.Exit). `collate` takes the
    padding's token and the rows of a batch, and gives the model's arguments.
    """
    if not isinstance(rows, IterableDataset):
        console.print(f"{len(rows)} training rows of at most {max(len(row['input_ids']) for row in rows)} tokens")
        rows = Endless(rows, how.seed)
    torch.set_num_threads(min(THREADS, len(os.sched_getaffinity(0))))
    padding = tokenizer.pad_token_id
    callback = StopWhenGoodEnough(collate(padding, held), how)
    arguments = TrainingArguments(
        output_dir=str(output / "warmup"),
        max_steps=how.max_steps,
        per_device_train_batch_size=how.batch_size,
        learning_rate=how.learning_rate,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        # A row may hold images, and a batch as many as its rows have.
        remove_unused_columns=False,
        accelerator_config={"dispatch_batches": False},
        seed=how.seed,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=lambda batch: collate(padding, batch),
        callbacks=[callback],
    )
    trainer.train()
    if callback.success < how.target:
        reached = f"success {callback.success:.1%} after {trainer.state.global_step} steps; wanted {how.target:.1%}"
        console.print(f"[red]{reached}. Raise max_steps (of tiny_model.py: --max_steps)[/]")
        raise typer.Exit(1)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    console.print(f"saved to {output}: success {callback.success:.1%} before reinforcement learning")

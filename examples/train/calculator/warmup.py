"""A tiny language model that has just begun to use a calculator: `python examples/train/calculator/warmup.py`.

A tokenizer and a Qwen3-style model are made from scratch and trained by supervised learning (transformers' `Trainer`)
on traces in TRL's dialect, until a trace comes out right with the wanted probability. Reinforcement learning does the
rest.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import IterableDataset
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

sys.path.append(str(Path(__file__).resolve().parents[2] / "data_preprocess"))
from calculator import Problem, problem

IGNORED = -100
"""Label of a token that is not learned from (PyTorch's cross entropy)."""
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}{% endfor %}"
)
# How Qwen2's tokenizer splits text before merging: every digit by itself.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Trace:
    """A right solution in four parts; the model writes `call` and `answer`, the tool writes `observation`."""

    prompt: str
    call: str
    observation: str
    answer: str

    @classmethod
    def of(cls, p: Problem) -> Trace:
        return cls(
            f"{p.question}\n",
            f"<request><SimpleCalculatorTool>{p.expression}<call>",
            f"{p.answer}<response>",
            f"Result={p.answer}<submit>",
        )

    def parts(self) -> tuple[tuple[str, bool], ...]:
        """Each part, and whether the model writes it."""
        return ((self.prompt, False), (self.call, True), (self.observation, False), (self.answer, True))


def make_tokenizer(vocabulary: int = 320) -> PreTrainedTokenizerBase:
    """A byte-level BPE learned from traces. Any text can be encoded; digits stay single tokens."""
    rng = random.Random(0)
    traces = [Trace.of(problem(rng)) for _ in range(2000)]
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    bpe.train_from_iterator((text for trace in traces for text, _ in trace.parts()), trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerBase, hidden: int, layers: int, seed: int) -> Qwen3ForCausalLM:
    """A random Qwen3-style model whose vocabulary is exactly the tokenizer's."""
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
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float()


def encode(tokenizer: PreTrainedTokenizerBase, trace: Trace) -> dict[str, list[int]]:
    """Token ids and labels of a trace. Each part is encoded alone, as the agent loop does."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in trace.parts():
        part = tokenizer.encode(text, add_special_tokens=False)
        ids += part
        labels += part if learned else [IGNORED] * len(part)
    return {"input_ids": ids, "labels": labels}


def collate(tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad on the right to ``[batch, length]``."""
    length = max(len(r["input_ids"]) for r in rows)

    def padded(key: str, value: int) -> torch.Tensor:
        return torch.tensor([r[key] + [value] * (length - len(r[key])) for r in rows])

    ids, labels = padded("input_ids", tokenizer.pad_token_id), padded("labels", IGNORED)
    mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (length - len(r["input_ids"])) for r in rows])
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class Traces(IterableDataset):
    """Endless random traces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        rng = random.Random(self.seed)
        while True:
            yield encode(self.tokenizer, Trace.of(problem(rng)))


@torch.no_grad()
def success_probability(model: Qwen3ForCausalLM, batch: dict[str, torch.Tensor]) -> float:
    """Mean probability, at temperature 1, that the model writes its parts of a trace exactly so."""
    model.eval()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = (log_probs * (labels != IGNORED)).sum(-1)
    model.train()
    return total.exp().mean().item()


class StopWhenGoodEnough(TrainerCallback):
    """Ends the training as soon as traces come out right with probability `target`."""

    def __init__(self, held_out: dict[str, torch.Tensor], target: float, every: int) -> None:
        self.held_out, self.target, self.every = held_out, target, every
        self.success = 0.0
        self.console = Console(stderr=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.global_step % self.every:
            return
        self.success = success_probability(kwargs["model"], self.held_out)
        self.console.print(f"[dim]warm-up step {state.global_step}: success {self.success:.1%}[/]")
        control.should_training_stop = self.success >= self.target


def main(
    output: Path = typer.Option(Path("data/calculator/model"), "--output", help="Folder for the model."),
    target: float = typer.Option(0.15, "--target", min=0.0, max=1.0, help="Stop at this success, sampled."),
    max_steps: int = typer.Option(1000, "--max_steps", min=1, help="Give up after so many steps."),
    batch_size: int = typer.Option(64, "--batch_size", min=1),
    learning_rate: float = typer.Option(1e-3, "--learning_rate"),
    hidden: int = typer.Option(128, "--hidden", min=32, help="Width; a multiple of 32."),
    layers: int = typer.Option(3, "--layers", min=1),
    seed: int = typer.Option(0, "--seed"),
) -> None:
    """Make and warm up the calculator model. Exits with 1 if it does not reach `target` in `max_steps`."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden, layers, seed)
    console = Console(stderr=True)
    console.print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    held_out = Traces(tokenizer, seed=10**6 + seed)
    rows = [r for r, _ in zip(held_out, range(256), strict=False)]
    callback = StopWhenGoodEnough(collate(tokenizer, rows), target, every=5)
    arguments = TrainingArguments(
        output_dir=str(output / "warmup"),
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=20,
        lr_scheduler_type="constant_with_warmup",
        weight_decay=0.01,
        adam_beta2=0.95,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        seed=seed,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Traces(tokenizer, seed),
        data_collator=lambda batch: collate(tokenizer, batch),
        callbacks=[callback],
    )
    trainer.train()
    if callback.success < target:
        reached = f"success {callback.success:.1%} after {max_steps} steps; wanted {target:.1%}"
        console.print(f"[red]{reached}. Raise --max_steps[/]")
        raise typer.Exit(1)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    console.print(f"saved to {output}: success {callback.success:.1%} before reinforcement learning")


if __name__ == "__main__":
    typer.run(main)

"""Random models made on the spot, and what transformers says of tokens: the yardstick for engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.doctor.gpu_smoke.part import PartFailed

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "examples" / "train"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] + '\\n' }}{% endfor %}"
WORDS = "one two three four five six seven eight nine ten red green blue cold warm fast slow near far and or not"
PROMPTS = tuple(f"Say {a} and {b}:\n" for a, b in zip(WORDS.split()[:16], WORDS.split()[4:20], strict=True))
HIDDEN, LAYERS, VOCABULARY = 128, 2, 384
DEVIATION = 0.08
"""Of the weights: large enough for distributions that are not flat."""
LIMITS = {"cpu": (1e-4, 1e-2), "cuda": (0.02, 0.5)}
"""Largest allowed mean and maximum of the difference of two log-probabilities of a token: fp32 on a CPU, bf16 on a
GPU."""


def dtype_on(device: str) -> torch.dtype:
    """In which the models compute there, as in trainings."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def make_text_model(folder: Path, hidden: int = HIDDEN) -> Path:
    """The folder of a random Qwen3 and its tokenizer, made if it is not there. With 128 columns, `HIDDEN`, it has 0.5
    million weights."""
    path = folder / ("text_model" if hidden == HIDDEN else f"text_model_{hidden}")
    if not (path / "tokenizer_config.json").is_file():
        from_scratch = _recipe_module("from_scratch")
        tokenizer = from_scratch.make_tokenizer([f"{WORDS} {' '.join(PROMPTS)}"] * 4, VOCABULARY, CHAT_TEMPLATE)
        model = from_scratch.make_model(tokenizer, hidden, LAYERS, seed=0, deviation=DEVIATION)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def make_vision_model(folder: Path) -> Path:
    """The same for a Qwen3-VL with its processor."""
    path = folder / "vision_model"
    if not (path / "tokenizer_config.json").is_file():
        vision = _recipe_module("from_scratch_vision")
        texts = [f"{WORDS} {' '.join(PROMPTS)}"] * 4
        tokenizer = _recipe_module("from_scratch").make_tokenizer(
            texts, VOCABULARY, vision.CHAT_TEMPLATE, vision.VISION
        )
        model = vision.make_vision_model(tokenizer, HIDDEN, LAYERS, vision=96, depth=2, seed=0)
        model.save_pretrained(path)
        vision.make_processor(tokenizer, (vision.PATCH * 4) ** 2).save_pretrained(path)
    return path


def load_text_model(path: Path, device: str, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """The model on the device, in the type that it computes in there."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype or dtype_on(device), **kwargs).to(device).eval()


def load_tokenizer(path: Path) -> HFTokenizer:
    """As the loop takes it."""
    from transformers import AutoTokenizer

    return HFTokenizer(AutoTokenizer.from_pretrained(path))


def token_log_probs(
    model: Any, prompt: Sequence[int], response: Sequence[int], banned: Sequence[int] = (), **features: Any
) -> torch.Tensor:
    """Log-probabilities of the response's tokens by the model, in fp32. [response_length]

    `banned`: tokens that cannot be drawn.
    """
    ids = torch.tensor([[*prompt, *response]], device=model.device)
    logits = model(input_ids=ids, **features).logits[0, len(prompt) - 1 : -1].float()
    logits[:, list(banned)] = -torch.inf
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


def log_probs_with_images(
    model: Any, images: Any, prompt: Sequence[int], response: Sequence[int], pictures: Sequence[Any]
) -> torch.Tensor:
    """The same by a model that is given `pictures`, which `images` reads (`QwenImages`)."""
    features = images.features([picture.decode() for picture in pictures])
    features |= {"mm_token_type_ids": (torch.tensor([[*prompt, *response]]) == images.pad_id).int()}
    on_device = {name: value.to(model.device) for name, value in features.items()}
    return token_log_probs(model, prompt, response, images.banned_ids, **on_device)


class Differences:
    """Collects differences of log-probabilities and holds them against the device's `LIMITS`."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, mine: torch.Tensor, theirs: Sequence[float]) -> None:
        """Of the same tokens."""
        self._values += (mine.detach().cpu() - torch.tensor(list(theirs))).abs().tolist()

    @property
    def mean(self) -> float:
        return sum(self._values) / max(len(self._values), 1)

    def check(self, device: str, what: str) -> dict[str, float]:
        """Figures. Raises PartFailed above a limit, or without any token."""
        if not self._values:
            raise PartFailed(f"{what}: no token to compare")
        if not all(value == value for value in self._values):
            raise PartFailed(f"{what}: log-probabilities are NaN")
        mean, largest = self.mean, max(self._values)
        for name, value, limit in zip(("mean", "max"), (mean, largest), LIMITS[device], strict=True):
            if value > limit:
                raise PartFailed(f"{what}: log-probabilities differ by {value:.3g} ({name}); at most {limit:g} is fine")
        return {"tokens": len(self._values), "logprob_diff_mean": mean, "logprob_diff_max": largest}


@contextmanager
def peak_of(device: str) -> Iterator[dict[str, float]]:
    """Torch's own peak of memory within the block, in MiB; empty on a CPU."""
    figures: dict[str, float] = {}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield figures
    if device == "cuda":
        figures["torch_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20


def _recipe_module(name: str) -> Any:
    if not (RECIPES / f"{name}.py").is_file():
        raise PartFailed("examples/train is not there: run scripts/gpu_smoke.sh of a checkout")
    if str(RECIPES) not in sys.path:
        sys.path.append(str(RECIPES))
    return __import__(name)

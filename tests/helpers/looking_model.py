"""A tiny Qwen3-VL that looks at halves of images with the tool in tests/eval_service/data/half.py, and names colours.

For "first?" or "second?" it requests the left half of that image, and for "twice?" the left half of the first and the
left half of that. Then it answers with the colour that it saw. Images are counted over all messages of the
conversation. Without an image it answers that there is none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.generators.qwen_images import QwenImages
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.content.parts import ImagePart, encode_image
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools import load_tools

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

HALF = Path(__file__).parents[1] / "eval_service/data/half.py"
OPTIONS = {
    "enable_mtrl": True,
    "mtrl_role": "tool",
    "action_stop_tokens": ["</half>"],
    "tool_schemas": "none",
    "max_turns": 3,
}
"""Settings of the loop in which it was trained."""
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
CALLS = {
    "first?": ("<half>1</half>",),
    "second?": ("<half>2</half>",),
    "twice?": ("<half>1</half>", "<half>1</half>"),
}
NOTHING = "none"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen's template, shortened."""
WORDS = ("<half>", "</half>", "first", "second", "twice", "half", NOTHING, *COLOURS, "user", "assistant", "tool")
PATCH = 16
STEPS, BATCH = 400, 16
SURE = 0.01
"""Mean loss of a token at which training stops. All answers are right then."""


def two_colours(left: str, right: str, side: int = 64) -> ImagePart:
    """Make a square of `side` pixels whose halves have these colours."""
    image = Image.new("RGB", (side, side), COLOURS[right])
    image.paste(COLOURS[left], (0, 0, side // 2, side))
    return encode_image(image)


@dataclass(frozen=True)
class Look:
    """A question, and the model's turns for it."""

    question: str
    images: tuple[ImagePart, ...]
    turns: tuple[str, ...]
    earlier: bool = False
    """Whether the first image is in an earlier message that was answered."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation with its images."""
        text = {"type": "text", "text": self.question}
        if not self.earlier:
            return [{"role": "user", "content": [*self.images, text]}]
        first = {"role": "user", "content": [self.images[0], {"type": "text", "text": "first?"}]}
        answer = {"role": "assistant", "content": NOTHING}
        return [first, answer, {"role": "user", "content": [*self.images[1:], text]}]

    def told(self, as_sent: Callable[[ImagePart], dict[str, Any]]) -> list[dict[str, Any]]:
        """Return `messages` with each image as `as_sent` writes it."""
        return [
            message
            if isinstance(message["content"], str)
            else {
                **message,
                "content": [as_sent(part) if isinstance(part, ImagePart) else part for part in message["content"]],
            }
            for message in self.messages
        ]


def looks(seed: int) -> Iterator[Look]:
    """Generate endless questions with their answers."""
    rng = random.Random(seed)
    while True:
        question = rng.choice([*CALLS, "hello?"])
        if question not in CALLS:
            yield Look(question, (), (NOTHING,))
            continue
        shown = [rng.sample(sorted(COLOURS), 2) for _ in range(2 if question == "second?" else rng.randint(1, 2))]
        seen = shown[1 if question == "second?" else 0][0]
        earlier = question == "second?" and rng.random() < 0.5
        images = tuple(two_colours(left, right) for left, right in shown)
        yield Look(question, images, (*CALLS[question], seen), earlier)


def rows(wanted: Sequence[Look]) -> list[dict[str, Any]]:
    """Make verl's rows of these looks. The ground truth is a number, as the calculator's reward requires."""
    return [
        {
            "data_source": "colours",
            "prompt": [
                {**message, "content": _tagged(message["content"])} if message["role"] == "user" else message
                for message in look.messages
            ],
            "images": [{"bytes": image.data, "path": None} for image in look.images],
            "ability": "looking",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"split": "any", "index": index},
            "agent_name": "verltool_agent",
            "use_tool": True,
        }
        for index, look in enumerate(wanted)
    ]


def _tagged(content: Sequence[Any]) -> str:
    return "".join("<image>" if isinstance(part, ImagePart) else part["text"] for part in content)


class _Told:
    """A generator that writes a look's turns."""

    def __init__(self, tokenizer: HFTokenizer, turns: Sequence[str]) -> None:
        self._turns = iter(turns)
        self._tokenizer = tokenizer

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, images: Sequence[ImagePart] = ()
    ) -> Generation:
        turn = next(self._turns)
        end = [] if turn.startswith("<half>") else sorted(self._tokenizer.eos_token_ids)
        return Generation([*self._tokenizer.encode(turn), *end], None, "stop")


async def _played(tokenizer: HFTokenizer, images: QwenImages, wanted: Sequence[Look]) -> list[Trajectory]:
    """Return the records of the loop for these looks, with the real tool."""
    options = EpisodeOptions.load(OPTIONS)
    prompts = PromptRenderer(tokenizer, options)
    async with InProcessTools(load_tools(str(HALF))) as tools:
        return [
            await Episode(_Told(tokenizer, look.turns), tools, tokenizer, options, image_tokens=images).run(
                tokenizer.encode(prompts.text(look.told(lambda image: {"type": "image"}), None)),
                images=look.images,
            )
            for look in wanted
        ]


def make_tokenizer() -> Any:
    """Make a tokenizer of bytes and of the words above, one token each."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    return transformers.Qwen2TokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def make_config(tokenizer: Any) -> Any:
    """Make a config of some 200,000 weights."""
    begin, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "rope_parameters": rope,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
    )


def make_model(tokenizer: Any) -> Any:
    """Make a random model."""
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(make_config(tokenizer)).float()
    with torch.no_grad():  # the deviation of fresh weights is for wide models
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(3.0)
    return model


def make_image_processor() -> Any:
    """Make a processor that leaves the squares of `two_colours` and their halves unchanged."""
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    return Qwen2VLImageProcessorPil(size=size, patch_size=PATCH, merge_size=2)


def prepare(folder: Path) -> Path:
    """Make the model, train it, and save it in `folder` in the form of the hub. Takes half a minute."""
    bare, processor = make_tokenizer(), make_image_processor()
    tokenizer = HFTokenizer(bare)
    images, model = QwenImages(processor, tokenizer), make_model(bare)
    source = looks(0)
    lessons = asyncio.run(_played(tokenizer, images, [next(source) for _ in range(256)]))
    _teach(model, lessons, images, bare.pad_token_id)
    for part in (model, bare, processor):
        part.save_pretrained(folder)
    return folder


def _teach(model: Any, lessons: Sequence[Trajectory], images: QwenImages, padding: int) -> None:
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(STEPS):
        batch = rng.sample(list(lessons), BATCH)
        optimizer.zero_grad()
        loss = _loss(model, batch, images, padding)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < SURE:
            return
    raise AssertionError(f"the model did not learn to look: its loss is {loss.item():.3f} after {STEPS} steps")


def _loss(model: Any, batch: Sequence[Trajectory], images: QwenImages, padding: int) -> Any:
    """Return the mean over the tokens that the model writes."""
    width = max(len(t.prompt_ids) + len(t.response_ids) for t in batch)

    def padded(rows: list[list[int]], value: int) -> Any:
        return torch.tensor([row + [value] * (width - len(row)) for row in rows])

    ids = padded([t.prompt_ids + t.response_ids for t in batch], padding)
    mask = padded([[1] * (len(t.prompt_ids) + len(t.response_ids)) for t in batch], 0)
    written = padded([[0] * len(t.prompt_ids) + t.response_mask for t in batch], 0)
    shown = [image.decode() for t in batch for image in t.visible_images]
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        mm_token_type_ids=(ids == images.pad_id).int(),
        **images.features(shown),
    ).logits
    labels = torch.where(written == 1, ids, -100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())

"""A byte-level tokenizer, a generator and tools that are easy to follow and behave like the real ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.protocol import Fault, StepResult

START, END, EOS = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True)
class Template:
    """A chat template: opens a turn, writes its content, and closes it."""

    open: str = START + "{role}\n"
    close: str = END + "\n"
    begin: str = ""
    trim: bool = False
    """Whether it strips the content, like many templates."""
    drop_thoughts: bool = False
    """Whether it drops all up to ``</think>`` from turns of the assistant except the last, like Qwen3's."""

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        text = self.begin
        for i, message in enumerate(messages):
            content = message["content"].strip() if self.trim else message["content"]
            if self.drop_thoughts and message["role"] == "assistant" and i + 1 < len(messages):
                content = content.rpartition("</think>")[2]
            text += self.open.format(role=message["role"]) + content + self.close
        return text + (self.open.format(role="assistant") if add_generation_prompt else "")


class Characters:
    """One token per character."""

    eos_token_id = 0
    all_special_tokens = ("\0",)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(map(chr, token_ids))


class ToyTokenizer:
    """Ids 0-255 are bytes, followed by the special tokens and `words`: ordinary tokens, longest match first."""

    def __init__(
        self, template: Template | None = None, words: Sequence[str] = (), specials: Sequence[str] = ()
    ) -> None:
        self.template = template or Template()
        self.special_tokens = (START, END, EOS, *specials)
        self.eos_token_ids = frozenset({self.special("<|im_end|>")})
        self.words = tuple(sorted(words, key=len, reverse=True))
        self._pieces = [bytes([b]) for b in range(256)] + [t.encode() for t in (*self.special_tokens, *self.words)]

    def special(self, token: str) -> int:
        return 256 + self.special_tokens.index(token)

    @property
    def vocabulary(self) -> range:
        return range(len(self._pieces))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        known = [(t, 256 + i) for i, t in enumerate((*self.special_tokens, *self.words))]
        while text:
            for token, token_id in known:
                if text.startswith(token):
                    ids.append(token_id)
                    text = text[len(token) :]
                    break
            else:
                ids.extend(text[0].encode())
                text = text[1:]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._pieces[i] for i in token_ids).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        return self.template.render(messages, add_generation_prompt)


@dataclass
class Fed:
    """One request of the loop to the generator, and its answer."""

    prompt_ids: list[int]
    params: dict[str, Any]
    request_id: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class ToyEngine:
    """Keeps an engine's promises on `max_tokens`, `stop` and end tokens for any tokens of `choose`."""

    def __init__(self, tokenizer: ToyTokenizer) -> None:
        self.tokenizer = tokenizer
        self.fed: list[Fed] = []

    def choose(self, request: Fed, n: int) -> int:
        """Return token `n` of the answer to `request`."""
        raise NotImplementedError

    def log_prob(self, request: Fed, n: int) -> float:
        return -(len(self.fed) + (n + 1) / 1024)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        request = Fed(list(prompt_ids), dict(sampling_params), request_id)
        self.fed.append(request)
        most = sampling_params.get("max_tokens", 200)
        if most < 1:
            raise ValueError(f"max_tokens={most}; engines take 1 and more")
        ends = self.tokenizer.eos_token_ids | set(sampling_params.get("stop_token_ids", ()))
        stops = sampling_params.get("stop", ())
        reason = "length"
        while len(request.token_ids) < most:
            n = len(request.token_ids)
            request.token_ids.append(self.choose(request, n))
            request.log_probs.append(self.log_prob(request, n))
            text = self.tokenizer.decode(request.token_ids)
            if request.token_ids[-1] in ends or any(stop in text for stop in stops):
                reason = "stop"
                break
        return Generation(tuple(request.token_ids), tuple(request.log_probs), reason)


class ScriptedEngine(ToyEngine):
    """Writes the turns (text or token ids) one after the other. A turn without further tokens ends with the end
    token."""

    def __init__(self, tokenizer: ToyTokenizer, turns: Sequence[str | Sequence[int]]) -> None:
        super().__init__(tokenizer)
        self.turns = [tokenizer.encode(t) if isinstance(t, str) else list(t) for t in turns]

    def choose(self, request: Fed, n: int) -> int:
        turn = self.turns[len(self.fed) - 1]
        return turn[n] if n < len(turn) else min(self.tokenizer.eos_token_ids)


class RandomEngine(ToyEngine):
    """Writes random tokens, biased to those in `likely` so that turns end and actions happen."""

    def __init__(self, tokenizer: ToyTokenizer, seed: int, likely: Sequence[int]) -> None:
        super().__init__(tokenizer)
        self._random = random.Random(seed)
        self._likely = list(likely)

    def choose(self, request: Fed, n: int) -> int:
        if self._random.random() < 0.4:
            return self._random.choice(self._likely)
        return self._random.choice(self.tokenizer.vocabulary)


@dataclass(frozen=True)
class Asked:
    """One call of the loop."""

    trajectory_id: str
    action: str
    step: int | None
    extra: Mapping[str, Any]
    finish: bool
    is_last_step: bool


class ToyTools:
    """Answers each call by `reply(action, number of the call)`, and records the calls."""

    def __init__(self, reply: Callable[[str, int], StepResult | str]) -> None:
        self._reply = reply
        self.asked: list[Asked] = []
        self.finished: list[str] = []

    async def call(
        self,
        trajectory_id: str,
        action: str,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        finish: bool = False,
        is_last_step: bool = False,
    ) -> StepResult:
        if finish:
            self.finished.append(trajectory_id)
            return StepResult(trajectory_id)
        self.asked.append(Asked(trajectory_id, action, step, dict(extra or {}), finish, is_last_step))
        reply = self._reply(action, len(self.asked) - 1)
        return StepResult(trajectory_id, reply) if isinstance(reply, str) else reply


def failing(fault: Fault) -> StepResult:
    return StepResult("t", fault=fault)


def turns_of(trace: Sequence[Any]) -> list[str]:
    """Return the model's turns in a trajectory of a recipe's examples (parts of text, `learned` or not)."""
    turns = [""]
    for part in trace:
        if part.learned:
            turns[-1] += part.text
        else:
            turns.append("")
    return turns

"""Models by family: their templates, formats, and forms of a turn with calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ANSWERS = {"Oslo": "7 °C\nrain", "Rome": 'sun, "hot"', "Bonn": "[x] {y}"}
Call = tuple[str, str]
"""An id, and a city."""


def as_json(city: str) -> str:
    return json.dumps({"city": city})


@dataclass(frozen=True)
class Family:
    """A model: its template, its format, and its form of a turn with calls."""

    template: str
    format: str
    ends: tuple[str, ...]
    """End tokens of its generation config. The first ends an answer."""
    write: Callable[[Sequence[Call]], str]
    """A turn with its end token."""
    answer: Callable[[str], str] = lambda text: text
    ids: Callable[[int], str] = lambda number: f"call{number:05d}"
    several: bool = True
    """Whether the template supports several calls in a turn."""
    arguments: Callable[[str], Any] = field(default=lambda city: {"city": city})
    """Form of the arguments in a message of the conversation."""
    content: str = ""
    """Text before the calls, and before the answer, of each message."""


def hermes(calls: Sequence[Call]) -> str:
    return (
        "\n".join(
            f'<tool_call>\n{{"name": "weather", "arguments": {as_json(city)}}}\n</tool_call>' for _, city in calls
        )
        + "<|im_end|>"
    )


def qwen_xml(calls: Sequence[Call]) -> str:
    written = (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
        for _, city in calls
    )
    return "\n".join(written) + "<|im_end|>"


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "weather", "parameters": {as_json(city)}}}' for _, city in calls) + "<|eot_id|>"


def mistral_list(calls: Sequence[Call]) -> str:
    objects = (f'{{"name": "weather", "arguments": {as_json(city)}, "id": "{call_id}"}}' for call_id, city in calls)
    return f"[TOOL_CALLS][{', '.join(objects)}]</s>"


def mistral_older(calls: Sequence[Call]) -> str:
    return mistral_list(calls).replace("[TOOL_CALLS]", "[TOOL_CALLS] ")


def mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]weather[CALL_ID]{call_id}[ARGS]{as_json(city)}" for call_id, city in calls) + "</s>"


def deepseek_fenced(calls: Sequence[Call]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{as_json(city)}\n```<｜tool▁call▁end｜>"
        for _, city in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def deepseek(calls: Sequence[Call]) -> str:
    written = (f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{as_json(city)}<｜tool▁call▁end｜>" for _, city in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def glm(calls: Sequence[Call]) -> str:
    written = (
        f"\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n</tool_call>"
        for _, city in calls
    )
    return f"\n<think></think>{''.join(written)}<|observation|>"


def kimi(calls: Sequence[Call]) -> str:
    written = (
        f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{as_json(city)}<|tool_call_end|>"
        for call_id, city in calls
    )
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|><|im_end|>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f" to=functions.weather<|channel|>commentary json<|message|>{as_json(city)}<|call|>" for _, city in calls
    )


def thinking(write: Callable[[Sequence[Call]], str]) -> Callable[[Sequence[Call]], str]:
    """Return the turns of a model that thinks first."""
    return lambda calls: f"{THOUGHT}{write(calls)}"


THOUGHT = "<think>\nI could write <tool_call>{}</tool_call>.\n</think>\n\n"
QWEN = ("<|im_end|>",)
DEEPSEEK = ("<｜end▁of▁sentence｜>",)
FAMILIES = (
    Family("Qwen-Qwen2.5-7B-Instruct", "hermes", QWEN, hermes),
    Family("Qwen-Qwen3-4B-Instruct-2507", "hermes", QWEN, hermes),
    Family("Qwen-Qwen3-0.6B", "hermes", QWEN, thinking(hermes), lambda text: THOUGHT + text, content=THOUGHT),
    Family("Qwen-Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder", QWEN, qwen_xml),
    Family("meta-llama-Llama-3.1-8B-Instruct", "llama3", ("<|eot_id|>", "<|eom_id|>"), llama, several=False),
    Family("meta-llama-Llama-3.2-3B-Instruct", "llama3", ("<|eot_id|>", "<|eom_id|>"), llama, several=False),
    Family("mistralai-Mistral-7B-Instruct-v0.3", "mistral", ("</s>",), mistral_older, lambda text: f" {text}"),
    Family("mistralai-Mistral-Nemo-Instruct-2407", "mistral", ("</s>",), mistral_list),
    Family("Mistral-Small-3.2-24B-Instruct-2506", "mistral", ("</s>",), mistral_named),
    Family(
        "trl-internal-testing-tiny-DeepseekV3ForCausalLM-0528",
        "deepseek",
        DEEPSEEK,
        deepseek_fenced,
        arguments=as_json,
    ),
    Family("deepseek-ai-DeepSeek-V3.1", "deepseek", DEEPSEEK, deepseek),
    Family(
        "zai-org-GLM-4.5-Air",
        "glm",
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
        glm,
        lambda text: f"\n<think></think>\n{text}",
    ),
    Family("moonshotai-Kimi-K2-Instruct", "kimi", QWEN, kimi, ids=lambda number: f"functions.weather:{number}"),
    Family(
        "openai-gpt-oss-120b",
        "harmony",
        ("<|return|>", "<|call|>", "<|endoftext|>"),
        harmony,
        lambda text: f"<|channel|>final<|message|>{text}",
        several=False,
    ),
)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)


def numbered(family: Family, cities: Sequence[Sequence[str]]) -> list[list[Call]]:
    count = iter(range(100))
    return [[(family.ids(next(count)), city) for city in turn] for turn in cities]

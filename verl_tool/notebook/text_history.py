"""One trajectory to look at: who wrote what, in colours, on a terminal or in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from verl_tool.agent_loop.tokenizer import HFTokenizer, PreTrainedTokenizer
from verl_tool.agent_loop.trajectory import Author, Trajectory
from verl_tool.content.parts import ImagePart, to_wire
from verl_tool.protocol import Fault

# Terminal colours that differ on terminals of 16 colours too, and their like in HTML.
_STYLES = {
    Author.PROMPT: ("black on white", "background:#dadada"),
    Author.MODEL: ("black on bright_cyan", "background:#afd7ff"),
    Author.TOOL: ("black on bright_green", "background:#afffaf"),
    Author.TEMPLATE: ("black on bright_yellow", "background:#ffffaf"),
}
_REWARD_STYLE = ("black on bright_magenta", "background:#ffafff")
_NAMES = {Author.PROMPT: "Prompt", Author.MODEL: "Model", Author.TOOL: "Tool", Author.TEMPLATE: "Template"}


class TextHistory:
    """A `Trajectory` under the names that users of TRL's text environment know."""

    def __init__(self, trajectory: Trajectory, reward: object = 0.0) -> None:
        self.trajectory = trajectory
        self.reward = reward
        """What `reward_fn` gave for it."""

    @property
    def text(self) -> str:
        """All text, the prompt's too."""
        return "".join(segment.text for segment in self.trajectory.segments)

    @property
    def text_spans(self) -> list[tuple[int, int]]:
        """Start and end of each segment in `text`."""
        return _spans(len(segment.text) for segment in self.trajectory.segments)

    @property
    def tokens(self) -> list[int]:
        """All token ids, the prompt's too."""
        return self.trajectory.prompt_ids + self.trajectory.response_ids

    @property
    def token_spans(self) -> list[tuple[int, int]]:
        """Start and end of each segment in `tokens`."""
        return _spans(len(segment.tokens) for segment in self.trajectory.segments)

    @property
    def token_masks(self) -> list[int]:
        """1 on tokens of the model, one entry a token of `tokens`."""
        return [0] * len(self.trajectory.prompt_ids) + self.trajectory.response_mask

    @property
    def system_spans(self) -> list[bool]:
        """For each segment, whether somebody else than the model wrote it."""
        return [segment.author is not Author.MODEL for segment in self.trajectory.segments]

    @property
    def last_text_segment(self) -> str:
        """Text of the last segment: what `reward_fn` is given."""
        return self.trajectory.segments[-1].text

    @property
    def completed(self) -> bool:
        """Always: a history is made of a trajectory that ended."""
        return True

    @property
    def truncated(self) -> bool:
        """A limit of turns or length ended it, or a fault."""
        return not self.trajectory.stop.finished

    @property
    def fault(self) -> Fault | None:
        """The infrastructure's failure that ended it, or that kept its verifier from running. Its mask is 0 then,
        unless a call of the model may have caused it."""
        verdict = self.trajectory.verdict
        return self.trajectory.fault or (verdict.fault if verdict is not None else None)

    def show_text(self, show_legend: bool = False) -> None:
        """Print the text, coloured by who wrote it."""
        text = Text()
        for segment in self.trajectory.segments:
            text.append(_printable(segment.text), _STYLES[segment.author][0])
        self._print(text, show_legend)

    def show_tokens(self, tokenizer: PreTrainedTokenizer, show_legend: bool = False) -> None:
        """Print token by token, coloured by who wrote it. `tokenizer` is transformers'."""
        text = Text()
        for author, token in self._pieces(tokenizer):
            text.append(token, _STYLES[author][0])
            text.append(" ")
        self._print(text, show_legend)

    def to_html(self, tokenizer: PreTrainedTokenizer | None = None) -> str:
        """The same as HTML: text and images, or single tokens if a tokenizer is given."""
        if tokenizer is None:
            images = self.trajectory.images
            spans = [
                _picture(images[s.image]) if s.image in images else _span(_STYLES[s.author][1], s.text)
                for s in self.trajectory.segments
                if s.text
            ]
        else:
            spans = [_span(_STYLES[author][1], token) + " " for author, token in self._pieces(tokenizer)]
        reward = _span(_REWARD_STYLE[1], f"Reward: {self.reward}")
        return f'<div style="white-space:pre-wrap;font-family:monospace">{"".join(spans)}\n{reward}</div>'

    def _repr_html_(self) -> str:
        return self.to_html()

    def _pieces(self, tokenizer: PreTrainedTokenizer) -> Iterable[tuple[Author, str]]:
        decode = HFTokenizer(tokenizer).decode
        for segment in self.trajectory.segments:
            for token in segment.tokens:
                yield segment.author, _printable(decode([token])).replace("\n", "⏎")

    def _print(self, text: Text, show_legend: bool) -> None:
        text.append("\n")
        text.append(f"Reward: {self.reward}", _REWARD_STYLE[0])
        if show_legend:
            text.append("\n(")
            for author, name in _NAMES.items():
                text.append(name, _STYLES[author][0])
                text.append("|")
            text.append("Reward", _REWARD_STYLE[0])
            text.append(")")
        Console().print(text)


def _spans(lengths: Iterable[int]) -> list[tuple[int, int]]:
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return spans


def _picture(image: ImagePart) -> str:
    return f'<img src="{to_wire(image)}" alt="image {image.sha256[:12]}" style="vertical-align:middle">'


def _printable(text: str) -> str:
    """Text without the character that starts terminal commands, which a tool's output may hold."""
    return text.replace("\x1b", "␛").replace("\x9b", "␛")


def _span(style: str, text: str) -> str:
    return f'<span style="{style};color:#000">{html.escape(text)}</span>'

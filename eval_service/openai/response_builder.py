"""What surrounds the choices of an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from eval_service.openai.usage import Usage
from verl_tool.agent_loop.trajectory import Author, Trajectory
from verl_tool.content.parts import to_wire
from verl_tool.http import event_stream


@dataclass(frozen=True)
class ResponseBuilder:
    """Id, time and model of one answer, the same in all of its chunks."""

    id: str
    model: str
    object: str
    chunk_object: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of_chat(cls, model: str) -> ResponseBuilder:
        return cls(f"chatcmpl-{uuid.uuid4().hex}", model, "chat.completion", "chat.completion.chunk")

    @classmethod
    def of_completion(cls, model: str) -> ResponseBuilder:
        return cls(f"cmpl-{uuid.uuid4().hex}", model, "text_completion", "text_completion")

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._head(self.object) | {"choices": list(choices), "usage": usage.as_dict()}

    def chunk(self, choices: Sequence[dict[str, Any]], usage: Usage | None = None) -> bytes:
        """Part of the answer, as an event of a stream."""
        value = self._head(self.chunk_object) | {"choices": list(choices)}
        return event_stream.event(value if usage is None else value | {"usage": usage.as_dict()})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def ending(trajectory: Trajectory, with_trajectory: bool) -> dict[str, Any]:
    """The fields of a choice that tell its end: OpenAI's ``finish_reason``, and the loop's own reason.

    With `with_trajectory`, the whole record of the trajectory too, and the images that tools showed: data URIs, by the
    hashes that the record names.
    """
    fields: dict[str, Any] = {
        "finish_reason": "stop" if trajectory.stop.finished else "length",
        "stop_reason": trajectory.stop.value,
    }
    if with_trajectory:
        fields["trajectory"] = msgspec.Raw(trajectory.to_json().encode())
        sent = {segment.image for segment in trajectory.segments if segment.author is Author.PROMPT}
        images = {name: to_wire(image) for name, image in trajectory.images.items() if name not in sent}
        if images:
            fields["images"] = images
    return fields

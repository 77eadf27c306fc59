"""Whether a model reads images, by its config."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="verl is not here: source scripts/env.sh train")

from transformers import AutoConfig, Qwen2Config

from verl_tool.agent_loop.verl.image_reading import UNKNOWN, why_no_images


@pytest.mark.parametrize(
    ("here", "on_the_hub", "asked", "said"),
    [
        (True, True, ["here"], "reads text only"),
        (False, True, ["here", "hub"], "reads text only"),
        (False, False, ["here", "hub"], UNKNOWN),
    ],
)
def test_the_hub_is_asked_only_for_what_is_not_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, here: bool, on_the_hub: bool, asked: list[str], said: str
) -> None:
    places: list[str] = []

    def from_pretrained(_model: str, *, trust_remote_code: bool, local_files_only: bool = False) -> Qwen2Config:
        places.append("here" if local_files_only else "hub")
        if not (here if local_files_only else on_the_hub):
            raise OSError("it is not there")
        return Qwen2Config()

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    assert (why_no_images("owner/model"), places) == (said, asked)

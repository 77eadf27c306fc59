from __future__ import annotations

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")
pytest.importorskip("torchvision", reason="torchvision is not here: source scripts/env.sh train")

from shown_tool import striped  # noqa: E402
from tiny_vision import vision_model  # noqa: E402
from verl.models.transformers import qwen2_vl  # noqa: E402

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


def test_text_and_images_are_embedded_as_by_the_model_itself():
    model, _, processor = vision_model("qwen2_5_vl")
    ids = torch.tensor([[7, 8, 9]])
    found, _ = qwen2_vl._get_input_embeds(model.model, ids, torch.ones_like(ids))
    assert torch.equal(found, model.get_input_embeddings()(ids))
    found.sum().backward()
    assert all(w.grad is not None and not w.grad.any() for w in model.model.visual.parameters())
    given = processor(text=[f"a{PLACE}b"], images=[striped(1).decode()], return_tensors="pt")
    given.pop("mm_token_type_ids", None)
    seen, _ = qwen2_vl._get_input_embeds(model.model, **given)
    assert not torch.equal(seen, model.get_input_embeddings()(given["input_ids"]))

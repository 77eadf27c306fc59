from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")
pytest.importorskip("torchvision", reason="torchvision is not here: source scripts/env.sh train")

from shown_tool import striped  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker  # noqa: E402
from verl.utils.model import extract_multi_modal_inputs  # noqa: E402

from verl_tool.platforms.vision.packed_images import PACKED, pack, pixel_values  # noqa: E402


@pytest.fixture(scope="module")
def processor():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 64 * 64, "longest_edge": 96 * 96})


def test_pixels_are_those_of_the_processor(processor):
    images = [striped(1, 40), striped(2, 128)]
    want = processor(images=[image.decode() for image in images], return_tensors="pt")["pixel_values"]
    assert torch.equal(pixel_values(pack(processor, images)), want)
    assert len(pack(processor, images)) < sum(len(image.data) for image in images) + 3000


def test_a_file_that_nobody_can_read_has_its_place(processor):
    image = striped(1)
    broken = replace(image, data=image.data[:60], sha256="0" * 64)
    want = pixel_values(pack(processor, [image])).shape
    assert pixel_values(pack(processor, [broken])).shape == want


def test_a_micro_batch_of_images_and_text(processor):
    grid = torch.tensor([[1, 4, 4]])
    one, other = ({PACKED: pack(processor, [striped(n)]), "image_grid_thw": grid} for n in (1, 2))
    found = extract_multi_modal_inputs([one, {}, SimpleNamespace(data=other).data])
    assert set(found) == {"pixel_values", "image_grid_thw"}
    both = pixel_values(pack(processor, [striped(1), striped(2)]))
    assert torch.equal(found["pixel_values"], both)
    assert torch.equal(extract_multi_modal_inputs([one, other], indices=[1])["pixel_values"], both[len(both) // 2 :])
    assert extract_multi_modal_inputs([{}, None]) == {}


def test_what_the_loop_made_is_taken_and_others_are_made_by_verl():
    worker = SimpleNamespace(processor=None)
    made = {"image_grid_thw": 1, "mm_token_type_ids": 2}
    taken = AgentLoopWorker._compute_multi_modal_inputs(worker, SimpleNamespace(model_inputs=made), None)
    taken.pop("mm_token_type_ids")  # as verl does
    assert made == {"image_grid_thw": 1, "mm_token_type_ids": 2}
    assert AgentLoopWorker._compute_multi_modal_inputs(worker, SimpleNamespace(), None) == {}

from __future__ import annotations

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from tensordict import TensorDict  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding  # noqa: E402

LENGTHS = [[7, 9, 8, 9], [9, 9, 9, 9], [4, 4], [3]]


def positions_of(length: int, sequence: int) -> torch.Tensor:
    """Four rows that tell themselves apart. [4, length]"""
    return torch.arange(length) + 100 * torch.arange(4).unsqueeze(1) + 1000 * sequence


def assert_right(batch: TensorDict, lengths: list[int]) -> None:
    """Each sequence of each half has its own positions."""
    parts = 2 if len(lengths) % 2 == 0 else 1
    each = len(lengths) // parts
    for half, chunk in enumerate(tensordict_utils.chunk_tensordict(batch, parts)):
        tensordict_utils.maybe_fix_3d_position_ids(chunk)
        own = lengths[half * each : (half + 1) * each]
        padded = torch.nested.to_padded_tensor(chunk["position_ids"], padding=-1, output_size=(each, 4, max(own)))
        for n, length in enumerate(own):
            assert torch.equal(padded[n, :, :length], positions_of(length, half * each + n))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_positions_of_a_padded_batch(lengths):
    b, n = len(lengths), max(lengths) + 1
    mask = torch.tensor([[1] * length + [0] * (n - length) for length in lengths])
    positions = torch.stack([positions_of(n, sequence) for sequence in range(b)])
    ids = torch.ones(b, n, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 2:].clone(), "position_ids": positions}
    assert_right(left_right_2_no_padding(TensorDict(batch, batch_size=b)), lengths)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_positions_of_sequences_that_torch_put_together(lengths):
    """As those of the newer trainer come out of its queue."""
    rows = [positions_of(length, n) for n, length in enumerate(lengths)]
    batch = TensorDict({"position_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, len(lengths))
    tensordict_utils.maybe_fix_3d_position_ids(batch)
    assert_right(batch, lengths)


def test_positions_of_text_stay_as_they_are():
    rows = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(3)], layout=torch.jagged)
    batch = TensorDict({"position_ids": rows}, 2)
    tensordict_utils.maybe_fix_3d_position_ids(batch)
    assert batch["position_ids"].dim() == 2

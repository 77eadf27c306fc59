"""Statistics of calls and of other text, in the form of verl's micro-batches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from tensordict import TensorDict  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding  # noqa: E402

from verl_tool.agent_workers.segment_statistics import LossWithSegmentStatistics, segment_statistics  # noqa: E402

PROMPT, RESPONSE = 2, 4


def micro_batch(mask, calls):
    """Two rows of full length, their model output all zeros but for what the test sets. [2, RESPONSE] each."""
    n, length = 2, PROMPT + RESPONSE
    ids = torch.arange(n * length).reshape(n, length)
    data = TensorDict(
        {
            "prompts": ids[:, :PROMPT],
            "responses": ids[:, PROMPT:],
            "input_ids": ids,
            "attention_mask": torch.ones(n, length, dtype=torch.int64),
            "position_ids": torch.arange(length).repeat(n, 1),
            "response_mask": torch.tensor(mask),
            "action_mask": torch.tensor(calls),
            "rollout_log_probs": torch.zeros(n, RESPONSE),
        },
        batch_size=n,
    )
    return left_right_2_no_padding(data)


def unpadded(values):
    """A model's output for the response's tokens, which stand one place to the left. [2, RESPONSE] -> [total]"""
    full = torch.zeros(2, PROMPT + RESPONSE)
    full[:, PROMPT - 1 : -1] = torch.tensor(values)
    return torch.nested.as_nested_tensor(list(full), layout=torch.jagged)


def test_calls_and_text_are_told_apart():
    data = micro_batch([[1, 1, 0, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [0, 0, 0, 1]])
    output = {
        "entropy": unpadded([[1.0, 3.0, 9.0, 5.0], [7.0, 7.0, 7.0, 2.0]]),
        "log_probs": unpadded([[-0.5, -0.5, -9.0, -0.1], [-0.1, -0.1, -0.1, -0.2]]),
    }
    told = {name: metric.aggregate() for name, metric in segment_statistics(output, data).items()}
    assert told["segment/action_entropy"] == pytest.approx(2.0)
    assert told["segment/text_entropy"] == pytest.approx((5 + 7 * 3) / 4)
    assert told["segment/action_log_prob_gap"] == pytest.approx(0.4)
    assert told["segment/text_log_prob_gap"] == pytest.approx(0.1)


def test_no_statistic_of_tokens_that_are_not_there():
    data = micro_batch([[1, 1, 1, 1]] * 2, [[0, 0, 0, 0]] * 2)
    told = segment_statistics({"log_probs": unpadded([[0.0] * RESPONSE] * 2)}, data)
    assert set(told) == {"segment/text_log_prob_gap"}


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (3, float("nan"))])
def test_only_an_empty_mini_batch_turns_nan_into_no_loss(tokens, expected):
    def loss_fn(model_output, data, dp_group):
        return torch.tensor(float("nan")), {"own": 1}

    data = micro_batch([[0] * RESPONSE] * 2, [[0] * RESPONSE] * 2)
    tu.assign_non_tensor(data, batch_num_tokens=tokens)
    loss, metrics = LossWithSegmentStatistics(loss_fn)({"log_probs": unpadded([[0.0] * RESPONSE] * 2)}, data)
    assert loss.item() == pytest.approx(expected, nan_ok=True)
    assert metrics == {"own": 1}


def test_a_row_that_fills_up_a_batch_counts_for_nothing():
    """As verl makes it: one response token, but the action mask of a longer row."""
    rows = {
        "response_mask": [torch.tensor([1, 1]), torch.tensor([0])],
        "action_mask": [torch.tensor([1, 0]), torch.tensor([1, 1, 1])],
        "input_ids": [torch.arange(3), torch.arange(2)],
        "prompts": [torch.arange(1), torch.arange(1)],
        "responses": [torch.arange(2), torch.arange(1)],
        "attention_mask": [torch.ones(3), torch.ones(2)],
    }
    jagged = {name: torch.nested.as_nested_tensor(list(values), layout=torch.jagged) for name, values in rows.items()}
    output = {
        "entropy": torch.nested.as_nested_tensor([torch.tensor([2.0, 4.0, 0.0]), torch.zeros(2)], layout=torch.jagged)
    }
    told = {k: m.aggregate() for k, m in segment_statistics(output, TensorDict(jagged, batch_size=2)).items()}
    assert told == {"segment/action_entropy": pytest.approx(2.0), "segment/text_entropy": pytest.approx(4.0)}

"""MT-GRPO against the equations written out row by row, and against verl's GRPO."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from turn_reference import Row, written_out  # noqa: E402
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn  # noqa: E402

from verl_tool.trainer.ppo.turns.mt_grpo import compute_mt_grpo_advantage  # noqa: E402

REWARDS = st.sampled_from([-1.0, 0.0, 0.2, 0.7, 1.0])


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    turn = st.tuples(REWARDS, st.integers(1, 3), st.integers(0, 2))
    some = st.lists(turn, min_size=0, max_size=4).map(tuple)
    row = st.builds(Row, st.integers(0, 2), REWARDS, some, st.sampled_from([False, False, False, True]))
    return draw(st.lists(row, min_size=1, max_size=9))


def tensors(rows: list[Row], zero: bool = False) -> dict[str, object]:
    """As the trainers have them: padded, the outcome's reward on the last token."""
    length = max(1, *(len(row.ids) for row in rows))
    turns = max(len(row.turns) for row in rows)
    ids, rewards = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length)
    by_turn = torch.zeros(len(rows), turns, dtype=torch.float64)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.int64)
        rewards[i, max(0, len(row.ids) - 1)] = row.outcome
        for k, (reward, _, _) in enumerate(row.turns):
            by_turn[i, k] = 0.0 if zero else reward
    mask = (ids > 0).long() * torch.tensor([[not row.masked] for row in rows])
    index = np.array([f"g{row.group}" for row in rows], dtype=object)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": index,
        "turn_ids": ids,
        "turn_rewards": by_turn,
    }


def advantages(rows: list[Row], zero: bool = False, **config: object) -> torch.Tensor:
    return compute_mt_grpo_advantage(**tensors(rows, zero), config=config)[0]


@settings(max_examples=100)
@given(batches(), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.sampled_from([0.0, 0.3, 1.0]), st.booleans())
def test_it_is_the_equation_token_by_token(rows, discount, weight, by_std):
    options = {"discount": discount, "turn_weight": weight}
    found = advantages(rows, mt_grpo=options, norm_adv_by_std_in_grpo=by_std)
    for line, expected in zip(found.tolist(), written_out(rows, discount, weight, by_std), strict=True):
        assert line[: len(expected)] == pytest.approx(expected, abs=2e-5)
        assert not any(line[len(expected) :])


@settings(max_examples=60)
@given(batches(), st.booleans())
def test_without_turn_rewards_it_is_grpo(rows, by_std):
    """Not nearly: bit by bit. It is so with a weight of 0, too."""
    told = tensors(rows)
    grpo, _ = compute_grpo_outcome_advantage(
        told["token_level_rewards"], told["response_mask"], told["index"], norm_adv_by_std_in_grpo=by_std
    )
    assert torch.equal(advantages(rows, zero=True, norm_adv_by_std_in_grpo=by_std), grpo)
    assert torch.equal(advantages(rows, mt_grpo={"turn_weight": 0.0}, norm_adv_by_std_in_grpo=by_std), grpo)


@settings(max_examples=100)
@given(batches())
def test_a_turn_has_one_advantage_and_an_observation_none(rows):
    told = tensors(rows)
    found, ids = advantages(rows), told["turn_ids"]
    assert found.isfinite().all()
    assert not found[told["response_mask"] == 0].any()
    for row, turns in zip(found, ids, strict=True):
        for turn in range(1, int(turns.max()) + 1):
            assert len(row[turns == turn].unique()) == 1


@settings(max_examples=50)
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows, random):
    order = random.sample(range(len(rows)), len(rows))
    assert torch.allclose(advantages(rows)[order], advantages([rows[i] for i in order]), atol=1e-6)


def test_the_two_turns_of_the_paper():
    """Equation 5 with its α: a search that found something or not, and an answer that is right or not."""
    cases = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    rows = [Row(0, right, ((0.45 + 0.25 * found, 2, 1), (0.0, 1, 0))) for found, right in cases]
    found = advantages(rows, mt_grpo={"discount": 0.5, "turn_weight": 1.0})
    unit = 0.75**0.5  # half the distance of two pairs over their deviation
    assert found[:, 0].tolist() == pytest.approx([unit * (turn + 0.5 * right) for turn, right in cases], abs=1e-4)
    assert found[:, 3].tolist() == pytest.approx([unit * right for _, right in cases], abs=1e-4)
    assert torch.equal(found[:, 0], found[:, 1])
    assert not found[:, 2].any()


def test_who_makes_no_call_where_others_do_is_worse_off():
    rows = [Row(0, 1.0, ((0.7, 1, 1), (0.0, 1, 0))) for _ in range(3)] + [Row(0, 1.0, ((0.0, 1, 0),))]
    found = advantages(rows)
    assert found[3, 0] < -1 < 0 < found[0, 0]
    assert not found[:3, 2].any()


def test_a_turn_that_nobody_else_reaches_has_the_outcomes_advantage():
    rows = [Row(0, 1.0, ((0.0, 1, 0), (1.0, 1, 0))), Row(0, 0.0, ((0.0, 1, 0),))]
    alone, grpo = advantages(rows), advantages(rows, zero=True)
    assert torch.equal(alone, grpo)


def test_a_cut_turn_is_a_turn_without_reward():
    """Both are cut, one behind an observation and one in a turn."""
    rows = [Row(0, 0.0, ((0.7, 2, 3),)), Row(0, 0.0, ((0.2, 2, 3), (0.0, 1, 0)))]
    found = advantages(rows)
    assert found[0].tolist() == pytest.approx([0.5**0.5] * 2 + [0] * 4, abs=1e-4)
    assert found[1].tolist() == pytest.approx([-(0.5**0.5)] * 2 + [0] * 4, abs=1e-4)


def test_observations_in_the_loss_have_the_outcomes_advantage():
    """`mask_observations=false`."""
    told = tensors([Row(0, 1.0, ((0.7, 1, 2),)), Row(0, 0.0, ((0.2, 1, 2),))])
    found, _ = compute_mt_grpo_advantage(**(told | {"response_mask": torch.ones(2, 3, dtype=torch.int64)}))
    assert found[0].tolist() == pytest.approx([2 * 0.5**0.5, 0.5**0.5, 0.5**0.5], abs=1e-4)


def test_verl_knows_it_by_its_name():
    assert get_adv_estimator_fn("mt_grpo") is compute_mt_grpo_advantage

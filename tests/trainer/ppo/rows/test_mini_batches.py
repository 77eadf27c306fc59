"""Mini-batches, losses and the number of optimizer steps do not depend on how rollouts are cut into rows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from cut_rollouts import STATE, VOCABULARY, Rows, cut, make_rollouts  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl_losses import MODES, critic_loss, make_actor_loss  # noqa: E402

from verl_tool.agent_workers.masked_loss import MaskedLossWorker  # noqa: E402
from verl_tool.agent_workers.rollout_weights import ROLLOUT_SHARE, TOKEN_SHARE, rollout_weights  # noqa: E402
from verl_tool.trainer.ppo.rows.mini_batches import DUMMY, lay_out  # noqa: E402
from verl_tool.trainer.ppo.rows.rollout_index import RolloutIndex, prompt_of, rollout_of  # noqa: E402
from verl_tool.trainer.ppo.rows.rows_check import LOSSES_BY_ROW  # noqa: E402

pytestmark = pytest.mark.slow

OWN_SETTINGS = {"bypass_mode", *LOSSES_BY_ROW}
"""Policy losses that need settings of their own, or are refused."""
LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - OWN_SETTINGS)
PROMPTS, MINI_BATCHES, EPOCHS = 6, 3, 2
KEPT = ("response_mask", "old_log_probs", "ref_log_prob", "advantages", "values", "returns", "state", "tokens")


class Engine:
    """A policy (or critic) of one matrix on the states of the tokens, in place of verl's engine."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.weights = torch.zeros(shape, requires_grad=True)
        self.steps = 0

    def get_data_parallel_group(self) -> None:
        return None

    def outputs(self, data: TensorDict) -> torch.Tensor:
        """Log-probabilities or values, of which verl takes those from the last token of the prompt on."""
        scores = data["state"] @ self.weights
        if scores.dim() == 3:
            scores = torch.log_softmax(scores, -1).gather(-1, data["tokens"][..., None])[..., 0]
        rows = [torch.cat([row, row.new_zeros(1)]) for row in scores]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def backward(self, data: TensorDict, loss_fn: Any, micro: int) -> None:
        for start in range(0, len(data), micro):
            part = tu.index_select_tensor_dict(data, list(range(start, min(start + micro, len(data)))))
            output = self.outputs(part)
            made = {"log_probs": output, "values": output, "entropy": -output}
            loss, _ = loss_fn(model_output=made, data=part, dp_group=None)
            loss.backward()


def columns_of(rows: Rows) -> TensorDict:
    """The batch as the workers have it, with a prompt of one token."""
    data = {name: rows.data.batch[name] for name in KEPT}
    n, width = data["response_mask"].shape
    mask = data["response_mask"]
    index = RolloutIndex.of(rows.keys)
    if index.has_several:
        data |= rollout_weights(index.rollout_by_row, mask.sum(-1))
    data |= {
        "prompts": torch.ones(n, 1),
        "responses": torch.ones(n, width),
        "attention_mask": torch.ones(n, 1 + width, dtype=torch.int64),
    }
    return TensorDict(data, batch_size=n)


def train(rows: Rows, loss_fn: Any, engine: Engine, ranks: int, micro: int, excluded: frozenset[str]) -> Engine:
    """Two epochs of three mini-batches of whole prompts, on `ranks` one after the other."""
    out = torch.tensor([rollout_of(key) in excluded for key in rows.keys])
    rows.data.batch["response_mask"] = rows.data.batch["response_mask"] * ~out[:, None]
    batch = columns_of(rows)
    # Prompts are in the order in which they were sampled, the rows of one in any.
    sampled = sorted(range(len(rows.keys)), key=lambda row: prompt_of(rows.keys[row]))
    keys, lengths = ([column[row] for row in sampled] for column in (rows.keys, rows.lengths))
    batch = tu.index_select_tensor_dict(batch, sampled)
    layout = lay_out(keys, lengths, PROMPTS // MINI_BATCHES, ranks, seed=1)
    assert layout.num_mini_batches == MINI_BATCHES
    per_rank = len(layout.order) // ranks
    size = per_rank // MINI_BATCHES
    # verl cuts the batch into ranks, and each rank's part into mini-batches.
    parts = [layout.order[r * per_rank : (r + 1) * per_rank] for r in range(ranks)]
    for _ in range(EPOCHS):
        for m in range(MINI_BATCHES):
            chunks = [part[m * size : (m + 1) * size] for part in parts]
            step(batch, chunks, loss_fn, engine, micro)
    return engine


def step(batch: TensorDict, chunks: list[list[int]], loss_fn: Any, engine: Engine, micro: int) -> None:
    taken = [place for chunk in chunks for place in chunk if place != DUMMY]
    mask = batch["response_mask"][taken]
    valid = mask.any(-1).double()
    rollouts = (valid * batch[ROLLOUT_SHARE][taken].double()).sum() if ROLLOUT_SHARE in batch else valid.sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: tensor.fill_(rollouts))
        patch.setattr(TrainingWorker, "train_batch", lambda self, data: engine.backward(data, self.loss_fn, micro))
        for chunk in chunks:
            data = with_dummies(batch, chunk)
            worker = MaskedLossWorker.__new__(MaskedLossWorker)
            worker.engine = engine
            worker.set_loss_fn(loss_fn)
            tu.assign_non_tensor(data, batch_num_tokens=int(mask.sum()), dp_size=len(chunks), global_batch_size=99)
            worker.train_batch(data)
    if engine.weights.grad is not None:
        engine.weights.data -= 2.0 * engine.weights.grad / len(chunks)
        engine.weights.grad = None
        engine.steps += 1


def with_dummies(batch: TensorDict, places: list[int]) -> TensorDict:
    """Rows of the batch; a dummy is a copy of the first with no token in the loss."""
    data = tu.index_select_tensor_dict(batch, [max(place, 0) for place in places])
    dummy = torch.tensor([place == DUMMY for place in places])
    for name in ("response_mask", ROLLOUT_SHARE, TOKEN_SHARE):
        if name in data:
            column = data[name].clone()
            column[dummy] = 0
            data[name] = column
    return data


def actor_loss(mode: str, loss: str = "vanilla") -> Any:
    # clip_cov draws tokens at random, here from none; kl_cov takes the first of equal ones, here all.
    policy_loss = {"loss_mode": loss, "clip_cov_lb": 1e8, "clip_cov_ub": 1e9, "kl_cov_ratio": 1.0}
    return make_actor_loss(mode, policy_loss, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)


def trained(
    seed: int, max_rows: int, loss_fn: Any, *, critic: bool, ranks: int, micro: int, excluded: Any = ()
) -> Engine:
    rollouts = make_rollouts(seed)
    for whole in rollouts:
        random = torch.Generator().manual_seed(seed + hash((whole.prompt[1:], whole.sample)) % 1000)
        whole.tensors["advantages"] = torch.randn(whole.length, generator=random)
        whole.tensors["returns"] = torch.randn(whole.length, generator=random)
    engine = Engine((STATE,) if critic else (STATE, VOCABULARY))
    return train(cut(rollouts, max_rows, seed), loss_fn, engine, ranks, micro, frozenset(excluded))


def assert_same_training(loss_fn: Any, data: Any, *, critic: bool = False) -> None:
    seed, max_rows = data.draw(st.integers(0, 10_000)), data.draw(st.integers(2, 9))
    ranks, micro = data.draw(st.sampled_from([(1, 1000), (2, 20), (3, 1000)]))
    excluded = data.draw(st.sets(st.sampled_from([f"p{p}_{s}" for p in range(6) for s in range(4)]), max_size=5))
    uncut = trained(seed, 1, loss_fn, critic=critic, ranks=1, micro=1000, excluded=excluded)
    found = trained(seed, max_rows, loss_fn, critic=critic, ranks=ranks, micro=micro, excluded=excluded)
    assert found.steps == uncut.steps == EPOCHS * MINI_BATCHES
    assert uncut.weights.abs().max() > 1e-3
    assert torch.allclose(found.weights, uncut.weights, rtol=1e-3, atol=1e-4 * uncut.weights.abs().max().item())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("critic", [False, True])
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_a_cut_changes_no_update(mode, critic, data):
    assert_same_training(critic_loss(mode) if critic else actor_loss(mode), data, critic=critic)


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_a_cut_changes_no_update_of_any_policy_loss(loss, data):
    assert_same_training(actor_loss("seq-mean-token-mean", loss), data)


@pytest.mark.parametrize("mode", MODES[1:])
def test_without_weights_a_cut_would_change_the_update(mode, monkeypatch):
    """What they are for."""
    uncut = trained(0, 1, actor_loss(mode), critic=False, ranks=1, micro=1000)
    monkeypatch.setattr("test_mini_batches.rollout_weights", lambda *_: {})
    found = trained(0, 6, actor_loss(mode), critic=False, ranks=1, micro=1000)
    assert not torch.allclose(found.weights, uncut.weights, rtol=0.05)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_layout_has_each_row_once_and_whole_prompts(data):
    counts = data.draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=9))
    keys = [f"p{p}_{s}_{r}" for p, rows in enumerate(counts) for s, n in enumerate(rows) for r in range(n)]
    keys = data.draw(st.permutations(keys))
    work = [data.draw(st.integers(1, 100)) for _ in keys]
    prompts, ranks, multiple = (data.draw(st.integers(1, most)) for most in (9, 4, 3))
    layout = lay_out(keys, work, prompts, ranks, lambda number: multiple, seed=2)
    assert sorted(place for place in layout.order if place != DUMMY) == list(range(len(keys)))
    assert layout.num_mini_batches == -(-len(counts) // prompts)
    size, rest = divmod(len(layout.order), ranks * layout.num_mini_batches)
    assert rest == 0
    assert size % multiple == 0
    where: dict[str, set[int]] = {}
    for at, place in enumerate(layout.order):
        if place != DUMMY:
            where.setdefault(keys[place].split("_")[0], set()).add(at // size % layout.num_mini_batches)
    assert all(len(mini_batches) == 1 for mini_batches in where.values())


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_prompts_fall_into_mini_batches_as_they_were_sampled_whatever_their_names(data):
    names = data.draw(st.lists(st.text("ab_", max_size=4), min_size=1, max_size=9, unique=True))
    keys = [f"{name}_{sample}_{row}" for name in names for sample in range(2) for row in range(2)]
    renamed = [f"{9 - names.index(prompt_of(key))}{key[len(prompt_of(key)) :]}" for key in keys]
    work = [1.0] * len(keys)
    assert lay_out(keys, work, 2, 1, seed=3) == lay_out(renamed, work, 2, 1, seed=3)


def test_weights_count_rollouts_and_share_tokens():
    weights = rollout_weights([0, 1, 0, 2, 0], torch.tensor([3, 2, 1, 0, 0]))
    assert weights[ROLLOUT_SHARE].tolist() == [0.5, 1.0, 0.5, 0.0, 0.0]
    assert weights[TOKEN_SHARE].tolist() == [0.75, 1.0, 0.25, 0.0, 0.0]

"""The size of an update does not depend on rows that are left out, however the mini-batch is cut up."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl_losses import MODES, critic_loss, make_actor_loss  # noqa: E402

from verl_tool.agent_workers.masked_loss import MaskedLossWorker  # noqa: E402
from verl_tool.errors import VerlToolError  # noqa: E402

LENGTH = 3
OWN_SETTINGS = {"bypass_mode", "geo_mean"}
"""Policy losses that need settings of their own, or are refused."""
LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - OWN_SETTINGS)


def batch_of(rows: list[int], excluded: set[int]) -> TensorDict:
    """Rows of two to three response tokens behind one of the prompt; their numbers go with their names in `rows`."""
    n = len(rows)

    def column(name: int) -> torch.Tensor:
        made = [torch.randn(LENGTH, generator=torch.Generator().manual_seed(100 * row + name)) for row in rows]
        return torch.stack(made) if made else torch.zeros(0, LENGTH)

    mask = torch.ones(n, LENGTH, dtype=torch.int64)
    for i, row in enumerate(rows):
        mask[i, 2] = row % 2
        mask[i] *= row not in excluded
    ids = [torch.ones(1 + LENGTH, dtype=torch.int64) for _ in rows]
    data = {
        "response_mask": mask,
        "loss_mask": torch.ones_like(mask),
        "old_log_probs": -column(1).abs(),
        "advantages": column(2),
        "values": column(3),
        "returns": column(4),
        "prompts": torch.ones(n, 1),
        "responses": torch.ones(n, LENGTH),
        "attention_mask": torch.ones(n, 1 + LENGTH, dtype=torch.int64),
        "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
    }
    return TensorDict(data, batch_size=n)


class Ranks:
    """Data-parallel ranks, one after the other: what they would sum is known beforehand."""

    def __init__(self, batches: list[TensorDict]) -> None:
        self.batches = batches

    def totals(self, count: Any) -> int:
        return sum(int(count(batch["response_mask"])) for batch in self.batches)


def gradient(loss_fn: Any, batches: list[TensorDict], micro: int, nominal: int, monkeypatch: Any) -> torch.Tensor:
    """The gradient of one mini-batch by the weight of a model of one number, through `MaskedLossWorker`."""
    ranks, weight = Ranks(batches), torch.zeros(1, requires_grad=True)
    rows = ranks.totals(lambda mask: mask.bool().any(-1).sum())
    tokens = ranks.totals(lambda mask: mask.sum())
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: tensor.fill_(rows))
        patch.setattr(TrainingWorker, "train_batch", lambda self, data: self.engine.train_batch(data, self.loss_fn))
        for batch in batches:
            worker = MaskedLossWorker.__new__(MaskedLossWorker)
            worker.engine = _Engine(weight, tokens, len(batches), micro)
            worker.set_loss_fn(loss_fn)
            tu.assign_non_tensor(batch, global_batch_size=nominal)
            worker.train_batch(batch)
            assert worker.engine.stepped == (rows > 0)
    assert weight.grad is not None
    # FSDP takes the mean of the ranks' gradients.
    return weight.grad / len(batches)


class _Engine:
    """verl's, as far as the size of a loss goes."""

    def __init__(self, weight: torch.Tensor, tokens: int, dp_size: int, micro: int) -> None:
        self._weight, self._tokens, self._dp_size, self._micro = weight, tokens, dp_size, micro
        self.stepped = False

    def get_data_parallel_group(self) -> None:
        return None

    def optimizer_step(self) -> float:
        self.stepped = True
        return 1.0

    def train_batch(self, data: TensorDict, loss_fn: Any) -> None:
        tu.assign_non_tensor(data, batch_num_tokens=self._tokens, dp_size=self._dp_size)
        for start in range(0, len(data), self._micro):
            part = tu.index_select_tensor_dict(data, list(range(start, min(start + self._micro, len(data)))))
            n = len(part)
            flat = self._weight * (1.0 + part["old_log_probs"]) + part["old_log_probs"]
            rows = [torch.cat([row, torch.zeros(1)]) for row in flat]
            output = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            loss, metrics = loss_fn(model_output={"log_probs": output, "values": output}, data=part, dp_group=None)
            assert loss.isfinite(), (n, loss)
            for metric in metrics.values():
                value = metric.aggregate() if hasattr(metric, "aggregate") else metric
                assert value == value, metrics
            loss.backward()
        self.optimizer_step()


def actor_loss(mode: str, loss: str = "vanilla") -> Any:
    return make_actor_loss(mode, {"loss_mode": loss})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [actor_loss, critic_loss])
@settings(max_examples=6)
@given(data=st.data())
def test_rows_left_out_do_not_change_the_update(mode, make, data):
    rows = list(range(1, 9))
    out = data.draw(st.sets(st.sampled_from(rows), max_size=7))
    ranks, micro = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2]))
    parts = [batch_of(rows[i::ranks], out) for i in range(ranks)]
    kept = [row for row in rows if row not in out]
    with pytest.MonkeyPatch.context() as patch:
        found = gradient(make(mode), parts, micro, 8, patch)
        alone = gradient(make(mode), [batch_of(kept, set())], len(kept), len(kept), patch)
    assert found.item() == pytest.approx(alone.item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_policy_loss_of_verls(loss, monkeypatch):
    torch.manual_seed(0)
    rows, out = [1, 2, 3, 4], {2, 4}
    loss_fn = actor_loss("seq-mean-token-mean", loss)
    whole = gradient(loss_fn, [batch_of(rows, out)], 4, 4, monkeypatch)
    torch.manual_seed(0)
    alone = gradient(loss_fn, [batch_of([1, 3], set())], 2, 2, monkeypatch)
    if loss == "clip_cov":
        # It clips tokens at random, as many as suit the number that there are.
        assert whole.isfinite()
    else:
        assert whole.item() == pytest.approx(alone.item(), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [actor_loss, critic_loss])
def test_nothing_left_is_no_loss_and_no_update(mode, make, monkeypatch):
    assert gradient(make(mode), [batch_of([1, 2], {1, 2})] * 2, 1, 4, monkeypatch).item() == 0.0


def test_verl_alone_would_shrink_the_update(monkeypatch):
    """What this is for: three of four rows left out leave a quarter."""
    loss_fn = actor_loss("seq-mean-token-mean")
    weight = torch.zeros(1, requires_grad=True)
    data = batch_of([1, 2, 3, 4], {2, 3, 4})
    tu.assign_non_tensor(data, global_batch_size=4)
    _Engine(weight, 3, 1, 4).train_batch(data, loss_fn)
    whole = gradient(loss_fn, [batch_of([1, 2, 3, 4], {2, 3, 4})], 4, 4, monkeypatch)
    assert weight.grad.item() == pytest.approx(whole.item() / 4, rel=1e-4)


def test_rows_of_rollouts_without_their_mini_batches_are_no_update(monkeypatch):
    monkeypatch.setattr(TrainingWorker, "train_mini_batch", lambda self, data: data)
    worker = MaskedLossWorker.__new__(MaskedLossWorker)
    data = batch_of([1, 2], set())
    tu.assign_non_tensor(data, mini_batch_size=2)
    assert tu.get(worker.train_mini_batch(data), "mini_batch_size") == 2
    data["rollout_share"] = torch.ones(2)
    with pytest.raises(VerlToolError, match="num_mini_batch"):
        worker.train_mini_batch(data)
    tu.assign_non_tensor(data, num_mini_batch=1, dataloader_kwargs={"shuffle": True})
    done = worker.train_mini_batch(data)
    assert tu.get(done, "mini_batch_size") is None
    assert tu.get(done, "dataloader_kwargs") == {"shuffle": False}

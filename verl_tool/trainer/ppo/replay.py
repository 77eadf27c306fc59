"""Read rewards and faults from TransferQueue, and filter groups in verl's replay buffer.

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_tool.agent_loop.trajectory import POLICY_INDUCED, REWARD_FAULT, Trajectory, as_trajectory
from verl_tool.agent_workers.rollout_worker import RAISED
from verl_tool.trainer.ppo.graded_trajectories import GradedTrajectory
from verl_tool.trainer.ppo.invalid import invalid_rows
from verl_tool.trainer.ppo.rollout_log import Rewards
from verl_tool.trainer.ppo.rows.rollout_index import RolloutIndex

REWARD = "reward"
"""Value of ``algorithm.filter_groups.metric`` that filters groups by the reward, in verl 0.9.0 too."""
POLL_SECONDS = 0.25
"""Time between checks for finished rows. verl's two seconds are a tenth of a short step."""
LoopFields = dict[str, Any]
"""A row's ``extra_fields``: those of the loop, and those of the reward manager under ``reward_extra_info``."""


def read_loop_fields(batch: KVBatchMeta) -> list[LoopFields]:
    """Read the extra fields of each row."""
    return _extra_fields(batch.keys, batch.partition_id)


def rewards_of(index: RolloutIndex, partition_id: str) -> list[float] | None:
    """Read the reward of each rollout, the sum of its rows' rewards. Returns None if nothing was graded."""
    fields = tq.kv_batch_get(keys=list(index.keys), partition_id=partition_id, select_fields=["rm_scores"])
    if "rm_scores" not in fields:
        return None
    return index.reduce([row.sum().item() for row in fields["rm_scores"].unbind()], sum)


def invalid_of(fields: Sequence[LoopFields]) -> list[bool]:
    """Return which rows are invalid."""
    rows = [row | row.get("reward_extra_info", {}) for row in fields]
    return [invalid_rows({name: [value] for name, value in row.items()}, 1)[0] for row in rows]


def trajectories_of(fields: Sequence[LoopFields]) -> list[Trajectory]:
    """Return the trajectories of rollouts' final rows, which TransferQueue has as JSON."""
    return [as_trajectory(row["trajectory"]) for row in fields]


def read_reward_fields(fields: Sequence[LoopFields], groups: Sequence[str] | None = None) -> Rewards:
    """Collect the reward manager's values of each row except the reward. `groups` are the prompts."""
    infos = [row.get("reward_extra_info", {}) for row in fields]
    names = dict.fromkeys((REWARD_FAULT, POLICY_INDUCED, *(name for info in infos for name in info)))
    columns = {name: [info.get(name) for info in infos] for name in names}
    return Rewards(columns=columns, groups=groups)


class ValidGroupFilter(ReplayBuffer):
    """A replay buffer that filters out groups whose valid rows all have the same metric, or that have one valid row.

    verl treats a group with a fault as one with a signal. A group without valid rows is kept, so that the limit on
    faults applies to it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.poll_interval: float = min(self.poll_interval, POLL_SECONDS)
        self._filtered: list[GradedTrajectory] = []
        self._raised: list[str] = []

    def take_filtered(self) -> list[GradedTrajectory]:
        """Return the trajectories of groups that were filtered out since the last call."""
        filtered, self._filtered = self._filtered, []
        return filtered

    def take_raised(self) -> list[str]:
        """Return the errors of prompts that were dropped since the last call because a rollout raised."""
        raised, self._raised = self._raised, []
        return raised

    def prompts_there(self, partition_id: str) -> int:
        """Count the prompts whose rollouts are finished, running or pending, as of the last check."""
        groups = (self.finished_keys, self.pending_keys, self.running_keys)
        return sum(len(group[partition_id]) for group in groups)

    def _evict_terminal_groups(
        self, global_steps: int, partition_id: str, eviction_reasons: tuple[set[str], set[str], set[str], Any]
    ) -> tuple[set[str], int, int, dict[str, Any]]:
        failed = eviction_reasons[2]
        if failed:
            tags = tq.kv_list(partition_id).get(partition_id, {})
            self._raised += [tags.get(uid, {}).get(RAISED, "") for uid in failed]
        evicted: tuple[set[str], int, int, dict[str, Any]] = super()._evict_terminal_groups(
            global_steps, partition_id, eviction_reasons
        )
        return evicted

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        if partition_id == "val" or self.filter_groups_metric is None:
            return set(), Counter()
        finished, known = self.finished_keys[partition_id], self._dapo_classification_cache[partition_id]
        for uid in known.keys() - finished:
            del known[uid]
        rows: dict[str, list[str]] = defaultdict(list)
        for key in self.partitions[partition_id]:
            uid = key.split("_")[0]
            if uid in finished and uid not in known:
                rows[uid].append(key)
        for uid in finished - known.keys():
            known[uid] = self._shared_value(uid, rows[uid], partition_id)
        without_signal = {uid: value for uid, value in known.items() if value is not None}
        return set(without_signal), Counter(without_signal.values())

    def _shared_value(self, uid: str, keys: list[str], partition_id: str) -> float | None:
        """Return the metric's value if all valid rows share it; None if the group has a signal."""
        if not keys:
            return None
        index = RolloutIndex.of(keys)
        fields = _extra_fields([keys[row] for row in index.final], partition_id)
        valid = [i for i, out in enumerate(invalid_of(fields)) if not out]
        if len(index) == 1 or not valid:
            return None
        if self.filter_groups_metric == REWARD:
            rewards = rewards_of(index, partition_id) or ()
            values = {rewards[i] for i in valid if rewards}
        else:
            values = {self._metric_of(uid, fields[i]) for i in valid}
        if len(values) != 1:
            return None
        self._filtered += read_reward_fields(fields).outcomes(trajectories_of(fields), None)
        return values.pop()

    def _metric_of(self, uid: str, row: LoopFields) -> float:
        try:
            return float(row.get("reward_extra_info", {})[self.filter_groups_metric])
        except KeyError:
            raise RuntimeError(
                f"group {uid} is missing the metric of algorithm.filter_groups.metric={self.filter_groups_metric!r}; "
                f"the reward manager reports {sorted(row.get('reward_extra_info', {}))}"
            ) from None


def make_valid_group_buffer(buffer: type[Any]) -> type[Any]:
    """Return verl's class of replay buffers with `ValidGroupFilter` added."""
    if buffer is ReplayBuffer:
        return ValidGroupFilter
    return buffer if issubclass(buffer, ValidGroupFilter) else type(buffer.__name__, (ValidGroupFilter, buffer), {})


def _extra_fields(keys: list[str], partition_id: str) -> list[LoopFields]:
    fields = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
    # `fields[name]` would give a list of another kind.
    rows: list[LoopFields] = fields.pop("extra_fields").tolist()
    return rows

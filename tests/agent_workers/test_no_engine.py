"""verl takes the rollout of no engine by its name, and a verl that keeps its rollouts otherwise is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from verl.workers.rollout import base
from verl.workers.rollout.replica import get_rollout_replica_class

from verl_tool.agent_workers import no_engine
from verl_tool.platforms.patch import PatchError


def test_verl_finds_both_classes_by_the_name() -> None:
    assert base.get_rollout_class(no_engine.NAME) is no_engine.NoEngineRollout
    assert get_rollout_replica_class(no_engine.NAME) is no_engine.NoEngineReplica


def test_a_verl_without_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base, "_ROLLOUT_REGISTRY")
    with pytest.raises(PatchError, match=r"verl \S+ has no verl.workers.rollout.base._ROLLOUT_REGISTRY"):
        no_engine.register()


@pytest.mark.parametrize("other", [{}, {"vllm": "a.Class"}, {("vllm", "async"): object}, [("vllm", "async")]])
def test_a_table_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, other: object) -> None:
    monkeypatch.setattr(base, "_ROLLOUT_REGISTRY", other)
    with pytest.raises(PatchError, match="_ROLLOUT_REGISTRY with the path of a class"):
        no_engine.register()

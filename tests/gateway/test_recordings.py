"""What real agents sent, through the session tree: how many of their turns are one chain, and what is trained."""

from __future__ import annotations

import pytest
from agent_recordings import recordings
from replayed_recordings import ADOPTED, replay

from verl_tool.gateway.session_tree import SessionPolicy

CANONICAL = SessionPolicy(thoughts="sent", edited="branch")
KEPT = SessionPolicy(thoughts="keep", edited="branch")


def rows_and_longest(name: str, policy: SessionPolicy) -> tuple[int, int]:
    """Training rows, and turns on the longest chain."""
    tree, rollout = replay(name, policy)
    return len(rollout.rows), max(len(turn.path()) for turn in tree.turns)


EXPECTED = {
    "aider/basic": (4, 1),
    "claude/400": (1, 1),
    "claude/429": (1, 3),
    "claude/500": (1, 3),
    "claude/500_x3": (1, 3),
    "claude/badjson": ((2, 3), (2, 3), (1, 4)),
    "claude/badtool": (1, 4),
    "claude/basic": (1, 6),
    "claude/basic-key": (1, 6),
    "claude/compact": (1, 6),
    "claude/ctx": (1, 1),
    "claude/cut": (1, 3),
    "claude/empty": (1, 3),
    "claude/hang": (1, 3),
    "claude/length": (1, 4),
    "claude/lengthtool": ((2, 3), (2, 3), (1, 4)),
    "claude/min": ((2, 2), (2, 2), (1, 2)),
    "claude/nousage": (1, 3),
    "claude/slow": (1, 3),
    "claude/slowping": (1, 3),
    "claude/sub": (2, 4),
    "claude/sub2": (3, 4),
    "claude/text": (1, 2),
    "claudebare/basic": (1, 6),
    "claudeenv/basic": (1, 6),
    "claudeenv/compact": (3, 3),
    "claudenb/basic": (1, 6),
    "claudenet/basic": (1, 6),
    "claudesdk/basic": (1, 6),
    "codex/400": (1, 1),
    "codex/429": (1, 3),
    "codex/500": (1, 3),
    "codex/badjson": (1, 4),
    "codex/badtool": (1, 4),
    "codex/basic": (1, 6),
    "codex/basic-key": (1, 6),
    "codex/compact": (1, 6),
    "codex/ctx": (1, 1),
    "codex/cut": (1, 3),
    "codex/empty": (1, 2),
    "codex/hang": (1, 1),
    "codex/length": (1, 2),
    "codex/lengthtool": (1, 2),
    "codex/min": (1, 3),
    "codex/nousage": (1, 3),
    "codex/slow": (1, 3),
    "codex/slowping": (1, 3),
    "codex/sub": (2, 4),
    "codex/sub2": (3, 4),
    "codex/text": (1, 2),
    "codexc/compact": (3, 3),
    "codexnet/basic": (1, 6),
    "lc-chat/badjson": (1, 2),
    "lc-chat/basic": ((2, 5), (1, 6), (1, 6)),
    "lc-chat/key": ((2, 5), (1, 6), (1, 6)),
    "lc-chat/length": (1, 2),
    "lc-chat/min": (1, 3),
    "lc-msg/basic": (1, 6),
    "lc-msg/min": (1, 3),
    "lc-resp/basic": (1, 6),
    "lc-resp/min": (1, 3),
    "mini/400": (1, 3),
    "mini/429": (1, 3),
    "mini/500": (1, 3),
    "mini/badjson": (1, 3),
    "mini/badtool": (1, 3),
    "mini/basic": (1, 6),
    "mini/basic-key": (1, 6),
    "mini/ctx": (1, 3),
    "mini/cut": (1, 3),
    "mini/empty": (1, 3),
    "mini/length": (1, 3),
    "mini/lengthtool": (1, 3),
    "mini/min": (1, 3),
    "mini/nousage": (1, 3),
    "mini/text": (1, 3),
    "mininet/basic": (1, 6),
    "oaiagents-chat/500": (1, 3),
    "oaiagents-chat/badjson": (1, 4),
    "oaiagents-chat/basic": ((2, 5), (1, 6), (1, 6)),
    "oaiagents-chat/length": (1, 2),
    "oaiagents-chatstream/basic": ((2, 5), (1, 6), (1, 6)),
    "oaiagents-resp/basic": (1, 6),
    "oaiagents-resp/cut": (1, 3),
    "oaiagents-resp/key": (1, 6),
    "oaiagents-resp/min": (1, 3),
    "oaiagents-respstream/basic": (1, 6),
    "oaiagents-respstream/min": (1, 3),
    "opencodenet/basic": (1, 6),
    "pi/400": (1, 1),
    "pi/429": (1, 3),
    "pi/500": (1, 3),
    "pi/badjson": ((2, 3), (2, 3), (1, 4)),
    "pi/badtool": (1, 4),
    "pi/basic": (1, 6),
    "pi/basic-key": (1, 6),
    "pi/compact": (1, 6),
    "pi/ctx": (3, 2),
    "pi/cut": (1, 3),
    "pi/empty": (1, 2),
    "pi/length": (1, 2),
    "pi/lengthtool": ((2, 3), (2, 3), (1, 4)),
    "pi/min": (1, 3),
    "pi/nousage": (1, 3),
    "pi/slow": (1, 3),
    "pi/slowping": (1, 3),
    "pi/sub": (1, 4),
    "pi/text": (1, 2),
    "pimsg/basic": (1, 6),
    "pinet/basic": (1, 6),
    "piresp/basic": (1, 6),
    "pydantic-msg/basic": (1, 6),
    "pydantic-resp/basic": ((2, 5), (2, 5), (1, 6)),
    "pydantic-resp/min": (1, 3),
    "qwen/400": (1, 1),
    "qwen/429": (1, 3),
    "qwen/500": (1, 3),
    "qwen/badjson": (1, 3),
    "qwen/badtool": (1, 4),
    "qwen/basic": (1, 6),
    "qwen/basic-key": (1, 6),
    "qwen/compact": (2, 6),
    "qwen/ctx": (4, 1),
    "qwen/cut": (1, 2),
    "qwen/empty": (1, 3),
    "qwen/length": (1, 3),
    "qwen/lengthtool": (1, 3),
    "qwen/min": (1, 3),
    "qwen/nousage": (1, 3),
    "qwen/slow": (1, 2),
    "qwen/slowping": (1, 3),
    "qwen/sub": (2, 4),
    "qwen/text": (1, 2),
    "qwennet/basic": (1, 6),
    "raw-chat/basic": (1, 6),
    "raw-chat/key": (1, 6),
    "raw-chat/min": (1, 3),
    "raw-msg/basic": (1, 6),
    "raw-msg/key": (1, 6),
    "raw-msgstream/basic": (1, 6),
    "raw-msgstream/min": (1, 1),
    "raw-prev/basic": (1, 6),
    "raw-resp/basic": (1, 6),
    "raw-resp/min": (1, 3),
    "smol-code/basic": ((5, 1), (5, 1), (3, 3)),
    "smol-tool/basic": ((7, 4), (7, 4), (2, 9)),
    "smol-tool/key": ((7, 4), (7, 4), (2, 9)),
}
"""Training rows and turns on the longest chain; where policies differ, with thoughts and answers as they are sent, with
thoughts kept, and with edited answers adopted too."""


@pytest.mark.parametrize("name", recordings())
def test_turns_are_on_one_chain_wherever_the_agent_only_appends(name: str) -> None:
    found = [rows_and_longest(name, policy) for policy in (CANONICAL, KEPT, ADOPTED)]
    expected = EXPECTED[name]
    assert found == (list(expected) if isinstance(expected[0], tuple) else [expected] * 3)


@pytest.mark.parametrize("policy", [CANONICAL, ADOPTED], ids=["canonical", "adopted"])
@pytest.mark.parametrize("name", recordings())
def test_what_is_trained_is_what_was_sampled_and_once(name: str, policy: SessionPolicy) -> None:
    tree, rollout = replay(name, policy)
    sampled = {tuple(turn.generation.token_ids) for turn in tree.turns}
    trained = [tuple(s.tokens) for row in rollout.rows for s in row.response if s.generated]
    assert set(trained) <= sampled
    assert len(trained) == sum(map(tree.is_trained, tree.turns))
    assert not any(turn.delivered is False and tree.is_trained(turn) for turn in tree.turns if not turn.children)


@pytest.mark.parametrize("agent", ["claude", "codex"])
def test_two_sub_agents_at_the_same_time_have_a_row_each(agent: str) -> None:
    tree, rollout = replay(f"{agent}/sub2", ADOPTED)
    assert len({turn.agent_id for turn in tree.turns}) == 3
    assert sorted({s.agent for row in rollout.rows for s in row.response}) == [0, 1, 2]


def test_calls_for_a_title_are_not_trained() -> None:
    for name, requests in recordings().items():
        tree, _ = replay(name, ADOPTED)
        kinds = [each.kind for each in requests if each.status == 200 and each.response]
        auxiliary = [turn for turn, kind in zip(tree.turns, kinds, strict=True) if kind == "aux"]
        assert not any(map(tree.is_trained, auxiliary)), name

"""What a verifier may say, and what of it is a reward."""

from __future__ import annotations

import json

import pytest

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ConfigError
from verl_tool.protocol import Fault, FaultKind
from verl_tool.verification import STYLE, Verdict, read_verification, reward_in, verification_of

TESTS = pack_files({"test.sh": PackedFile(b"echo 1 > /logs/verifier/reward.txt\n")})


@pytest.mark.parametrize(
    ("json_file", "text_file", "wanted"),
    [
        (None, b" 0.5\n", (0.5, {})),
        (b'{"reward": 1, "style": 0.25}', b"0", (1.0, {"style": 0.25})),
        (b'{"passed": 0.75}', None, (0.75, {"passed": 0.75})),
    ],
)
def test_a_reward_is_read(json_file: bytes | None, text_file: bytes | None, wanted: object) -> None:
    assert reward_in(json_file, text_file) == wanted


@pytest.mark.parametrize(
    ("json_file", "text_file", "told"),
    [
        (None, None, "neither reward.json nor reward.txt"),
        (None, b"", "reward.txt is '', which is no finite number"),
        (None, b"nan", "no finite number"),
        (None, b"1\n1", "no finite number"),
        (b"", b"1", "no JSON"),
        (b"[1]", b"1", "must be an object"),
        (b"{}", b"1", "must be an object"),
        (b'{"reward": 1e999}', b"1", "no finite number"),
        (b'{"reward": [1]}', b"1", "no finite number"),
        (b'{"a": 1, "b": 1}', b"1", "none named 'reward'"),
        (b"[" * 60_000, b"1", "no JSON"),
        (b'{"reward": 1}' + b" " * 70_000, b"1", "65536 is the limit"),
    ],
)
def test_what_is_no_reward_is_told(json_file: bytes | None, text_file: bytes | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        reward_in(json_file, text_file)


def test_the_verification_of_a_row() -> None:
    truth = json.dumps({"files": TESTS, "timeout_seconds": 5})
    verification = verification_of({"style": STYLE, "ground_truth": truth}, "row 3")
    assert verification is not None
    assert (verification.files, verification.timeout_seconds, verification.env) == (TESTS, 5, {})
    assert verification_of({"style": "rule", "ground_truth": "5"}, "row 3") is None
    assert verification_of(None, "row 3") is None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("5", "row 3: the verification"),
        ({"files": TESTS, "timeout_seconds": 0}, "at timeout_seconds: .* greater than 0"),
        ({"files": TESTS, "command": "x"}, "at command: Extra inputs"),
        ({"files": "%"}, "at files: .*is not base64"),
        ({"files": pack_files({"check.py": PackedFile(b"")})}, r"no test.sh among \['check.py'\]"),
    ],
)
def test_a_wrong_verification_is_told(value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_verification(value, "row 3")


@pytest.mark.parametrize("by_environment", [True, False])
@pytest.mark.parametrize("kind", list(FaultKind))
def test_only_what_a_trajectory_may_cause_counts_as_0(kind: FaultKind, by_environment: bool) -> None:
    fault = Fault(kind=kind, message="", retryable=False)
    score = Verdict(None, fault=fault, by_environment=by_environment).score
    assert score == (0.0 if kind is FaultKind.TOOL_CRASHED else None)

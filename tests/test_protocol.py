"""The wire types: what goes in comes out, and what is wrong is named."""

from __future__ import annotations

import json
import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from verl_tool.protocol import (
    Fault,
    FaultKind,
    ObservationRequest,
    ObservationResponse,
    StepRequest,
    StepResult,
    request_body,
)
from verl_tool.servers.replica.wire import encode_response
from verl_tool.util.json_text import BadJsonError, decode_json, encode_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WILD_TEXT = st.text()
"""With lone surrogates."""
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
FAULTS = st.builds(Fault, kind=st.sampled_from(FaultKind), message=TEXT, retryable=st.booleans())
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
RESULTS = st.builds(
    StepResult,
    trajectory_id=TEXT.filter(bool),
    observation=TEXT,
    done=st.booleans(),
    valid=st.booleans(),
    fault=st.none() | FAULTS,
    reward=st.none() | NUMBERS,
    image=st.none() | TEXT,
    audio=st.none() | TEXT,
    invalid_reason=st.none() | TEXT,
    metrics=st.none() | st.dictionaries(TEXT, NUMBERS, min_size=1, max_size=3),
)
IDS = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=256)
REQUESTS = st.builds(
    StepRequest,
    trajectory_id=IDS,
    action=TEXT,
    step=st.none() | st.integers(0, 10**6),
    finish=st.booleans(),
    is_last_step=st.booleans(),
    extra=st.dictionaries(TEXT, JSON_VALUES, max_size=3),
    known_media=st.lists(st.text("0123456789abcdef", min_size=64, max_size=64), max_size=2).map(tuple),
)


class TestRoundTrips:
    @given(st.lists(REQUESTS, max_size=5))
    def test_requests_survive_the_wire(self, requests: list[StepRequest]) -> None:
        received = ObservationRequest.model_validate(decode_json(request_body(requests)))
        assert received.step_requests() == requests

    def test_what_says_nothing_is_not_sent(self) -> None:
        assert set(decode_json(request_body([StepRequest("a", "x")]))) == {"trajectory_ids", "actions"}

    def test_half_a_pair_of_utf_16_costs_one_character(self) -> None:
        body = request_body([StepRequest("t", "half a pair: \ud800", 3, extra={"x": [1]})])
        assert body.decode("utf-8").count("\ufffd") == 1

    @given(st.lists(RESULTS, max_size=5))
    def test_results_survive_the_wire(self, results: list[StepResult]) -> None:
        body = encode_response(results, 1.5)
        received = ObservationResponse.model_validate_json(body)
        assert received.processing_time_ms == 1.5
        assert received.step_results([r.trajectory_id for r in results]) == results

    @given(JSON_VALUES)
    def test_any_json_survives(self, value: object) -> None:
        assert decode_json(encode_json(value)) == value


class TestHostileText:
    @given(WILD_TEXT, st.floats())
    def test_any_text_and_any_number_make_a_valid_answer(self, words: str, number: float) -> None:
        result = StepResult("t", words, reward=number, invalid_reason=words, metrics={words: number})
        answer = json.loads(encode_response([result], 0.0).decode("utf-8"))
        observation = answer["observations"][0]
        assert "\ud800" not in observation["obs"]
        if math.isfinite(number):
            assert observation["reward"] == number
        else:
            assert observation["reward"] is None

    @given(WILD_TEXT)
    def test_whatever_python_spells_as_json_is_decoded_without_lone_surrogates(self, words: str) -> None:
        decoded = decode_json(json.dumps({"x": words}).encode())["x"]
        decoded.encode("utf-8")
        assert len(decoded) <= len(words)

    @given(st.binary())
    def test_arbitrary_bytes_are_decoded_or_refused(self, body: bytes) -> None:
        with suppress(BadJsonError):
            encode_json(decode_json(body))

    @pytest.mark.parametrize("what", [object(), b"\xff", {1, 2}, float])
    def test_a_result_that_json_cannot_hold_is_the_tools_fault_alone(self, what: object) -> None:
        answer = json.loads(encode_response([StepResult("a", image=what), StepResult("b", "fine")], 0.0))
        assert answer["observations"][1] == "fine"
        if answer["faults"][0] is not None:
            assert answer["faults"][0]["kind"] == "tool_crashed"
        assert answer["faults"][1] is None


class TestRequests:
    def test_the_oldest_request_needs_two_fields(self) -> None:
        request = ObservationRequest.model_validate({"trajectory_ids": ["a"], "actions": ["x"]})
        assert request.step_requests() == [StepRequest("a", "x")]

    def test_further_lists_are_per_trajectory_and_extra_fields_win(self) -> None:
        request = ObservationRequest.model_validate(
            {
                "trajectory_ids": ["a", "b"],
                "actions": ["x", "y"],
                "stdin": ["1", "2"],
                "extra_fields": [None, {"stdin": "3"}],
            }
        )
        first, second = request.step_requests()
        assert isinstance(first, StepRequest)
        assert isinstance(second, StepRequest)
        assert (first.extra, second.extra) == ({"stdin": "1"}, {"stdin": "3"})

    @given(
        st.sampled_from(["actions", "extra_fields", "finish", "is_last_step", "steps", "colour"]),
        st.integers(0, 4).filter(lambda n: n != 2),
    )
    def test_unequal_lengths_name_the_field_and_both_lengths(self, name: str, length: int) -> None:
        body = {"trajectory_ids": ["a", "b"], "actions": ["x", "y"]} | {name: [None] * length}
        with pytest.raises(ValidationError, match=f"'{name}' has {length} entries and 'trajectory_ids' has 2"):
            ObservationRequest.model_validate(body)

    @given(
        st.sampled_from(
            [
                ("trajectory_ids", [None, 3, "", ["x"], True]),
                ("actions", [None, 3, ["x"], {}]),
                ("steps", ["1", -1, 1.5, True]),
                ("finish", ["yes", 1, []]),
                ("is_last_step", ["no", 0]),
                ("extra_fields", ["x", 1, []]),
            ]
        ).flatmap(lambda pair: st.tuples(st.just(pair[0]), st.sampled_from(pair[1])))
    )
    def test_an_entry_of_a_wrong_type_is_a_fault_of_its_own(self, wrong: tuple[str, object]) -> None:
        name, value = wrong
        body: dict[str, list[object]] = {
            "trajectory_ids": ["a", "b", "c"],
            "actions": ["x", "y", "z"],
            "steps": [0, 0, 0],
            "finish": [False] * 3,
            "is_last_step": [False] * 3,
            "extra_fields": [{}, {}, {}],
        }
        body[name][1] = value
        first, second, third = ObservationRequest.model_validate(body).step_requests()
        assert isinstance(first, StepRequest)
        assert isinstance(third, StepRequest)
        assert isinstance(second, Fault)
        assert second.kind is FaultKind.BAD_REQUEST
        assert not second.retryable
        assert f"{name}[1]" in second.message


class TestResponses:
    def test_an_older_server_knows_no_faults(self) -> None:
        response = ObservationResponse.model_validate({"observations": ["x"], "dones": [False], "valids": [True]})
        assert response.step_results(["a"]) == [StepResult("a", "x")]

    def test_details_of_another_server_are_passed_over(self) -> None:
        response = ObservationResponse.model_validate(
            {"observations": [{"obs": "x", "colour": "red"}], "dones": [False], "valids": [True], "version": 2}
        )
        assert response.step_results(["a"]) == [StepResult("a", "x")]

    @pytest.mark.parametrize("column", ["observations", "dones", "valids", "faults"])
    def test_another_number_of_entries_is_an_error(self, column: str) -> None:
        fields: dict[str, list[object]] = {
            "observations": ["x"],
            "dones": [False],
            "valids": [True],
            "faults": [None],
        }
        fields[column] = fields[column] * 2
        response = ObservationResponse.model_validate(fields)
        with pytest.raises(ValueError, match=f"2 {column} for 1 trajectories"):
            response.step_results(["a"])

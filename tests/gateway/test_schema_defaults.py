"""Arguments that equal a default of a tool's schema."""

import json

import pytest

from verl_tool.gateway.conversation import AgentMessage, Role, ToolCall
from verl_tool.gateway.schema_defaults import drop_defaults, find_defaults

EDITS = {"type": "array", "items": {"type": "object", "properties": {"all": {"default": False}}}}
SCHEMA = {"properties": {"path": {}, "all": {"type": "boolean", "default": False}, "edits": EDITS}}
TOOLS = [
    {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "plain", "parameters": {"properties": {"all": {}}}}},
]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("edit", '{"path": "a", "all": false}', {"path": "a"}),
        ("edit", '{"path": "a", "all": true}', {"path": "a", "all": True}),
        ("edit", '{"path": "a", "all": 0}', {"path": "a", "all": 0}),
        ("edit", '{"edits": [{"all": false, "x": 1}, 2]}', {"edits": [{"x": 1}, 2]}),
        ("plain", '{"all": false}', {"all": False}),
        ("unknown", '{"all": false}', {"all": False}),
    ],
)
def test_arguments_that_equal_a_default_are_left_out(name, arguments, expected):
    message = AgentMessage(Role.ASSISTANT, calls=(ToolCall(name, arguments, "c"),))
    (call,) = drop_defaults(message, find_defaults(TOOLS)).calls
    assert (call.name, call.id, json.loads(call.arguments)) == (name, "c", expected)


def test_arguments_that_are_not_json_stay():
    message = AgentMessage(Role.ASSISTANT, calls=(ToolCall("edit", '{"all": fal'),))
    assert drop_defaults(message, find_defaults(TOOLS)) == message

"""Recorded requests of real agents, sent through the session tree."""

from __future__ import annotations

import functools
from typing import Any

from agent_recordings import RecordedRequest, recordings
from agent_sessions import WritingGenerator
from real_templates import TemplateTokenizer
from template_families import QWEN

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import VerlToolError
from verl_tool.formats import format_by_name
from verl_tool.gateway.conversation import AgentMessage, Finish, ModelAnswer, Role
from verl_tool.gateway.gateway_app import DIALECTS
from verl_tool.gateway.session import SessionModel
from verl_tool.gateway.session_tree import SessionPolicy, SessionTree

TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)
MODEL = SessionModel.create(WritingGenerator(TOKENIZER), TOKENIZER, [format_by_name("hermes")], 1 << 24)
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
ADOPTED = SessionPolicy(thoughts="keep", edited="adopt")


def is_answered(request: RecordedRequest) -> bool:
    """Whether it is a turn of the tree of `replay`."""
    return request.status == 200 and bool(request.response)


def answer_to(request: RecordedRequest) -> AgentMessage:
    """Return the recorded answer as the agent would send it back."""
    response, dialect = request.response, BY_NAME[request.dialect]
    if request.dialect == "chat":
        body: dict[str, Any] = {"messages": [{"role": "assistant", **response["choices"][0]["message"]}]}
    elif request.dialect == "responses":
        body = {"input": response["output"]}
    else:
        body = {"messages": [{"role": "assistant", "content": response["content"]}], "max_tokens": 1}
    messages = dialect.parse_request({"model": "m", **body}, {}).messages
    return messages[0] if messages else AgentMessage(Role.ASSISTANT)


@functools.cache
def replay(name: str, policy: SessionPolicy) -> tuple[SessionTree, Trajectory]:
    """Replay all answered requests of a recording in their order."""
    tree = SessionTree(MODEL.renderer, policy)
    for number, recorded in enumerate(recordings()[name]):
        if not is_answered(recorded):
            continue
        request = BY_NAME[recorded.dialect].parse_request(recorded.body, recorded.headers)
        try:
            message = answer_to(recorded)
        except VerlToolError:
            message = AgentMessage(Role.ASSISTANT)
        text = f"{number}{message.thoughts}{message.text}{[(c.name, c.arguments) for c in message.calls]}"
        ids = TOKENIZER.encode(text.replace("<", "(") + "<|im_end|>")
        handle = message.handles[0] if message.handles else f"answer{number}"
        if recorded.dialect == "responses" and (made := recorded.response.get("id")):
            again = {"model": "m", "input": "x", "previous_response_id": made}
            handle = BY_NAME["responses"].parse_request(again, {}).previous or handle
        answer = ModelAnswer(handle, "m", message.text, message.thoughts, message.calls, Finish.STOP, 1, 1, 0)
        placement = tree.place(request)
        turn = tree.add(placement, Generation(ids, [-1.0] * len(ids), "stop"), answer)
        if not recorded.op.startswith("cut"):
            tree.deliver(turn)
    return tree, tree.rollout("recorded")

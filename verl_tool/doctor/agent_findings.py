"""What is wrong with an agent and a model together, by one run of the agent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_tool.agent_loop.rendering.template_text import common_prefix
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.setup import Setup
from verl_tool.content.parts import TextPart
from verl_tool.doctor.agent_run import MAX_ANSWERS, AgentRun
from verl_tool.gateway.conversation import AgentMessage, Role, ToolCall
from verl_tool.gateway.conversation_renderer import ConversationRenderer
from verl_tool.gateway.dialects.base import RequestError
from verl_tool.gateway.session_record import SESSION
from verl_tool.gateway.session_tree import ModelTurn, Placement

MAX_PROMPT_SHARE = 0.5
"""Of the model's window, that the first prompt may take without a warning."""
_EXCERPT = 60
_MAX_OUTPUT = 500


def findings_of(setup: Setup, run: AgentRun) -> Iterator[Finding]:
    """All of them."""
    yield from _requests(run)
    yield from _first_prompt(setup, run)
    yield from _branches(run)
    yield from _results(run)
    yield from _end(run)
    yield from _template(setup)


def _requests(run: AgentRun) -> Iterator[Finding]:
    if run.record.fault is not None:
        remedy = "try the command in a shell; --agent_readable names files of this machine that it needs"
        yield Finding("agent_asks", Severity.ERROR, run.record.fault.message, remedy)
    for message in dict.fromkeys(run.record.extra[SESSION]["rejected"]):
        yield Finding("requests_render", Severity.ERROR, f"a request was rejected: {message}", "")


def _first_prompt(setup: Setup, run: AgentRun) -> Iterator[Finding]:
    largest = max((turn.answer.prompt_tokens for turn, _ in run.exchanges if not turn.has_history), default=0)
    window = setup.context_length
    if window is not None and largest > window * MAX_PROMPT_SHARE:
        what = f"the agent's first prompt has {largest:,} tokens, of {window:,} that the model has positions for"
        yield Finding("first_prompt_fits", Severity.WARNING, what, "take a model with a longer window, or fewer tools")


def _branches(run: AgentRun) -> Iterator[Finding]:
    """Where the agent does not only append."""
    unused = {"auxiliary": "is auxiliary", "dropped": "was dropped or sampled again", "undelivered": "was not received"}
    for number, answer in enumerate(run.record.extra[SESSION]["answers"]):
        if (why := unused.get(answer.get("unused"))) is not None:
            yield Finding("answers_used", Severity.NOTE, f"answer {number + 1} {why}, and is not trained", "")
        if answer.get("edited"):
            what = f"answer {number + 1} came back edited; the tokens that were sampled are kept (policy.edited=adopt)"
            yield Finding("append_only", Severity.NOTE, what, "")
    for place, (turn, placement) in enumerate(run.exchanges):
        trained = [each for each in run.exchanges[:place] if _is_trained(run, each[0])]
        before = _last_of_same(trained, turn)
        if before is not None and turn.parent is not before[0] and _is_trained(run, turn):
            what = f"answer {turn.number + 1} does not go on behind answer {before[0].number + 1}: "
            yield Finding("append_only", Severity.WARNING, what + _why(before, placement), "it begins a row of its own")


def _is_trained(run: AgentRun, turn: ModelTurn) -> bool:
    return "segment" in run.record.extra[SESSION]["answers"][turn.number]


def _last_of_same(
    exchanges: Sequence[tuple[ModelTurn, Placement]], turn: ModelTurn
) -> tuple[ModelTurn, Placement] | None:
    """The last answer to the same agent that had tools if this one has."""
    same = [each for each in exchanges if each[0].agent_id == turn.agent_id and each[0].has_tools == turn.has_tools]
    return same[-1] if same else None


def _why(before: tuple[ModelTurn, Placement], placement: Placement) -> str:
    """What is not as it was in the conversation before."""
    turn, earlier = before
    names = [{tool["function"]["name"] for tool in each.request.tools} for each in (earlier, placement)]
    if names[0] != names[1]:
        changes = [f"-{name}" for name in sorted(names[0] - names[1])]
        return f"its tools changed: {', '.join([*changes, *(f'+{name}' for name in sorted(names[1] - names[0]))])}"
    if earlier.request.tools != placement.request.tools:
        return "the description or the schema of a tool changed"
    was = (*earlier.messages, turn.answer.message)
    for number, (a, b) in enumerate(zip(was, placement.messages, strict=False), 1):
        if a.digest(b"", with_thoughts=False) != b.digest(b"", with_thoughts=False):
            return f"message {number} {_difference(a, b)}"
    if len(placement.messages) < len(was):
        return f"it has {len(placement.messages)} messages, and {len(was)} were written"
    return "thoughts of an earlier answer are not as they were sampled (policy.thoughts)"


def _difference(was: AgentMessage, now: AgentMessage) -> str:
    if was.role is not now.role:
        return f"was of the {was.role.value}, and is of the {now.role.value}"
    texts = [each.text + "".join(f" [call {call.name} {call.arguments}]" for call in each.calls) for each in (was, now)]
    start = common_prefix(*texts)
    parts = [repr(text[max(0, start - 10) :][:_EXCERPT]) for text in texts]
    return f"of the {was.role.value} changed: {parts[0]} is {parts[1]}"


def _results(run: AgentRun) -> Iterator[Finding]:
    called = [turn for turn, _ in run.exchanges if turn.answer.calls]
    if not run.exchanges:
        return
    if not called:
        what = "the agent offers no tool that the model could call in its format, so it reads calls in text of its own"
        yield Finding("calls_run", Severity.NOTE, what, "--turn TEXT writes what it expects")
    elif not any(turn.parent is called[0] for turn, _ in run.exchanges):
        what = f"the call of {called[0].answer.calls[0].name!r} was never answered with its result behind it"
        yield Finding("calls_run", Severity.WARNING, what, "")


def _end(run: AgentRun) -> Iterator[Finding]:
    code, output = run.program.get("exit_code"), str(run.program.get("output", ""))[-_MAX_OUTPUT:].strip()
    if run.was_stopped:
        what = f"it asks again after {MAX_ANSWERS} answers without a call, and was ended"
        yield Finding("agent_ends", Severity.WARNING, what, "the model has to learn how this agent is ended")
    elif run.record.fault is not None:
        return
    elif code is None:
        what = f"it did not end within {run.seconds:g} s, and was killed; it printed: {output}"
        yield Finding("agent_ends", Severity.WARNING, what, "see --agent_seconds")
    elif code:
        yield Finding("agent_ends", Severity.WARNING, f"it exited with {code}; it printed: {output}", "")


def _say(role: Role, text: str, **fields: object) -> AgentMessage:
    return AgentMessage(role, (TextPart(text),) if text else (), **fields)  # type: ignore[arg-type]


def _template(setup: Setup) -> Iterator[Finding]:
    """What the chat template does not take as it comes."""
    renderer = ConversationRenderer(setup.tokenizer, setup.renderer.end_token_ids, setup.formats)
    if renderer.folds_system:
        what = "the chat template rejects, or moves, system messages in mid-conversation; they are sent as a user's"
        yield Finding("template_takes", Severity.NOTE, what, "")
    user = _say(Role.USER, "Go on.")
    calls = ToolCall("read", '{"path": "a"}', "a"), ToolCall("read", '{"path": "b"}', "b")
    results = tuple(_say(Role.TOOL, "x", answers=place) for place in range(2))
    cases = {
        "a tool's result": (calls[:1], results[:1]),
        "several calls in a turn": (calls, results),
        "a user's message behind a tool's result": (calls[:1], (results[0], user)),
        "two user messages in a row": ((), (user, user)),
    }
    for words, (made, tail) in cases.items():
        answer = AgentMessage(Role.ASSISTANT, () if made else (TextPart("Yes."),), calls=made)
        try:
            renderer.render_whole([user, answer, *tail], ())
        except RequestError as error:
            what = f"the chat template rejects {words}: {error.__cause__ or error}"
            yield Finding("template_takes", Severity.WARNING, what, "requests with that cannot begin a row")

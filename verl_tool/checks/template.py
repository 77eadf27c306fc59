"""What the chat template makes of prompts, tools, thoughts and observations."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tool.agent_loop.prompt.prompt_renderer import schema_of
from verl_tool.agent_loop.rendering.tool_messages import ROLE
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.setup import QUESTION, Row, Setup
from verl_tool.errors import ConfigError
from verl_tool.formats.native import NATIVE
from verl_tool.protocol import ToolDescription

_THOUGHT, _SAMPLE_REPLY, _LATER = "THOUGHTOFMODEL7f3a", "ANSWEROFMODEL7f3a", "LATERMESSAGE7f3a"


def prompts_render(setup: Setup) -> Iterator[Finding]:
    """The template makes a prompt of the rows: of one for each order of roles, and each list of tools."""
    rows: dict[object, Row] = {}
    for each in setup.rows:
        try:
            kind = (tuple(message.get("role") for message in each.messages), each.listed)
        except ConfigError:
            continue  # `columns_are_there` tells of it
        rows.setdefault(kind, each)
    for row in list[Row | None](rows.values()) or [None]:
        problem = setup.problem_of_prompt(row)
        if problem is not None:
            what = problem if row is None else f"{row.where}: {problem}"
            remedy = "set actor_rollout_ref.model.custom_chat_template (--chat_template), or change the messages' roles"
            yield Finding("prompts_render", Severity.ERROR, what, remedy if "template fails" in problem else "")


def observations_render(setup: Setup) -> Iterator[Finding]:
    """The template takes an observation behind the model's turn, as `mtrl_role` and `mtrl_sep` ask."""
    try:
        _ = setup.prompts
    except ConfigError:
        return  # `prompts_render` tells of it
    try:
        _ = setup.renderer
    except ConfigError as error:
        yield Finding("observations_render", Severity.ERROR, str(error), "")
    except Exception as error:  # noqa: BLE001 - a template is a program, and raises what it likes
        what = f"the chat template fails on an observation: {type(error).__name__}: {error}"
        yield Finding("observations_render", Severity.ERROR, what, "set another mtrl_role, or mtrl_sep")


def check_tools_described(setup: Setup) -> Iterator[Finding]:
    """The prompt names the tools that it shall tell of, with description and arguments, in a format that is found."""
    described = setup.prompts.described_tools()
    text = setup.prompt_text(None)
    if not described or text is None:
        return
    missing = [tool.name for tool in described if tool.name not in text]
    if missing:
        what = (
            f"the chat template drops the tools: {', '.join(missing)} of {len(described)} tools stand nowhere in the "
            f"prompt, with tool_prompt={setup.options.tool_prompt}"
        )
        remedy = "set tool_prompt=auto, or tool_schemas=none if the rows themselves say how to call"
        yield Finding("check_tools_described", Severity.ERROR, what, remedy)
        return
    own = setup.rendered(QUESTION, [schema_of(tool) for tool in described], generation=True)
    if text != own:
        yield from _by_usage(setup, described, own)
        return
    untold = [f"{tool.name} ({', '.join(parts)})" for tool in described if (parts := _left_out(tool, text))]
    if untold:
        what = f"the chat template names tools and leaves parts of them out: {'; '.join(untold)}"
        yield Finding(
            "check_tools_described", Severity.WARNING, what, "set tool_prompt=system, or another chat template"
        )


def _left_out(tool: ToolDescription, text: str) -> list[str]:
    """Parts of a tool that a prompt which names it does not have."""
    first_line = tool.description.strip().partition("\n")[0]
    missing = [] if _as_written(first_line, text) else ["description"]
    return missing + [name for name in tool.parameters.get("properties", {}) if name not in text]


def _as_written(words: str, text: str) -> bool:
    """Whether `words` stand in a prompt, as they are or as JSON and templates escape them."""
    plain = [word for word in words.split() if word.isalnum()]
    return words in text or all(word in text for word in plain)


def _by_usage(setup: Setup, told: tuple[ToolDescription, ...], own: str | None) -> Iterator[Finding]:
    """That the format's usage text stands in for a template which has a way of its own: it would write `own`."""
    if setup.options.tool_prompt != "auto":
        return
    bare = setup.rendered(QUESTION, generation=True)
    if own is None or own == bare or not all(tool.name in own for tool in told):
        what = f"the chat template takes no tools; the prompt tells of them by the usage text of {setup.taught.name!r}"
        yield Finding("check_tools_described", Severity.NOTE, what, "")
        return
    native = next((fmt.name for fmt in NATIVE if setup.template_writes(fmt)), None)
    what = (
        "the chat template takes tools, and teaches calls that the loop would not find; the prompt tells of them by "
        f"the usage text of {setup.taught.name!r} instead, which this model may not know"
    )
    remedy = f"set formats=[{native}]" if native else "set formats to that of the model, or action_stop_tokens"
    yield Finding("check_tools_described", Severity.WARNING, what, remedy)


def check_thoughts_preserved(setup: Setup) -> Iterator[Finding]:
    """What the model thought (``<think>``) in an earlier turn stands in the conversation rendered whole.

    A trajectory keeps it in any case: its tokens are never rendered again.
    """
    options = setup.options
    turn = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_SAMPLE_REPLY}"}
    role = options.mtrl_role if options.enable_mtrl and options.mtrl_sep is None else "user"
    messages = [*QUESTION, turn, {"role": role, "content": _LATER}]
    if role == ROLE:
        call = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": {}}}
        messages[1:] = [
            {**turn, "tool_calls": [call]},
            {"role": ROLE, "content": _LATER, "name": "tool", "tool_call_id": "call00000"},
        ]
    text = setup.rendered(messages, generation=True)
    if text is None or _THOUGHT in text:
        later = setup.rendered([*messages, {"role": "assistant", "content": _SAMPLE_REPLY}, *QUESTION], generation=True)
        if text is not None and later is not None and _THOUGHT not in later:
            what = "the chat template drops thoughts before the user's last message, and keeps those behind it"
            yield Finding("check_thoughts_preserved", Severity.NOTE, what, "")
        return
    if _SAMPLE_REPLY not in text:
        what = "the chat template drops what the model writes before a call in the same turn, thoughts and other words"
        yield Finding("check_thoughts_preserved", Severity.NOTE, f"{what}; a trajectory keeps it", "")
        return
    where = "behind an observation" if options.enable_agent and options.enable_mtrl else "behind a further message"
    what = (
        f"the chat template drops the model's thoughts of earlier turns {where} (role {role!r}); training and "
        "eval_service keep them, and an engine that renders the conversation anew at each turn does not"
    )
    remedy = (
        "serve the model with eval_service"
        if role == ROLE or not options.enable_mtrl
        else "set mtrl_role=tool if the template keeps them there, and serve the model with eval_service"
    )
    severity = Severity.WARNING if options.enable_agent and options.enable_mtrl else Severity.NOTE
    yield Finding("check_thoughts_preserved", severity, what, remedy)

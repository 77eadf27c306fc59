"""Whether prompts, calls and observations fit into the limits of length. All numbers are tokens."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tool.agent_loop.trajectory import Author
from verl_tool.checks.example_call import ExampleCall
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.setup import Row, Setup
from verl_tool.errors import ConfigError
from verl_tool.formats.find import find_calls

_LIMITS = ("max_prompt_length", "max_start_length")
_MANY = 0.5
"""Share of rows from which on it is worth a warning that they are left out."""


def prompts_fit(setup: Setup) -> Iterator[Finding]:
    """The prompts of the rows are no longer than `max_prompt_length` and `max_start_length`."""
    limits = {name: limit for name in _LIMITS if (limit := getattr(setup.options, name)) is not None}
    if not limits:
        return
    name, limit = min(limits.items(), key=lambda pair: pair[1])
    looked_at, long = 0, []
    for row in setup.rows:
        if setup.problem_of_prompt(row) is not None:
            continue  # `prompts_render` tells of it
        looked_at += 1
        bare = len(setup.prompts.ids(row.messages, (), row.where))
        if bare > limit:
            long.append((bare, row))
        if bare > limit and setup.drops_overlong:
            continue
        try:
            setup.prompts.ids(row.messages, row.listed, row.where)
        except ConfigError as error:
            yield Finding("prompts_fit", Severity.ERROR, str(error), "")
            return
    if long:
        yield _of_long_rows(setup, long, looked_at, name, limit)


def _of_long_rows(setup: Setup, long: list[tuple[int, Row]], looked_at: int, name: str, limit: int) -> Finding:
    longest, row = max(long, key=lambda pair: pair[0])
    what = (
        f"the prompts of {len(long)} of {looked_at} rows are longer than {name}={limit}; the longest, {row.where}, has "
        f"{longest} tokens"
    )
    remedy = f"raise {name} (in training data.max_prompt_length)"
    if not setup.drops_overlong:
        return Finding("prompts_fit", Severity.WARNING, f"{what}: they lose their beginning", remedy)
    if len(long) == looked_at:
        return Finding("prompts_fit", Severity.ERROR, f"{what}: no sample is left", remedy)
    severity = Severity.WARNING if len(long) >= _MANY * looked_at else Severity.NOTE
    return Finding("prompts_fit", severity, f"{what}: they are left out", remedy)


def turns_fit(setup: Setup) -> Iterator[Finding]:
    """A call and what stands around its observation fit into a response, and prompt and response into the model."""
    options = setup.options
    response = options.max_response_length
    example = setup.example
    if options.enable_agent and example is not None:
        call, around = _call_and_around(setup, example)
        if options.max_action_length is not None and call > options.max_action_length:
            what = f"a call such as {example.text[:80]!r} has {call} tokens, and max_action_length is "
            yield Finding(
                "turns_fit", Severity.WARNING, f"{what}{options.max_action_length}: it is cut off", "raise that"
            )
        if response is not None and call + around >= response:
            what = (
                f"a call such as {example.text[:80]!r} and what stands around its observation have "
                f"{call + around} tokens, and max_response_length is {response}: nothing is left for an answer"
            )
            severity = Severity.ERROR if call >= response else Severity.WARNING
            yield Finding("turns_fit", severity, what, "raise data.max_response_length")
        elif response is not None and options.max_obs_length is not None:
            whole = call + around + options.max_obs_length
            if whole >= response:
                what = (
                    f"a call and an observation of max_obs_length={options.max_obs_length} have {whole} tokens, and "
                    f"max_response_length is {response}: one long observation ends the trajectory"
                )
                yield Finding("turns_fit", Severity.NOTE, what, "lower max_obs_length if observations may be long")
    yield from _of_the_model(setup)


def _call_and_around(setup: Setup, example: ExampleCall) -> tuple[int, int]:
    """Tokens of a call, and of what is put around the text of an observation."""
    renderer = setup.renderer
    ids = setup.tokenizer.encode(example.text)
    segments = renderer.next(ids, renderer.parts(example.format.render("…")), find_calls(example.text, setup.formats))
    return len(ids), sum(len(segment.tokens) for segment in segments if segment.author is Author.TEMPLATE)


def _of_the_model(setup: Setup) -> Iterator[Finding]:
    options = setup.options
    if options.max_prompt_length is None or options.max_response_length is None:
        return
    whole = options.max_prompt_length + options.max_response_length
    limits = (
        f"max_prompt_length={options.max_prompt_length} and max_response_length={options.max_response_length} together "
        f"are {whole} tokens"
    )
    if options.max_model_len is not None and whole > options.max_model_len:
        what = f"{limits}, and max_model_len is {options.max_model_len}: long trajectories are cut there"
        yield Finding("turns_fit", Severity.WARNING, what, "raise max_model_len, or lower one of the others")
    if setup.context_length is not None and whole > setup.context_length:
        what = f"{limits}, and the model has positions for {setup.context_length}"
        yield Finding("turns_fit", Severity.WARNING, what, "lower one of them, or extend the model's context")

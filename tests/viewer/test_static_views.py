"""The viewer's pages in a real browser."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from urllib.request import urlopen

import pytest
from made_run import HOSTILE, MEGABYTE, made_run, made_trajectory, write_step, write_tokens
from pages import SIZES, complaints, fits, press, run, set_window, text, wait
from PIL import Image
from viewer_server import viewer

from eval_service.evaluation.record import Record, write_records
from verl_tool.agent_loop.trajectory import (
    DELEGATED,
    Author,
    RowContext,
    Segment,
    StopReason,
    Trajectory,
    write_jsonl,
)
from verl_tool.content.parts import read_media

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SHOTS = os.environ.get("VERL_TOOL_SCREENSHOTS")
"""A folder into which the tests put a picture of each view."""


def with_image(trajectory):
    written = BytesIO()
    Image.new("RGB", (3, 2), "red").save(written, "PNG")
    image = read_media(written.getvalue())
    prompt = replace(trajectory.segments[0], image=image.sha256, text="")
    return replace(trajectory, segments=(prompt, *trajectory.segments[1:]), images={image.sha256: image})


def of_an_agent():
    """A title, a call, the same answer twice, a sub-agent whose name is hostile, and how the program ended."""
    texts = ("title", "call", "dropped", "done", "sub")
    segments = [Segment(Author.PROMPT, (1,), text="task")]
    segments += [Segment(Author.MODEL, (2,), (-0.1,), text) for text in ("call", "done")]
    segments += [Segment(Author.MODEL, (3,), (-0.1,), "sub", row=1, agent=1)]
    answers = [{"parent": None, "dialect": "chat", "agent": 0, "prompt_tokens": 9, "tokens": 1} for _ in texts]
    answers[0] |= {"unused": "auxiliary", "text": "A title"}
    answers[1] |= {"segment": 1, "edited": True, "calls": ["bash"]}
    answers[2] |= {"parent": 1, "unused": "dropped", "text": "Thrown away"}
    answers[3] |= {"parent": 1, "segment": 2, "retries": 2, "foreign": 1}
    answers[4] |= {"segment": 3, "agent": 1}
    session = {"policy": {"edited": "adopt"}, "agents": [HOSTILE], "answers": answers, "rejected": ["too long"]}
    program = {"exit_code": 3, "output": HOSTILE, "files": {"answer.txt": "42"}, "seconds": 1.5}
    contexts = (RowContext((1, 2), DELEGATED),)
    extra = {"session": session, "agent_program": program}
    return Trajectory("agent", tuple(segments), StopReason.ANSWERED, contexts=contexts, extra=extra)


HOSTILE_SESSION = {
    "session": {"policy": 7, "agents": {}, "answers": [{"parent": 5}, None, {"parent": 1, "agent": [], "calls": 3}]},
    "agent_program": {"exit_code": None, "files": None, "settings": {"command": 1}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made_run(folder / "first", steps=6, problems=12, seed=1)
    write_tokens(folder / "first", 6)
    made_run(folder / "second", steps=3, seed=2)
    draw = random.Random(3)
    long = made_trajectory(7, 0, 1, draw)
    action = replace(long.segments[1], text=MEGABYTE + HOSTILE, tokens=tuple(range(5000)), log_probs=None)
    long = replace(long, segments=(long.segments[0], action, *long.segments[2:]))
    older = with_image(made_trajectory(8, 0, 1, draw))
    older = replace(older, timings=replace(older.timings, turns=()))
    others = [made_trajectory(5, i, 1, draw) for i in range(3000)]
    write_jsonl(folder / "odd.jsonl", [long, older, *others])
    cut = made_trajectory(9, 0, 1, draw)
    context = RowContext(tuple(range(1234)), "summarise")
    rest = [replace(segment, row=1) for segment in cut.segments[2:]]
    cut = replace(cut, contexts=(context,), segments=(cut.segments[0], replace(cut.segments[1], summary=True), *rest))
    write_jsonl(folder / "rows.jsonl", [cut])
    write_jsonl(folder / "session.jsonl", [of_an_agent(), replace(cut, extra=HOSTILE_SESSION)])
    with (folder / "odd.jsonl").open("a") as file:
        file.write("this is no record\n")
    for name, right in (("before", [True, False]), ("after", [True, True])):
        (folder / name).mkdir()
        asked = replace(made_trajectory(9, 0, 1, draw).segments[0], text="what is two?")
        records = [
            Record(
                i,
                0,
                "d",
                "2",
                problem=f"p{i}",
                score=float(each),
                correct=each,
                trajectory=replace(long, segments=(asked,)),
            )
            for i, each in enumerate(right)
        ]
        write_records(folder / name / "records.jsonl", records)
    return folder


@pytest.fixture(scope="module")
def url(runs):
    with viewer(runs, *(runs / f"{name}.jsonl" for name in ("odd", "rows", "session"))) as url:
        until = time.monotonic() + 60
        while not read_all(f"{url}/api/facets?run=odd"):
            assert time.monotonic() < until
            time.sleep(0.05)
        yield url


def read_all(facets):
    """Whether the viewer has read all of a run's records."""
    with urlopen(facets, timeout=30) as answer:
        told = json.load(answer)
    return told["rows_known"] > 0 and told["missing_bytes"] == 0


@pytest.fixture
def page(browser, url):
    """Opens a view and waits until it is drawn; at the end of a test no script has complained."""
    browser.get("about:blank")
    browser.get(f"{url}/#/nothing")

    def show(address):
        run(browser, "delete document.getElementById('main').dataset.ready")
        run(browser, "location.hash = arguments[0]", address)
        wait(browser, f"document.getElementById('main').dataset.ready?.startsWith({address.split('?')[0][2:]!r})")

    yield show
    assert not complaints(browser)
    assert not run(browser, "return window.taken"), "a trajectory's script ran"


def rows(browser, column):
    """The texts of a column, of the rows in sight."""
    cells = "[...document.querySelectorAll('a.row')].map(row => row.children[arguments[0]].innerText)"
    return run(browser, f"return {cells}", column)


def choose(browser, name, value):
    run(browser, "document.getElementById(arguments[0]).value = arguments[1]", name, value)
    run(browser, "document.getElementById(arguments[0]).dispatchEvent(new Event('change'))", name)


def found(browser, beginning):
    wait(browser, f"document.getElementById('found')?.innerText.startsWith({beginning!r})")


VIEWS = {
    "runs": "#/runs",
    "run": "#/run?run=first",
    "compare": "#/run?run=first,second",
    "evaluations": "#/run?run=before,after",
    "table": "#/table?run=first&files=step_6",
    "trajectory": "#/trajectory?run=first&files=step_6&file=step_6&line=18",
    "tokens": "#/trajectory?run=first&file=step_6&line=18&tokens=1",
    "session": "#/trajectory?run=session&file=session&line=0",
    "group": "#/group?run=first&file=step_6&line=18",
    "over_time": "#/time?run=first",
}


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_is_drawn_at_each_size(page, browser, view):
    for name, window in SIZES.items():
        set_window(browser, *window)
        page("#/run?run=second")
        page(VIEWS[view])
        assert not text(browser, "p.error").startswith(("Cannot", "there is no"))
        assert len(text(browser, "main")) > 40
        assert fits(browser), name
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            browser.save_screenshot(f"{SHOTS}/viewer_{view}{name}.png")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_curves_of_two_runs_lie_over_one_another(page, browser):
    page(VIEWS["compare"])
    assert run(browser, "return document.querySelector('.charts').firstChild.querySelectorAll('path').length") == 2
    assert "data.seed" in text(browser, "table.config")
    assert run(browser, "return document.querySelectorAll('table.config tr.differs').length") == 3


def test_two_evaluations_opened_together_are_compared(page, browser):
    page(VIEWS["evaluations"])
    shown = text(browser)
    assert "+50.0%" in shown
    assert "Only B solves: 1 problems" in shown
    assert "what is two?" in shown
    link = run(browser, "return document.querySelector('a[href*=index_min]').getAttribute('href')")
    assert link == "#/table?run=before&files=records&index_min=1&index_max=1"


def test_filters_filter(page, browser):
    page("#/table?run=first&files=step_6")
    found(browser, "48 of 288")
    choose(browser, "stop", "answered")
    found(browser, "44 of")
    choose(browser, "tool", "search")
    wait(browser, "document.getElementById('found')?.innerText && !found.innerText.startsWith('44')")
    assert set(rows(browser, 5)) == {"search"}
    run(browser, "document.getElementById('clear').click()")
    found(browser, "48 of")
    choose(browser, "words", "What is 11 +")
    found(browser, "4 of")


def test_columns_sort(page, browser):
    page("#/table?run=first&files=step_1")
    heads = "[...document.querySelectorAll('.head button')]"
    run(browser, f"{heads}.find(head => head.innerText.startsWith('reward')).click()")
    wait(browser, "document.querySelector('.head .on')?.innerText.includes('↓')")
    rewards = rows(browser, 1)
    assert rewards == sorted(rewards, reverse=True)
    assert set(rewards) == {"0", "1"}


def test_keys_lead_through_the_table_and_the_trajectories(page, browser):
    page("#/table?run=first&files=step_6")
    press(browser, "j")
    press(browser, "j")
    assert run(browser, "return document.querySelector('a.row.selected').firstChild.innerText") == "3"
    press(browser, "Enter")
    wait(browser, "document.querySelector('.tiles')?.innerText.includes('step_6:3')")
    press(browser, "j")
    wait(browser, "document.querySelector('.tiles')?.innerText.includes('step_6:4')")
    press(browser, "k")
    wait(browser, "document.querySelector('.tiles')?.innerText.includes('step_6:3')")
    press(browser, "f")
    wait(browser, "document.querySelector('.tiles')?.innerText.includes('step_6:4')")
    press(browser, "t")
    wait(browser, "document.querySelectorAll('.tokens .token').length > 3")
    press(browser, "?")
    assert "next failure" in text(browser, "dialog")
    press(browser, "Escape")
    press(browser, "g")
    wait(browser, "document.querySelectorAll('article').length === 4")
    press(browser, "u")
    wait(browser, "document.querySelectorAll('a.row').length > 10")


def test_the_waterfall_has_the_time_of_each_turn_where_it_is_recorded(page, browser):
    page("#/trajectory?run=first&file=step_6&line=8")
    bars = "return [...document.querySelectorAll('.waterfall text')].map(bar => bar.textContent)"
    assert run(browser, bars)[0:3:2] == ["turn 1, 3 tokens 100 ms", "turn 2, 1 tokens 400 ms"]
    assert "divided" not in text(browser, "aside")
    page("#/trajectory?run=odd&file=odd&line=1")
    assert run(browser, bars)[0] == "turn 1, 3 tokens 375 ms"
    assert "divided by the tokens" in text(browser, "aside")


def test_a_training_row_shows_the_context_that_it_begins_with(page, browser):
    page("#/trajectory?run=rows&file=rows&line=0")
    wait(browser, "document.querySelector('main').innerText.includes('training row 2 (summarise)')")
    assert "the model was fed 1,234 tokens here" in text(browser, "main")
    assert "model, summary" in text(browser, "main")


def test_the_session_of_an_agent_is_a_tree(page, browser):
    page(VIEWS["session"])
    lines = [
        line.split()
        for line in run(browser, "return [...document.querySelectorAll('.session li')].map(li => li.innerText)")
    ]
    assert [line[0] for line in lines] == ["1", "2", "3", "4", "5"]
    assert lines[0][-3:] == ["auxiliary", "A", "title"]
    told = [" ".join(line) for line in lines]
    assert "row 1 bash" in told[1]
    assert "came back edited" in told[1]
    assert "dropped" in told[2]
    assert "2 retries" in told[3]
    assert "behind 1 foreign" in told[3]
    assert told[4].startswith("5 sub-agent <script>")
    assert "row 2" in told[4]
    margins = "return [...document.querySelectorAll('.session li')].map(li => parseInt(li.style.marginLeft))"
    assert run(browser, margins) == [0, 0, 12, 0, 0]
    session = text(browser, ".session")
    for words in ("Session: 5 answers", "edited=adopt", "rejected: too long", "Program: exit 3", "answer.txt", "42"):
        assert words in session
    run(browser, "window.went = 0; Element.prototype.scrollIntoView = function () { window.went = this.innerText }")
    run(browser, "document.querySelectorAll('.session li button')[2].click()")
    assert "sub" in run(browser, "return window.went")


def test_a_malformed_session_is_displayed_as_far_as_it_can_be_read(page, browser):
    page("#/trajectory?run=session&file=session&line=1")
    assert len(run(browser, "return [...document.querySelectorAll('.session li')]")) == 3
    assert "killed at its time limit" in text(browser, ".session")


def test_hostile_text_is_shown_and_not_run(page, browser):
    page("#/table?run=first&files=step_6&text=window.taken")
    found(browser, "4 of")
    page("#/trajectory?run=first&file=step_6&line=4")
    prompt = text(browser, ".segment.prompt pre")
    assert "<script>window.taken = 1</script>" in prompt
    for mark in ("RLO", "LRI", "ZWSP", "U+2028", "␀", "␛", "DEL"):
        assert mark in prompt
    assert not run(browser, "return document.querySelector('main script, main img, main svg[onload]')")
    page("#/trajectory?run=first&file=step_6&line=4&tokens=1")
    page("#/group?run=first&file=step_6&line=4")
    page("#/time?run=first")


def test_a_megabyte_on_one_line_is_shown_in_parts(page, browser):
    page("#/trajectory?run=odd&file=odd&line=0")
    assert "more characters" in text(browser, ".segment.model")
    for _ in range(19):
        run(browser, "document.querySelector('.segment.model .more')?.click()")
    assert "window.taken" in run(browser, "return document.querySelector('.segment.model pre').textContent.slice(-400)")
    assert fits(browser)
    page("#/trajectory?run=odd&file=odd&line=0&tokens=1")
    assert "2,000 more tokens" in text(browser, ".segment.model")


def test_images_are_pictures(page, browser):
    page("#/trajectory?run=odd&file=odd&line=1")
    wait(browser, "document.querySelector('.segment img')?.naturalWidth === 3")


def test_a_line_that_is_no_record_is_shown_as_it_is(page, browser):
    page("#/trajectory?run=odd&file=odd&line=3002")
    assert "this is no record" in text(browser, "main")


def test_a_long_table_draws_what_is_in_sight(page, browser):
    page("#/table?run=odd")
    found(browser, "3,003 of")
    run(browser, "document.querySelector('.scroller').scrollTop = 1e9")
    wait(browser, "[...document.querySelectorAll('a.row')].some(row => row.innerText.includes('unreadable'))")
    assert len(rows(browser, 0)) < 60


def test_a_run_that_goes_on_is_followed(page, browser, runs):
    made_run(runs / "live", steps=1, problems=2)
    time.sleep(2.1)
    page("#/table?run=live&all=1")
    found(browser, "8 of 8")
    write_step(runs / "live", 2, 3, 4, random.Random(9))
    found(browser, "20 of 20")


def test_tokens_are_coloured_by_what_is_recorded(page, browser):
    page("#/trajectory?run=first&file=step_6&line=18&tokens=1")
    options = "[...document.querySelectorAll('#colouring option')].filter(o => !o.disabled).map(o => o.value)"
    assert run(browser, f"return {options}") == ["author", "mask", "log_prob", "difference", "advantage"]
    page("#/trajectory?run=second&file=step_3&line=18&tokens=1")
    assert run(browser, f"return {options}") == ["author", "mask", "log_prob"]
    choose(browser, "colouring", "log_prob")
    wait(browser, "document.querySelector('.segment.model .token').style.background.includes('--bad')")

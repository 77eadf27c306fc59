"""Branches of a trajectory as a tree, and the values of its turns: as JSON, in a copy, and in a real browser."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from made_run import HOSTILE, made_run, made_trajectory
from pages import SIZES, complaints, fits, run, set_window, text, wait
from viewer_server import viewer

from verl_tool.agent_loop.trajectory import Author, write_jsonl
from verl_tool.viewer.branch_tree import branches_of, values_of
from verl_tool.viewer.record_query import Query, find_rows
from verl_tool.viewer.run_watch import RunWatch
from verl_tool.viewer.static_copy import write_copy
from verl_tool.viewer.token_texts import TokenTexts

EDIT = "<search>2 + 2</search>"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SHOTS = os.environ.get("VERL_TOOL_SCREENSHOTS")


def branch(parent, file, line, turn, edited=None, words=None, reward=1.0):
    """A branch of `parent`, which is at `line`, from 1, of `file`."""
    segments = list(parent.segments)
    if edited == "action":
        segments[1] = replace(segments[1], text=words, log_probs=None, edited=True)
    told = {"file": file, "line": line, "turn": turn, "edited": edited, "text": words, "for_values": edited is None}
    extra = {**parent.extra, "reward_extra_info": {"acc": reward}, "branch": {**told, "drift": [{"was": "a"}]}}
    return replace(parent, segments=tuple(segments), reward=reward, extra=extra)


def mean(value, error=0.125):
    return {"value": value, "error": error}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = made_run(tmp_path_factory.mktemp("runs") / "first", steps=3)
    parent = made_trajectory(2, 0, 2, random.Random(1))
    (folder / "branches").mkdir()
    write_jsonl(
        folder / "branches/step_2.9.jsonl",
        [
            *(branch(parent, "step_2.jsonl", 9, 2, reward=float(i % 2)) for i in range(6)),
            branch(parent, "step_2.jsonl", 9, 1, "action", EDIT),
        ],
    )
    deeper = [branch(parent, "branches/step_2.9.jsonl", 7, 2, "observation", "[none]", 0.0)]
    write_jsonl(folder / "branches/step_2.9.7.jsonl", deeper)
    write_jsonl(folder / "branches/step_2.10.jsonl", [branch(parent, "step_2.jsonl", 10, 1, "action", HOSTILE)])
    turns = [
        {"turn": 1, "samples": 8, "unscored": 0, "score": mean(0.25), "success": mean(0.25)},
        {"turn": 2, "samples": 8, "unscored": 0, "score": mean(0.75), "success": mean(0.75)},
    ]
    (folder / "branches/step_2.9.values.json").write_text(json.dumps({"turns": turns, "model": "m"}))
    (folder / "branches/step_2.1.values.json").write_text('{"turns": "no"}')
    return folder


@pytest.fixture(scope="module")
def watched(folder):
    watch = RunWatch([folder.parent])
    (known,) = watch.runs.values()
    return known, watch.read_all(known)


def test_the_tree_has_the_branches_of_branches(watched):
    _, records = watched
    told = branches_of(records, "step_2", 8)
    assert told["total"] == 7
    assert [(each["turn"], each["edited"]) for each in told["branches"]] == [(2, None)] * 6 + [(1, "action")]
    assert told["branches"][6]["text"] == EDIT
    (deeper,) = told["branches"][6]["branches"]
    assert (deeper["file"], deeper["line"], deeper["edited"], deeper["reward"]) == ("step_2.9.7", 0, "observation", 0.0)
    assert branches_of(records, "step_2", 0) == {"total": 0, "branches": []}


def test_values_are_told_as_far_as_they_can_be_read(watched):
    known, _ = watched
    assert [turn["success"]["value"] for turn in values_of(known, "step_2", 8)] == [0.25, 0.75]
    assert values_of(known, "step_2", 0) == []
    assert values_of(known, "step_3", 8) == []


def test_branches_are_no_part_of_the_training(watched):
    _, records = watched
    assert len(find_rows(records, Query()).rows) == 72
    assert len(find_rows(records, Query(files=("step_2.9",))).rows) == 7
    assert len(find_rows(records, Query(kind="branch")).rows) == 9


def test_a_copy_has_the_branches_of_its_files(folder, tmp_path):
    assert write_copy(RunWatch([folder]), TokenTexts(), tmp_path / "last", 1) == 24
    assert write_copy(RunWatch([folder]), TokenTexts(), tmp_path / "two", 2) == 48 + 9
    (line,) = Path(tmp_path / "two/data/r0_step_2.9.7.js").read_text().splitlines()
    assert "[none]" in line


@pytest.fixture(scope="module")
def url(folder):
    with viewer(folder.parent) as url:
        yield url


@pytest.fixture
def page(browser, url):
    browser.get("about:blank")

    def show(address):
        browser.get(f"{url}/{address}")
        wait(browser, "document.getElementById('main')?.dataset.ready")

    yield show
    assert not complaints(browser)
    assert not run(browser, "return window.taken"), "an edit's script ran"


def test_a_trajectory_shows_its_branches_and_the_value_of_each_turn(page, browser):
    for name, window in SIZES.items():
        set_window(browser, *window)
        page(f"?{name}#/trajectory?run=first&files=step_2&file=step_2&line=8")
        assert fits(browser)
        if SHOTS and not name:
            browser.save_screenshot(f"{SHOTS}/viewer_branches.png")
    set_window(browser, *SIZES[""])
    assert "7 branches" in text(browser, ".branches h3")
    bars = "return [...document.querySelectorAll('.segment.model .value')].map(bar => bar.innerText)"
    assert run(browser, bars) == ["25%", "75%"]
    assert "right 75% ± 13%" in run(browser, "return document.querySelectorAll('.value')[1].title")
    assert "turn 2 as it was 6×, mean 0.5" in text(browser, ".branches")
    run(browser, "document.querySelector('.branches li li a').click()")
    wait(browser, "document.querySelector('.origin')?.innerText.includes('goes on from turn 2 of step_2.9:7')")
    assert "its observation edited" in text(browser, ".origin")
    run(browser, "document.querySelector('.origin a').click()")
    wait(browser, "document.querySelector('.origin')?.innerText.includes('turn 1 of step_2:9')")
    assert "edited" in text(browser, f".segment.{Author.MODEL.value} .author")
    run(browser, "document.querySelector('.origin a').click()")
    wait(browser, "document.querySelectorAll('.value').length === 2")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_hostile_edit_is_shown_and_not_run(page, browser):
    page("#/trajectory?run=first&file=step_2&line=9")
    assert "<script>window.taken = 1</script>" in text(browser, ".branches")


def test_edited_tokens_are_in_no_loss(page, browser):
    page("#/trajectory?run=first&file=step_2.9&line=6&tokens=1")
    wait(browser, "document.querySelectorAll('.segment.model .token').length")
    masks = "return [...document.querySelectorAll('.segment.model')].map(s => s.querySelector('.token').token.mask)"
    assert run(browser, masks) == [0, 1]

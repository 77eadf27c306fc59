"""A run folder that was made to harm whoever looks at it: each bad file or line costs itself alone."""

import json
import os
import time
import zipfile
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from viewer_server import viewer

from verl_tool.errors import ConfigError
from verl_tool.trainer.monitoring import run_metrics
from verl_tool.trainer.monitoring.token_records import mean_advantages, tokens_of, tokens_path
from verl_tool.viewer.record_index import FOLDER, RecordIndex
from verl_tool.viewer.record_rows import ROW
from verl_tool.viewer.run_files import Run, find_runs
from verl_tool.viewer.run_watch import RunWatch

GOOD = {"segments": [{"author": "prompt", "text": "q"}, {"author": "model", "text": "a"}], "reward": 1.0}
LINES = {
    "a huge accuracy": b'{"extra": {"reward_extra_info": {"acc": ' + b"9" * 400 + b"}}}",
    "a huge reward": b'{"reward": ' + b"9" * 400 + b"}",
    "a huge sample": b'{"sample": 1099511627776, "segments": [], "score": 1}',
    "a huge index": b'{"index": 1180591620717411303424, "segments": [], "score": 1}',
    "an index of the row": b'{"extra": {"index": -9223372036854775809}}',
    "deep nesting": b'{"extra": {"reward_extra_info": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}}",
    "not JSON": b"\0" * 100,
    "not UTF-8": b'{"trajectory_id": "\xff"}',
    "a negative count": b'{"prompt_segments": -5, "segments": [{"author": "model"}]}',
    "many segments": b'{"segments": [' + b'{"author": "model"},' * 70_000 + b'{"author": "model"}]}',
    "infinite seconds": b'{"timings": {"total": 1e999}}',
    "text for numbers": b'{"timings": {"total": "x"}, "calls": 3}',
    "a list": b"[]",
}


def run_at(folder: Path, *lines: bytes, file: str = "step_1.jsonl") -> Run:
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    (folder / "trajectories" / file).write_bytes(b"".join(line + b"\n" for line in lines))
    return Run(folder.name, folder)


@pytest.mark.parametrize("kind", ["step_1.jsonl", "records.jsonl"])
@pytest.mark.parametrize("line", LINES.values(), ids=list(LINES))
def test_a_bad_line_costs_itself_alone(tmp_path, kind, line):
    if kind == "records.jsonl":
        (tmp_path / kind).write_bytes(line + b"\n" + json.dumps(GOOD | {"score": 1.0}).encode() + b"\n")
        run = Run("run", tmp_path)
    else:
        run = run_at(tmp_path, line, json.dumps(GOOD).encode())
    index = RecordIndex(run)
    index.refresh()
    assert len(index.records.rows) == 2
    assert index.records.rows[1]["reward"] == 1.0
    assert not index.records.problems


def test_a_line_beyond_the_limit_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_tool.viewer.record_index.MAX_LINE", 1000)
    long = json.dumps(GOOD | {"x": "y" * 5000}).encode()
    index = RecordIndex(run_at(tmp_path, json.dumps(GOOD).encode(), long, json.dumps(GOOD).encode()))
    index.refresh()
    records = index.records
    assert [records.words[row["stop"]] for row in records.rows] == ["", "unreadable", ""]
    assert records.line(records.rows[2]) == json.dumps(GOOD).encode() + b"\n"
    assert len(records.line(records.rows[1])) == 1000


def make_pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def make_folder(path: Path, outside: Path) -> None:
    path.mkdir()


def make_loop(path: Path, outside: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_pipe, make_link, make_folder, make_loop])
def test_a_bad_file_costs_itself_alone(tmp_path, make):
    outside = tmp_path / "outside.jsonl"
    outside.write_text(json.dumps(GOOD) + "\n")
    run = run_at(tmp_path / "run", json.dumps(GOOD).encode(), file="step_2.jsonl")
    make(tmp_path / "run" / "trajectories" / "step_1.jsonl", outside)
    index = RecordIndex(run)
    index.refresh()
    assert len(index.records.rows) == 1
    assert list(index.records.problems) == ["step_1"]


def test_a_link_inside_the_run_is_followed(tmp_path):
    run = run_at(tmp_path, json.dumps(GOOD).encode(), file="step_1.jsonl")
    (tmp_path / "trajectories" / "step_2.jsonl").symlink_to("step_1.jsonl")
    index = RecordIndex(run)
    index.refresh()
    assert len(index.records.rows) == 2


@pytest.mark.parametrize("number", ["99999999999", "9" * 200])
def test_a_file_of_an_impossible_step_is_a_problem(tmp_path, number):
    run = run_at(tmp_path, json.dumps(GOOD).encode())
    run_at(tmp_path, json.dumps(GOOD).encode(), file=f"step_{number}.jsonl")
    index = RecordIndex(run)
    index.refresh()
    assert len(index.records.rows) == 1
    (problem,) = index.records.problems.values()
    assert "rename it" in problem


FORGERIES = {
    "a place outside": {"offset": 1 << 60},
    "a length": {"length": 1 << 60},
    "a word": {"stop": 60_000},
    "a line": {"line": 7},
}


@pytest.mark.parametrize("forged", FORGERIES.values(), ids=list(FORGERIES))
def test_a_forged_index_is_made_anew(tmp_path, forged):
    run = run_at(tmp_path, json.dumps(GOOD).encode(), json.dumps(GOOD).encode())
    RecordIndex(run).refresh()
    stored = tmp_path / "trajectories" / FOLDER / "step_1.rows"
    head, _, content = stored.read_bytes().partition(b"\n")
    rows = np.frombuffer(content, ROW).copy()
    for name, value in forged.items():
        rows[name][1] = value
    stored.write_bytes(head + b"\n" + rows.tobytes())
    index = RecordIndex(run)
    index.refresh()
    assert [index.records.line(row) for row in index.records.rows] == [json.dumps(GOOD).encode() + b"\n"] * 2


def test_an_index_is_not_written_through_a_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = run_at(tmp_path / "run", json.dumps(GOOD).encode())
    (tmp_path / "run" / "trajectories" / FOLDER).symlink_to(elsewhere)
    RecordIndex(run).refresh()
    assert not list(elsewhere.iterdir())


def test_an_index_is_not_written_through_a_link_at_its_name(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = run_at(tmp_path / "run", json.dumps(GOOD).encode())
    folder = tmp_path / "run" / "trajectories" / FOLDER
    folder.mkdir()
    for name in ("step_1.rows", f"step_1.{os.getpid()}"):
        (folder / name).symlink_to(victim)
    RecordIndex(run).refresh()
    assert victim.read_text() == "mine"


def test_an_index_beyond_its_file_is_not_read(tmp_path):
    run = run_at(tmp_path, json.dumps(GOOD).encode())
    RecordIndex(run).refresh()
    os.truncate(tmp_path / "trajectories" / FOLDER / "step_1.rows", 1 << 41)
    index = RecordIndex(run)
    index.refresh()
    assert len(index.records.rows) == 1


def test_words_without_end_become_one(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_tool.viewer.record_index.MAX_WORDS", 8)
    for step in (1, 2):
        lines = [json.dumps(GOOD | {"stop": f"stop {step} {i}"}).encode() for i in range(6)]
        run = run_at(tmp_path, *lines, file=f"step_{step}.jsonl")
    index = RecordIndex(run)
    index.refresh()
    assert "(other)" in index.records.words
    assert len(index.records.rows) == 12


def test_a_line_costs_no_more_for_the_words_before_it(tmp_path):
    lines = [json.dumps(GOOD | {"stop": f"stop {i}"}).encode() for i in range(30_000)]
    index = RecordIndex(run_at(tmp_path, *lines))
    begun = time.process_time()
    index.refresh()
    assert len(index.records.rows) == len(lines)
    assert time.process_time() - begun < 12.0, "words that are copied for each line take half a minute"


YAML = {
    "aliases": "a: &a [x,x,x]\n" + "".join(f"b{i}: &b{i} [{','.join(['*a'] * 9)}]\n" for i in range(7)),
    "deep": "a: " + "[" * 50_000,
    "long": "a: [" + "x," * 250_000 + "]",
    "a huge number": "a: " + "9" * 10_000,
    "objects": "a: !!python/object/apply:os.system ['true']",
}


@pytest.mark.parametrize("text", YAML.values(), ids=list(YAML))
def test_a_config_has_bounds(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml is not valid YAML"):
        Run("run", tmp_path).config()


def test_tokens_that_grow_when_they_are_read_are_left_alone(tmp_path):
    records = tmp_path / "step_1.jsonl"
    arrays = {"lines": np.zeros(1, "i8"), "ends": np.array([1 << 20]), "advantages": np.zeros(1 << 20, "f4")}
    np.savez_compressed(tokens_path(records).open("wb"), **arrays)
    assert tokens_of(records, 0) == {}
    assert np.isnan(mean_advantages(records, 1)).all()


@pytest.mark.parametrize(
    "wrong",
    [{"ends": np.array([9])}, {"ends": np.array([-1])}, {"lines": np.array([[0]])}, {"advantages": np.array(["x"])},
     {"lines": np.array([0.5])}, {"lines": np.array([0, 1])}],
)  # fmt: skip
def test_tokens_that_do_not_fit_together_are_left_alone(tmp_path, wrong):
    records = tmp_path / "step_1.jsonl"
    fine = {"lines": np.zeros(1, "i8"), "ends": np.array([1]), "advantages": np.zeros(1, "f4")}
    np.savez(tokens_path(records).open("wb"), **(fine | wrong))
    assert tokens_of(records, 0) == {}
    assert np.isnan(mean_advantages(records, 1)).all()


@pytest.mark.parametrize("header", [(1 << 50,), (1 << 40, 0, 1 << 40), (-1,)])
def test_tokens_whose_header_asks_for_memory_are_left_alone(tmp_path, header, monkeypatch):
    records = tmp_path / "step_1.jsonl"
    with zipfile.ZipFile(tokens_path(records), "w") as archive:
        for name, shape in (("lines", (1,)), ("ends", (1,)), ("advantages", header), ("more", header)):
            with archive.open(f"{name}.npy", "w") as part:
                np.lib.format.write_array_header_1_0(part, {"descr": "<f4", "fortran_order": False, "shape": shape})
                part.write(bytes(4))
    monkeypatch.setattr(np, "load", lambda *a, **k: pytest.fail("the arrays were read"))
    assert tokens_of(records, 0) == {}
    assert np.isnan(mean_advantages(records, 1)).all()


def test_a_branch_named_as_a_step_has_a_name_of_its_own(tmp_path):
    run = run_at(tmp_path, json.dumps(GOOD).encode())
    (tmp_path / "branches").mkdir()
    (tmp_path / "branches" / "step_1.jsonl").write_text(json.dumps(GOOD | {"reward": 7.0}) + "\n")
    for _ in range(2):  # the second time by the index beside the records
        index = RecordIndex(run)
        index.refresh()
        assert [(file.name, file.kind) for file in index.records.files] == [
            ("step_1", "step"),
            ("step_1 (2)", "branch"),
        ]
        assert list(index.records.rows["reward"]) == [1.0, 7.0]
        assert index.records.file_number("step_1 (2)") == 1


def test_a_name_that_is_no_text_is_a_name_all_the_same(tmp_path):
    folder = os.fsencode(tmp_path) + b"/a\xffb"
    os.makedirs(folder)
    Path(os.fsdecode(folder), "metrics.jsonl").write_text("")
    assert list(find_runs([tmp_path])) == ["a\ufffdb"]


@pytest.mark.parametrize("bad", [b"{", b'{"step": 2}', b'{"step": 2, "data": "' + b"x" * 5000 + b'"}'])
def test_a_bad_line_of_metrics_costs_itself_alone(tmp_path, monkeypatch, bad):
    monkeypatch.setattr(run_metrics, "_MAX_LINE", 1000)
    lines = [json.dumps({"step": step, "data": {"loss": step / 2}}).encode() for step in (1, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], bad, lines[1], b""]))
    watch = RunWatch([tmp_path])
    (run,) = watch.runs.values()
    assert watch.metrics(run) == [(1, {"loss": 0.5}), (3, {"loss": 1.5})]
    assert "line 2 of" in str(watch.metrics_problem(run))
    with pytest.raises(ConfigError, match="line 2 of"):
        run_metrics.read_metrics(tmp_path)


METRICS = {
    "not JSON": "{\n",
    "no step": '{"data": {}}\n',
    "a name for a number": '{"step": "x", "data": {}}\n',
    "deep": "[" * 100_000 + "\n",
    "a huge number": '{"step": 1, "data": {"reward": ' + "9" * 400 + "}}\n",
}


async def test_other_runs_are_seen_beside_bad_ones(tmp_path):
    import httpx

    run_at(tmp_path / "good", json.dumps(GOOD).encode())
    for number, content in enumerate(METRICS.values()):
        run_at(tmp_path / f"bad{number}", json.dumps(GOOD).encode())
        (tmp_path / f"bad{number}" / "metrics.jsonl").write_text(content)
    (tmp_path / "bad0" / "metrics.0x1.jsonl").write_text("")
    outside = tmp_path / "secret.txt"
    outside.write_text("secret")
    images = tmp_path / "good" / "trajectories" / "images"
    images.mkdir()
    (images / f"{'a' * 64}.png").symlink_to(outside)
    with viewer(tmp_path) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            runs = (await client.get("/api/runs")).json()
            problems = {run["name"]: run["problem"] for run in runs}
            assert problems["good"] is None
            assert problems["bad4"] is None, "the number is left out"
            assert all(problems[f"bad{number}"] for number in range(4))
            for run in runs:
                rows = (await client.get(f"/api/rows?run={quote(run['name'])}&limit=5")).json()
                assert rows["total"] == 1
            image = await client.get(f"/api/image?run=good&sha256={'a' * 64}")
            assert image.status_code == 404
            assert "outside" in image.json()["error"]["message"]
            foreign = {"Sec-Fetch-Site": "cross-site"}
            assert (await client.get("/api/rows?run=good&text=x", headers=foreign)).status_code == 403
            assert (await client.get("/", headers=foreign)).status_code == 200

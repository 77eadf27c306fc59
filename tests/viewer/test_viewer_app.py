"""The viewer over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from urllib.parse import quote, urlsplit

import pytest
from made_run import HOSTILE, made_run
from viewer_server import viewer

from eval_service.evaluation.record import Record, write_records
from verl_tool.agent_loop.trajectory import read_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made_run(folder / "first", seed=1)
    made_run(folder / "second", seed=2)
    return folder


@pytest.fixture(scope="module")
def url(runs):
    with viewer(runs) as url:
        yield url


def ask(url, path, method="GET", headers=()):
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request(method, path, headers=dict(headers))
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def told(url, path):
    status, _, body = ask(url, path)
    assert status == 200, body
    return json.loads(body)


def test_runs_are_found_with_their_courses(url):
    assert [(run["name"], run["kind"], run["steps"]) for run in told(url, "/api/runs")] == [
        ("first", "training", 4),
        ("second", "training", 4),
    ]


def test_a_run_names_its_last_checkpoint(tmp_path):
    made_run(tmp_path / "one")
    with viewer(tmp_path) as url:
        assert told(url, "/api/runs")[0]["checkpoint"] is None
        saved = tmp_path / "one/checkpoints/global_step_3/actor/huggingface"
        saved.mkdir(parents=True)
        (saved / "config.json").write_text("{}")
        (saved / "model.safetensors").write_bytes(b"x")
        (tmp_path / "one/checkpoints/global_step_4").mkdir()  # one that is just being written
        assert told(url, "/api/runs")[0]["checkpoint"] == 3


def test_curves_and_configs(url):
    metrics = told(url, "/api/metrics?run=first&names=actor/entropy")
    assert metrics["steps"] == [1, 2, 3, 4]
    assert metrics["series"]["critic/score/mean"] == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert metrics["series"]["actor/entropy"][1] == 0.5
    assert [curve["title"] for curve in metrics["curves"]] == [
        "reward",
        "success",
        "faults",
        "entropy",
        "seconds a step",
    ]
    assert told(url, "/api/config?run=second")["data.seed"] == "2"


def test_a_record_comes_as_it_was_written(url, runs):
    answer = told(url, "/api/trajectory?run=first&file=step_2&line=4&files=step_2")
    written = list(read_jsonl(runs / "first/trajectories/step_2.jsonl"))[4]
    assert answer["record"] == json.loads(written.to_json())
    assert answer["record"]["segments"][0]["text"] == HOSTILE
    assert (answer["place"], answer["of"]) == (4, 24)
    assert answer["next"] == {"file": "step_2", "line": 5}


def evaluation(folder, right, salt=""):
    folder.mkdir()
    records = [
        Record(i, 0, "d", problem=f"problem {i}{salt}", content=f"answer {i}", score=float(each), correct=each)
        for i, each in enumerate(right)
    ]
    write_records(folder / "records.jsonl", records)


def test_two_evaluations_are_compared(tmp_path):
    evaluation(tmp_path / "before", [True, False, False])
    evaluation(tmp_path / "after", [True, True, False])
    evaluation(tmp_path / "others", [True, True, False], salt="!")
    with viewer(tmp_path) as url:
        compared = told(url, "/api/compare?run=before,after")
        assert (compared["first"], compared["first_accuracy"]) == ("before", pytest.approx(1 / 3))
        assert [flip["index"] for flip in compared["solved"]] == [1]
        for names, words in (("before,others", "different problems"), ("before", "a comparison is of two")):
            status, _, body = ask(url, f"/api/compare?run={names}")
            assert status == 400
            assert words in body.decode()


def test_no_page_may_run_other_scripts(url):
    for path in ("/", "/static/main.js", "/api/runs", "/nowhere"):
        _, headers, _ = ask(url, path)
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_a_foreign_name_is_refused(url):
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        status, _, body = ask(url, "/api/runs", headers=headers)
        assert status == 403
        assert json.loads(body)["error"]["type"] == "forbidden_host"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/trajectory", "/static/main.js"])
def test_nothing_can_be_changed(url, method, path):
    assert ask(url, path, method)[0] == 405


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/rows?run=nothing", 404),
        ("/api/rows?run=first&sort=evil", 400),
        ("/api/rows?run=first&offset=x", 400),
        ("/api/trajectory?run=first&file=step_1&line=999", 404),
        ("/api/trajectory?run=first&file=../../x&line=0", 404),
        ("/api/trajectory?run=first&file=step_1&line=-1", 404),
        ("/api/trajectory?run=first&file=step_1&line=inf", 400),
        ("/api/image?run=first&sha256=" + quote("../../config", safe=""), 400),
        ("/api/image?run=first&sha256=" + "0" * 64, 404),
        ("/static/..%2fcommand.py", 404),
        ("/static/viewer_app.py", 404),
    ],
)
def test_what_is_not_there_is_told(url, path, status):
    answered, _, body = ask(url, path)
    assert answered == status
    assert not path.startswith("/api") or json.loads(body)["error"]["message"]


def test_an_image_is_served_as_an_image(url, runs):
    folder = runs / "first/trajectories/images"
    folder.mkdir(exist_ok=True)
    (folder / f"{'ab' * 32}.png").write_bytes(b"\x89PNG")
    status, headers, body = ask(url, f"/api/image?run=first&sha256={'ab' * 32}")
    assert (status, headers["content-type"], body) == (200, "image/png", b"\x89PNG")


def test_the_command_tells_its_address_and_ends_by_ctrl_c(runs):
    command = [sys.executable, "-m", "verl_tool.viewer", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert line.startswith("viewer: http://127.0.0.1:"), line
        assert told(line.split()[1], "/api/runs")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) is not None
    finally:
        process.kill()
        process.wait()


def test_a_folder_that_is_not_there_is_told():
    command = [sys.executable, "-m", "verl_tool.viewer", "no/such/folder"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 2
    assert "no/such/folder does not exist" in done.stderr

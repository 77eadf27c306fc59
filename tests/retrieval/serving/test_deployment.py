"""The command ``serve`` as a user runs it: two replicas on Ray Serve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
from listeners import Listeners
from server_command import STOP_SECONDS, gone
from small_corpus import PAGES, build_index, titles, write_corpus

from verl_tool.retrieval.manifest import Kind
from verl_tool.servers.serve.ports import free_ports

START_SECONDS = 200.0
COMMAND = (sys.executable, "-m", "verl_tool.retrieval", "serve")


def wait_for(url_file: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not url_file.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return url_file.read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_replicas_answer_and_end_without_a_trace(tmp_path: Path) -> None:
    index = build_index(write_corpus(tmp_path / "c.jsonl"), tmp_path / "index", Kind.hybrid)
    url_file, log = tmp_path / "url", tmp_path / "log"
    options = ("--index", tmp_path / "index", "--port", free_ports(1)[0], "--num_replicas", 2, "--url_file", url_file)
    environment = {**os.environ, "VERL_TOOL_RETRIEVAL_API_KEY": "s3cret", "COLUMNS": "200", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [*COMMAND, *map(str, options)],
        stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        with Listeners(process.pid) as listeners:
            url = wait_for(url_file, process, log)
            family = psutil.Process(process.pid).children(recursive=True)

            def first_title(query: str) -> str:
                answer = requests.post(
                    f"{url}/retrieve", json={"queries": [query], "topk": 1, "return_scores": True}, timeout=60,
                    headers={"authorization": "Bearer s3cret"},
                )  # fmt: skip
                assert answer.status_code == 200, answer.text
                return str(answer.json()["result"][0][0]["document"]["contents"]).split("\n")[0].strip('"')

            assert requests.post(f"{url}/retrieve", json={"queries": ["a"]}, timeout=60).status_code == 401
            queries = [f"Tell me of {title}." for title in PAGES] * 10
            with ThreadPoolExecutor(16) as clients:
                assert list(clients.map(first_title, queries)) == [titles(index, query, 1)[0] for query in queries]
            health = requests.get(f"{url}/health", timeout=60).json()
            assert (health["passages"], [peer["status"] for peer in health["replicas"]]) == (len(PAGES), ["healthy"])
            metrics = requests.get(f"{url}/metrics", headers={"authorization": "Bearer s3cret"}, timeout=60).text
            counts = [line for line in metrics.splitlines() if line.startswith("verl_tool_retrieval_queries_total{")]
            assert len(counts) == 2
            # Each replica searched for one word before it served.
            assert sum(float(line.rsplit(" ", 1)[1]) for line in counts) == len(queries) + 2
            process.send_signal(signal.SIGINT)
            assert process.wait(STOP_SECONDS) == 0, log.read_text()
            assert gone(family, STOP_SECONDS) == []
        assert listeners.open_to_others == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "replicas    2, " in log.read_text()


def test_what_cannot_be_served_is_said_before_anything_starts(tmp_path: Path) -> None:
    run = subprocess.run(
        [*COMMAND, "--index", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert run.returncode == 2
    assert "cannot serve: there is no index in" in run.stderr

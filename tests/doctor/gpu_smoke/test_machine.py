"""What a report tells of the machine; nothing private gets through, wherever it stands in a text."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.doctor.gpu_smoke.machine import MAX_TEXT_LENGTH, describe_machine, private_strings, scrub

pytestmark = pytest.mark.slow

WORDS = st.text("abcdefghij", min_size=3, max_size=8)
AROUND = st.text(" :;,'\"()[]=", max_size=3)


def test_the_machine_is_described():
    pytest.importorskip("torch")
    machine = describe_machine()
    assert {"torch", "transformers"} <= set(machine["versions"])
    assert machine["host_memory_bytes"] > 1 << 28
    assert scrub(machine) == machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no file /home/ada/run/model.bin here", "no file …/model.bin here"),
        ("in '~/secret/plan.txt'", "in '…/plan.txt'"),
        ('File "/opt/a/b.py", line 3', 'File "…/b.py", line 3'),
        ("bound to 10.20.30.40:8000", "bound to …:8000"),
        ("from fe80::1ff:fe23:4567:890a", "from …"),
        ("GET https://host.example/x?token=1 failed", "GET … failed"),
        ("logs/grpo.log", "logs/grpo.log"),
        ("step 1/2: 3.5 tokens/s", "step 1/2: 3.5 tokens/s"),
        ("vLLM 0.28.0, driver 580.65.06, torch 2.13.0+cu130", "vLLM 0.28.0, driver 580.65.06, torch 2.13.0+cu130"),
    ],
)
def test_paths_and_addresses_are_left_out_and_the_rest_stays(text, expected):
    assert scrub({"reason": [text]}) == {"reason": [expected]}


@given(folders=st.lists(WORDS, min_size=1, max_size=4), before=AROUND, behind=AROUND)
def test_no_folder_of_a_path_is_left(folders, before, behind):
    text = f"error {before}/{'/'.join(f'private{name}' for name in folders)}/file.txt{behind} end"
    assert "private" not in scrub(text)


def test_a_text_that_is_scrubbed_stays_as_it_is():
    once = scrub("no file /home/ada/run/model.bin, ~/x//y/z")
    assert scrub(once) == once == "no file …/model.bin, …/z"


def test_names_of_host_and_user_and_secrets_are_left_out(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sesame-open")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.cluster.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada_lovelace")
    text = f"{Path.home()}/x by ada_lovelace on node17 (node17.cluster.example) with sesame-open"
    found = scrub(text)
    assert not any(private in found for private in ("ada", "node17", "sesame", str(Path.home())))
    assert "sesame-open" in private_strings()


def test_long_texts_are_cut():
    assert len(scrub("x" * 10_000)) == MAX_TEXT_LENGTH

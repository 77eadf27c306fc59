from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from shown_tool import striped
from verl.utils.dataset.rl_dataset import RLHFDataset


def test_a_row_s_images_travel_as_their_files():
    made = SimpleNamespace(image_key="images", video_key="videos", audio_key="audios", processor=object())
    files = [striped(1).data, striped(2, 500).data]
    row = {"prompt": [{"role": "user", "content": "<image>a<image>"}], "images": [{"bytes": data} for data in files]}
    messages = RLHFDataset._build_messages(made, row, key="prompt")
    sent = pickle.dumps(messages)
    assert len(sent) < sum(map(len, files)) + 1000 < 96 * 500
    for seen in (messages, pickle.loads(sent), pickle.loads(pickle.dumps(pickle.loads(sent)))):
        first, text, second = seen[0]["content"]
        assert text == {"type": "text", "text": "a"}
        assert [part["bytes"] for part in (first, second)] == files
        assert [part["image"].convert("RGB").size for part in (first, second)] == [(96, 64), (96, 500)]

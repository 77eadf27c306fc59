"""The config of a model that is here, on a hub, or nowhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("verl", reason="verl is not here: source scripts/env.sh train")

from huggingface_hub import hf_api
from transformers import AutoConfig, Qwen2Config

from verl_tool.agent_loop.verl import model_config
from verl_tool.agent_loop.verl.image_reading import UNKNOWN, why_no_images
from verl_tool.agent_loop.verl.model_config import load_config, model_type, why_not_loaded


class _Hub(ThreadingHTTPServer):
    """Answers each question with `status`, and counts them."""

    status, questions = 200, 0

    class _Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            hub = self.server
            assert isinstance(hub, _Hub)
            hub.questions += 1
            self.send_response(hub.status)
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "1" * 40)
            self.send_header("Content-Length", "0")
            if hub.status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self._Handler)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hub]:
    """A hub that has what AutoConfig gives: that is none of this machine's."""

    def from_pretrained(_model: str, *, trust_remote_code: bool, local_files_only: bool = False) -> Qwen2Config:
        if local_files_only:
            raise OSError("it is not here")
        return Qwen2Config()

    with _Hub() as server:
        monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
        monkeypatch.setattr(hf_api.api, "endpoint", f"http://127.0.0.1:{server.server_port}")
        model_config._hub_problem.cache_clear()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
    model_config._hub_problem.cache_clear()


def test_the_hub_gives_the_config_of_a_model_that_is_not_here(hub: _Hub) -> None:
    assert why_no_images("owner/model") == "reads text only"
    assert (model_type("owner/model"), why_not_loaded("owner/model")) == ("qwen2", None)
    assert hub.questions == 1


@pytest.mark.parametrize(
    ("status", "reason"), [(503, "the hub cannot be asked for it"), (404, "the hub has no config.json of it")]
)
def test_a_failing_hub_gets_one_request_for_all_checks(hub: _Hub, status: int, reason: str) -> None:
    hub.status = status
    assert (why_no_images("owner/model"), model_type("owner/model")) == (UNKNOWN, None)
    why = why_not_loaded("owner/model")
    assert why is not None
    assert why.startswith(f"is not on this machine, and {reason}")
    assert hub.questions == 1


def test_folders_and_cached_models_need_no_hub(hub: _Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("/no/such/model", "./model", "~/model", "a/b/c", "hdfs://host/model"):
        with pytest.raises(OSError, match="not here"):
            load_config(folder)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda _model, **_given: Qwen2Config())
    assert model_type("owner/model") == "qwen2"
    assert hub.questions == 0

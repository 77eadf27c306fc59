"""How a training starts or joins Ray: on 127.0.0.1 if it is alone, with a token and sockets of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tool.platforms.preload.template import forked_ray_workers
from verl_tool.platforms.weight_sync import FOLDER
from verl_tool.servers.serve.local_ray import (
    address_to_join,
    keep_token_private,
    make_token,
    on_loopback,
    private_folder,
)


@contextmanager
def ray_settings(config: DictConfig) -> Iterator[None]:
    """Within the block, verl's `run_ppo` starts or joins Ray as it should; `config` is told what that takes.

    A cluster is joined if ``ray_kwargs.ray_init.address`` or ``RAY_ADDRESS`` names one, or ``ray start`` left one on
    this node. Otherwise one is started. It listens on 127.0.0.1 unless ``ray_init._node_ip_address`` is given.
    """
    # Short, since it is for Unix sockets, and not guessable: other nodes make a folder of the same name.
    sockets = tempfile.mkdtemp(prefix="verl-tool-", dir="/tmp")
    try:
        provided = config.ray_kwargs.ray_init
        alone = address_to_join(provided.get("address")) is None
        if alone:
            make_token()
        else:
            keep_token_private()
        _report(config, {"runtime_env": {"env_vars": {FOLDER: sockets}}})
        if not alone:
            yield
        elif provided.get("_node_ip_address"):
            _report(config, {"address": "local"})
            yield
        else:
            _report(config, {"address": "local", "_temp_dir": provided.get("_temp_dir") or str(private_folder())})
            with on_loopback(), forked_ray_workers():
                yield
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _report(config: DictConfig, options: dict[str, Any]) -> None:
    with open_dict(config):
        config.ray_kwargs.ray_init = OmegaConf.merge(config.ray_kwargs.ray_init, options)

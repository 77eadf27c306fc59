"""Register the reward managers of this folder with verl by name: ``reward.reward_manager.name=acecoder``.

verl loads this module at the end of ``import verl``, through the entry point ``verl.plugins``, in each of its
processes. The managers are imported when verl first looks one up by name, which most processes never do. A custom
manager needs no registration: ``reward.reward_manager={source: importlib, name: MyManager, module: {path:
/path/to/my_file.py}}``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from verl_tool.platforms.patch import verl_patch

NAMES = (
    *("acecoder", "by_source", "calculator", "deepsearch", "environment", "gsm8k", "mathcoder", "mt_torl"),
    *("pixel_reasoner", "reasoning_gym", "search_f1", "search_r1_qa_em", "simple_tir", "sqlcoder", "terminal", "torl"),
)
"""Files of this folder. Each registers its manager under the file's name."""


def register_all() -> None:
    """Import all reward managers, each of which registers itself."""
    for name in NAMES:
        import_module(f"verl_tool.agent_workers.reward_manager.{name}")


def _with_local_managers(look_up: Callable[[str], type[Any]]) -> Callable[[str], type[Any]]:
    def get_reward_manager_cls(name: str) -> type[Any]:
        register_all()
        return look_up(name)

    return get_reward_manager_cls


LOOK_UP = verl_patch(
    "experimental.reward_loop.reward_manager",
    "get_reward_manager_cls",
    why="a manager must be imported to be registered, and verl imports none but its own before it looks one up",
    replace=_with_local_managers,
)
LOOK_UP.install()

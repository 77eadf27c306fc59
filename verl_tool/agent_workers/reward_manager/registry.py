"""Makes the reward managers of this folder known to verl by name: ``reward.reward_manager.name=acecoder``.

verl loads this module at the end of ``import verl``, by the entry point ``verl.plugins``, in each of its processes.
The managers themselves are imported when verl's reward loop is, which most processes never do. A manager of one's own
needs no registration: ``reward.reward_manager={source: importlib, name: MyManager, module: {path:
/path/to/my_file.py}}``.
"""

from __future__ import annotations

from importlib import import_module

import wrapt

NAMES = ("acecoder", "calculator", "gsm8k", "mathcoder", "reasoning_gym", "search_r1_qa_em", "torl")
"""Each is a file of this folder, and the name under which that file registers its manager."""
_VERLS = "verl.experimental.reward_loop.reward_manager"


def register_all(_: object = None) -> None:
    """Import all reward managers, each of which registers itself."""
    for name in NAMES:
        import_module(f"verl_tool.agent_workers.reward_manager.{name}")


wrapt.register_post_import_hook(register_all, _VERLS)

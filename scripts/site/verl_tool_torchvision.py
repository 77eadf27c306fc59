"""PyPI's torchvision beside a CPU build of torch: its operators do not load, and two of them must be declared.

Without the declarations ``import torchvision`` ends in "operator torchvision::nms does not exist", and vLLM and
transformers import it for every model that reads images. Nobody here calls the operators themselves.

scripts/env.sh copies this file into site-packages, with a ``.pth`` that imports it whenever Python starts: vLLM begins
with importing torchvision, also in processes that it starts itself, before any plug-in is asked. It therefore imports
nothing but the standard library, and stands for itself.
"""

import importlib.util
import sys

_MODULE = "torchvision.extension"
"""Loads the operators; what declares how they behave without data comes later."""


class _Finder:
    """Finds that module as everybody would, and declares what it could not load."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if not module._has_ops():
                module._verl_tool_declared = _declared()

        spec.loader.exec_module = exec_module
        return spec


def _declared():
    """The declarations; they hold as long as this object lives."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


if not any(type(finder).__name__ == "_Finder" and finder.__module__ == __name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())

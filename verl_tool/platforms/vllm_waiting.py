"""How vLLM's processes wait for each other on a machine without an accelerator. Written for vLLM 0.28.0.

Its engine and worker hand each other work through shared memory, and look there without a pause for a second behind
every read, which at work is always. Beside a GPU that is a core that has nothing else to do. Where the model itself
computes on a few cores, it takes from the model, the loop and the tools.

To sleep until the writer tells is no way out: vLLM gives its writers a queue of one message, so words are lost, and a
reader then looks again after five seconds.
"""

from __future__ import annotations

import time

PAUSE_SECONDS = 5e-5
"""Between two looks. What the kernel adds doubles it; a step of a model takes hundreds of times as long."""


def pause() -> None:
    """Leave the core for a moment, in place of giving it to processes that are ready just then, if any."""
    time.sleep(PAUSE_SECONDS)

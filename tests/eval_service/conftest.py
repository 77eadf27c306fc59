"""Makes the loop's toy tokenizer known to these tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "agent_loop"))

"""Run one part: ``python -m verl_tool.doctor.gpu_smoke.part_main FUNCTION DEVICE FOLDER RESULT``, a JSON file."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from verl_tool.doctor.gpu_smoke.part import PartContext, PartFailed, PartSkipped


def run_check(function: str, context: PartContext) -> dict[str, object]:
    """Status, reason and figures of a part's ``module:function``. The traceback of a failure goes to stderr."""
    module, _, name = function.partition(":")
    try:
        check = getattr(importlib.import_module(module), name)
        return {"status": "passed", "figures": check(context)}
    except PartSkipped as skipped:
        return {"status": "skipped", "reason": str(skipped)}
    except PartFailed as failure:
        traceback.print_exc()
        return {"status": "failed", "reason": str(failure)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the part found
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that what the part started is stopped on the way out


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    function, device, folder, result = sys.argv[1:]
    answer = run_check(function, PartContext(device, Path(folder)))
    Path(result).write_text(json.dumps(answer))

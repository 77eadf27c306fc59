"""Run by the Python of openreward: its client plays our environment at the URL of the first argument."""

from __future__ import annotations

import json
import sys
from typing import Any

from openreward import EnvironmentsAPI

URL, TOOL, ARGUMENTS, ANSWER = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
seen: dict[str, Any] = {}
with EnvironmentsAPI(base_url=URL, api_key="secret") as api:
    environment = api.get("verl_tool")
    seen["splits"] = environment.list_splits()
    seen["tasks"] = [task.task_spec for task in environment.list_tasks(split="train")]
    with environment.session(task=environment.get_task("train", 0)) as session:
        seen["prompt"] = [block.text for block in session.get_prompt()]
        seen["tools"] = [tool.name for tool in session.list_tools()]
        step = session.call_tool(TOOL, ARGUMENTS)
        seen["step"] = [[block.text for block in step.blocks], step.reward, step.finished]
        try:
            session.call_tool("nope", {})
        except Exception as error:  # noqa: BLE001
            seen["unknown"] = f"{type(error).__name__}: {error}"
        end = session.call_terminal_tool(ANSWER)
        seen["end"] = [end.reward, end.finished]
print(json.dumps(seen))

"""Read a folder of jobs with Harbor itself, and print what it finds as JSON. Run with an interpreter that has Harbor.

python harbor_reader.py JOBS
"""

import json
import sys
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from harbor.utils.trajectory_validator import TrajectoryValidator
from harbor.viewer import create_app


def main(folder: Path) -> None:
    """Validate every trajectory, and ask the server of the viewer for every job and trial."""
    invalid, jobs = {}, {}
    for path in sorted(folder.rglob("trajectory*.json")):
        validator = TrajectoryValidator()
        if not validator.validate(path):
            invalid[str(path.relative_to(folder))] = validator.errors
    viewer = TestClient(create_app(folder), base_url="http://127.0.0.1")
    for job in read(viewer, "/api/jobs")["items"]:
        url = f"/api/jobs/{job['name']}"
        trials = {trial["name"]: trial for trial in read(viewer, f"{url}/chart-trials")}
        for name, trial in trials.items():
            trial["trajectory"] = read(viewer, f"{url}/trials/{name}/trajectory")
            trial["result"] = read(viewer, f"{url}/trials/{name}")
            trial["verifier"] = read(viewer, f"{url}/trials/{name}/verifier-output")
        tasks = read(viewer, f"{url}/tasks")["items"]
        jobs[job["name"]] = job | {"trials": trials, "tasks": {task["task_name"]: task for task in tasks}}
    print(json.dumps({"invalid": invalid, "jobs": jobs}))


def read(viewer: TestClient, path: str) -> Any:
    """Return the answer of the server, which must not be an error."""
    answer = viewer.get(path)
    assert answer.status_code == 200, (path, answer.status_code, answer.text)
    return answer.json()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Runs as a folder of pages that need no server: to send to somebody, and to open by a double click."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec

from verl_tool.errors import ConfigError
from verl_tool.util.confined_files import UnsafeFileError, read_confined
from verl_tool.util.json_text import encode_json
from verl_tool.viewer.record_query import MAX_PAGE
from verl_tool.viewer.run_files import Run
from verl_tool.viewer.run_watch import RunWatch
from verl_tool.viewer.token_texts import TokenTexts
from verl_tool.viewer.viewer_app import IMAGE_TYPES, MAX_IMAGE_BYTES, STATIC, ViewerApp

MODULES = (
    "dom",
    "api",
    "chart",
    "branches",
    "branching",
    "session",
    "trajectory",
    "group",
    "runs",
    "comparison",
    "run",
    "over_time",
    "table",
    "live",
    "main",
)
"""In the order of their imports: pages that are opened from a disk may load scripts, but no modules."""
MAX_COMPARED = 6
"""Evaluations of a copy that are compared with one another."""
_IMPORT = re.compile(r'^import (\{.*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const) (\w+)", re.MULTILINE)


def write_copy(watch: RunWatch, tokens: TokenTexts, folder: Path, max_files: int) -> int:
    """Write all runs into an empty `folder`, of each the last `max_files` files of records (0: all of them).

    How many trajectories there are in the copy. Raises ConfigError if something is in the folder.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--export {folder} is not empty; name a new folder")
    (folder / "data").mkdir(parents=True)
    nonce = secrets.token_urlsafe(16)
    page = (STATIC / "index.html").read_text("utf-8").replace("static/", "")
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src file: 'self'; img-src file: 'self'"
    page = page.replace("<title>", f'<meta http-equiv="content-security-policy" content="{policy}">\n<title>')
    scripts = "".join(f'<script nonce="{nonce}" src="{name}"></script>\n' for name in ("offline.js", "viewer.js"))
    page = re.sub(r"<script.*</script>\n", "", page).replace("</body>", f"{scripts}</body>")
    (folder / "index.html").write_text(page, "utf-8")
    (folder / "viewer.js").write_text(one_script(), "utf-8")
    for name in ("style.css", "icon.svg", "offline.js"):
        (folder / name).write_bytes((STATIC / name).read_bytes())
    viewer = ViewerApp(watch, tokens)
    listed = [entry | {"key": f"r{i}"} for i, entry in enumerate(viewer.runs({}))]
    _write(folder, "runs", listed)
    _write_comparisons(viewer, listed, folder)
    return sum(_write_run(watch, viewer, watch.run(e["name"]), e["key"], folder, max_files) for e in listed)


def _write_comparisons(viewer: ViewerApp, listed: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Of each two of the first evaluations, both ways round; what cannot be compared is told with its reason."""
    evaluations = [entry for entry in listed if entry["kind"] == "evaluation"][:MAX_COMPARED]
    for first, second in permutations(evaluations, 2):
        try:
            comparison = viewer.compare({"run": f"{first['name']},{second['name']}"})
        except (ConfigError, OSError) as error:
            comparison = {"error": str(error)}
        _write(folder, f"compare_{first['key']}_{second['key']}", comparison)


def one_script() -> str:
    """All modules as one script, each in a function of its own."""
    parts = []
    for name in MODULES:
        text = (STATIC / f"{name}.js").read_text("utf-8")
        exported = [found[2] for found in _EXPORT.finditer(text)]
        text = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = $\2;", text))
        parts.append(f"const ${name} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();\n")
    return "\n".join(parts)


def _write_run(watch: RunWatch, viewer: ViewerApp, run: Run, key: str, folder: Path, max_files: int) -> int:
    records = watch.read_all(run)
    own = [file for file in records.files if file.kind != "branch"]
    names = {file.name for file in (own[-max_files:] if max_files else own)}
    files = [file for file in records.files if file.name.partition(".")[0] in names or file.name in names]
    of_run = {"run": run.name}
    of_files = {**of_run, "files": ",".join(file.name for file in files)}
    rows: list[dict[str, Any]] = []
    while page := viewer.rows({**of_files, "offset": str(len(rows)), "limit": str(MAX_PAGE)})["rows"]:
        rows += page
    answers = {
        "key": key,
        "files": [{"name": file.name, "kind": file.kind, "step": file.step} for file in files],
        "rows": rows,
        "metrics": _metrics(viewer, of_run),
        "config": _config(viewer, of_run),
        "by_file": viewer.by_file(of_run),
        "prompts": {kind or "any": viewer.prompts({**of_run, "kind": kind}) for kind in ("", "validation")},
    }
    _write(folder, key, answers)
    for file in files:
        addresses = [
            {**of_run, "file": file.name, "line": str(row["line"])} for row in rows if row["file"] == file.name
        ]
        _write(folder, f"{key}_{file.name}", [_trajectory(viewer, address) for address in addresses])
    for image in (run.records_folder / "images").glob("*"):
        if image.suffix[1:] in IMAGE_TYPES:
            (folder / "images").mkdir(exist_ok=True)
            # The page knows an image by its hash alone, and the browser its type by its content.
            with contextlib.suppress(UnsafeFileError):
                content = read_confined(image, run.folder, MAX_IMAGE_BYTES)
                (folder / "images" / image.stem).write_bytes(content)
    return len(rows)


def _metrics(viewer: ViewerApp, given: Mapping[str, str]) -> dict[str, Any]:
    """All curves of a run; none if its metrics cannot be read, of which the list of runs tells."""
    try:
        return viewer.metrics({**given, "names": ",".join(viewer.metrics(given)["names"])})
    except (ConfigError, OSError):
        return {"steps": [], "series": {}, "names": [], "curves": [], "phases": {}}


def _config(viewer: ViewerApp, given: Mapping[str, str]) -> dict[str, str]:
    try:
        return viewer.config(given)
    except (ConfigError, OSError) as error:
        return {"config.yaml": f"cannot be read: {error}"}


def _trajectory(viewer: ViewerApp, address: Mapping[str, str]) -> dict[str, Any]:
    answer = msgspec.json.decode(bytes(viewer.trajectory(address).body))
    parts = {name: answer[name] for name in ("record", "trainer", "branches", "values")}
    return {**parts, "pieces": viewer.pieces(address)}


def _write(folder: Path, name: str, value: Any) -> None:
    """As a script that tells the value: a page from a disk may read no other file."""
    text = encode_json(value).decode()
    (folder / "data" / f"{name}.js").write_text(f"viewerData({json.dumps(name)}, {json.dumps(text)});\n", "utf-8")

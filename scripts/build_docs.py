#!/usr/bin/env python3
"""Build the documentation site: `python scripts/build_docs.py` (extra `docs`), or `make docs`.

The pages are those of the repository, with links as the code host follows them. This copies them to `build/docs`, where
`README.md` is the first page of its folder, and lets Zensical build `build/site` from there. It needs no network. A
link that leads nowhere, a page without a place in the navigation, and any warning of Zensical are errors.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "mkdocs.yml"
STAGED = ROOT / "build/docs"
SITE = ROOT / "build/site"
PAGES = (
    *("*.md", "assets/docs/*.md", "assets/docs/agents/*.md", "eval_service/README.md"),
    *("examples/train/README.md", "examples/train/*/README.md"),
)
_LINK = re.compile(r"(?<=\]\()(?P<markdown>[^)\s]+)(?=\))|(?<=src=\")(?P<html>[^\"]+)(?=\")")
_FENCE = re.compile(r"^ {0,3}(```|~~~)")


def staged_path(path: str) -> str:
    """Return where a file of the repository lies in the site's sources; both are relative paths."""
    path = re.sub(r"^assets/(docs/)?", "", path)
    return re.sub(r"(^|/)README\.md$", r"\1index.md", path)


def find_pages() -> list[str]:
    """Return the paths of all pages, relative to the repository."""
    return sorted(str(path.relative_to(ROOT)) for pattern in PAGES for path in ROOT.glob(pattern))


def rewrite_links(page: str, linked: set[str]) -> str:
    """Return the text of `page` with links between staged files; add the files that it links to `linked`.

    Raises ValueError for a link to something that is not a file of the repository.
    """

    def rewrite(match: re.Match[str]) -> str:
        target, mark, anchor = match[0].partition("#")
        if not target or ":" in target:
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(page), target))
        if path.startswith("..") or not (ROOT / path).is_file():
            raise ValueError(f"{page}: the link {match[0]} leads to no file of the repository")
        linked.add(path)
        base = os.path.dirname(staged_path(page)) or "."
        # Zensical finds pages by Markdown links, and leaves paths in HTML as they are, one folder deeper.
        deeper = "" if match["markdown"] or staged_path(page).endswith("index.md") else "../"
        return deeper + os.path.relpath(staged_path(path), base) + mark + anchor

    return "".join(
        _LINK.sub(rewrite, line) if prose else line for line, prose in _lines((ROOT / page).read_text("utf-8"))
    )


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is outside of fenced code."""
    fenced = False
    for line in text.splitlines(keepends=True):
        fence = bool(_FENCE.match(line))
        yield line, not fenced and not fence
        fenced ^= fence


def stage() -> list[str]:
    """Copy the pages, and the files that they link, to `build/docs`. Return the paths of the staged pages."""
    shutil.rmtree(STAGED, ignore_errors=True)
    pages, linked = find_pages(), set[str]()
    for page in pages:
        target = STAGED / staged_path(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewrite_links(page, linked), "utf-8")
    for file in linked.difference(pages):
        if file.endswith(".md"):
            raise ValueError(
                f"{file} is linked and is not a page of the site; add it to PAGES in {Path(__file__).name}"
            )
        (STAGED / staged_path(file)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, STAGED / staged_path(file))
    return [staged_path(page) for page in pages]


def check_navigation(pages: list[str]) -> None:
    """Raise ValueError unless the navigation of mkdocs.yml names each of `pages` once, and nothing else."""
    listed = re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", CONFIG.read_text("utf-8"), re.MULTILINE)
    wrong = sorted(set(pages).symmetric_difference(listed) | {page for page in listed if listed.count(page) > 1})
    if wrong:
        raise ValueError(f"each page of the site stands once in `nav` of {CONFIG.name}; check {', '.join(wrong)}")


def main() -> int:
    """Build the site, or with `--serve` show it at an address that Zensical prints."""
    parser = argparse.ArgumentParser(description="Build the documentation site in build/site.")
    parser.add_argument("--serve", action="store_true", help="serve it on 127.0.0.1:8000 instead")
    command = ["serve"] if parser.parse_args().serve else ["build", "--strict", "--clean"]
    if find_spec("zensical") is None:
        print(
            "error: Zensical is not installed; it comes with `source scripts/env.sh docs`, on Python 3.11 or later",
            file=sys.stderr,
        )
        return 1
    try:
        check_navigation(stage())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, "-m", "zensical", *command, "--config-file", CONFIG], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

"""The documentation site is built from the repository's pages; a broken link, page or reference entry is an error."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a small repository in `tmp_path`."""
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts/build_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, path in {"ROOT": "", "CONFIG": "mkdocs.yml", "STAGED": "build/docs"}.items():
        monkeypatch.setattr(module, name, tmp_path / path)
    (tmp_path / "assets/docs").mkdir(parents=True)
    return module


def test_links_follow_the_pages(builder: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "examples/train/shop").mkdir(parents=True)
    (tmp_path / "examples/train/shop/README.md").write_text("[t](../../../assets/docs/tools.md#a) [c](cpu.yaml)\n")
    (tmp_path / "examples/train/shop/cpu.yaml").write_text("a: 1\n")
    (tmp_path / "assets/docs/tools.md").write_text('<img src="../images/a.png">\n```\n[code](no/link)\n```\n')
    (tmp_path / "assets/images").mkdir()
    (tmp_path / "assets/images/a.png").write_bytes(b"png")
    (tmp_path / "README.md").write_text("[t](assets/docs/tools.md) [w](https://example.org) [s](#s)\n")
    assert builder.stage() == ["index.md", "tools.md", "examples/train/shop/index.md"]
    staged = tmp_path / "build/docs"
    assert (staged / "index.md").read_text() == "[t](tools.md) [w](https://example.org) [s](#s)\n"
    assert (staged / "examples/train/shop/index.md").read_text() == "[t](../../../tools.md#a) [c](cpu.yaml)\n"
    assert (staged / "examples/train/shop/cpu.yaml").is_file()
    # An <img> is relative to the page's address, tools/index.html.
    assert (staged / "tools.md").read_text() == '<img src="../images/a.png">\n```\n[code](no/link)\n```\n'
    assert (staged / "images/a.png").is_file()


@pytest.mark.parametrize("link", ["missing.md", "../../../outside.md", "../docs"])
def test_a_link_to_no_file_is_an_error(builder: ModuleType, tmp_path: Path, link: str) -> None:
    (tmp_path / "assets/docs/tools.md").write_text(f"[x]({link})\n")
    with pytest.raises(ValueError, match=r"assets/docs/tools\.md: the link .* leads to no file"):
        builder.stage()


def test_every_page_has_one_place_in_the_navigation(builder: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - Start:\n      - index.md\n      - A tool: tools.md\n")
    builder.check_navigation(["index.md", "tools.md"])
    with pytest.raises(ValueError, match=r"check training\.md"):
        builder.check_navigation(["index.md", "tools.md", "training.md"])
    with pytest.raises(ValueError, match=r"check tools\.md"):
        builder.check_navigation(["index.md"])


@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="Zensical (extra docs) is not installed")
def test_the_site_is_built_without_warnings() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/build_docs.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "build/site"
    page = (site / "reference/index.html").read_text("utf-8")
    entries = re.findall(r"^::: (\S+)$", (ROOT / "assets/docs/reference.md").read_text(), re.MULTILINE)
    assert entries
    assert not [entry for entry in entries if f'id="{entry}"' not in page]
    loaded = re.findall(
        r'<(?:script|img|link)[^>]*(?:src|href)="?(https?:[^" >]+)', (site / "index.html").read_text("utf-8")
    )
    assert not loaded, "the site loads nothing from other hosts"

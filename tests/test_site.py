"""The documentation as a site: it builds without a warning, names the whole public API, and loads nothing from the internet."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentfly

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'agentfly[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_of_the_docs_is_in_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_the_api_reference_has_every_public_name(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    anchors = {found.rpartition(".")[2] for found in re.findall(r'id="(agentfly[\w.]*)"', text)}
    missing = set(agentfly.__all__) - anchors - {"__version__"}
    assert not missing


def test_the_pages_load_nothing_from_the_internet(site: Path) -> None:
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*src="(https?:[^"]*)"', text)
        loaded += re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="(https?:[^"]*)"', text)
        assert not loaded, path.name


def test_the_search_index_finds_a_word_of_the_docs(site: Path) -> None:
    assert "resource manager" in (site / "search" / "search_index.js").read_text(encoding="utf-8").lower()

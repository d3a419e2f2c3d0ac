"""The files of the dashboard without a browser: vendored hashes, syntax, pure functions, and what the policy forbids."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "src/agentfly/view/static"
MODULES = sorted((STATIC / "js").rglob("*.js"))
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node on PATH: apt-get install nodejs")


def test_the_vendored_files_are_those_of_the_list() -> None:
    listed = json.loads((STATIC / "vendor/vendor.json").read_text())
    known = {package["name"]: package for package in listed["packages"]}
    hashes = {each["file"]: each["sha256"] for each in listed["files"]}
    there = {path.name for path in (STATIC / "vendor").iterdir()} - {"vendor.json", "LICENSES.txt"}
    assert set(hashes) == there
    for file, expected in hashes.items():
        assert hashlib.sha256((STATIC / "vendor" / file).read_bytes()).hexdigest() == expected, f"{file} was changed by hand"
    licences = (STATIC / "vendor/LICENSES.txt").read_text(encoding="utf-8")
    for each in listed["files"]:
        for name in each["packages"]:
            assert known[name]["licence"] in ("MIT", "Apache-2.0")
            assert f"{name} {known[name]['version']}" in licences


def test_modules_are_small_and_import_files_that_exist() -> None:
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 300, f"{path.name} is longer than 300 lines"
        for target in re.findall(r"""(?:from|import) ["'](\.[^"']+)["']""", text):
            assert (path.parent / target).resolve().is_file(), f"{path.name} imports {target}"


def test_nothing_writes_html_or_runs_text() -> None:
    """Texts of models reach the page through text nodes alone."""
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySetInnerHTML|\beval\(|new Function|srcdoc"
    )
    for path in MODULES:
        assert not forbidden.search(path.read_text(encoding="utf-8")), path.name


def test_the_page_has_no_inline_code_and_no_foreign_address() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=|https?://", page)
    for target in re.findall(r'(?:src|href)="/static/([^"]+)"', page):
        assert (STATIC / target).is_file(), target
    for path in [*(STATIC / "css").glob("*.css"), STATIC / "vendor/uplot.css"]:
        assert not re.search(r"@import|https?://|url\(", path.read_text(encoding="utf-8")), path.name


def test_the_first_page_is_small() -> None:
    """Everything that the list of runs loads, compressed; and all files of all pages."""
    import gzip

    names = ["main", "lib", "api", "router", "parts", "format", "theme", "keys", "icons", "pages/runs"]
    files = [STATIC / "index.html", STATIC / "vendor/preact.js", *(STATIC / "css").glob("*.css")]
    files += [STATIC / f"js/{name}.js" for name in names]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < 60_000
    everything = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html", ".svg")]
    assert sum(len(gzip.compress(path.read_bytes())) for path in everything) < 125_000


def test_git_and_the_wheel_leave_no_file_out() -> None:
    ignored = subprocess.run(
        ["git", "check-ignore", *map(str, (path for path in STATIC.rglob("*") if path.is_file()))],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ignored.stdout == ""


@needs_node
def test_every_module_is_valid() -> None:
    """One process parses them all; `node --check` would need one for each."""
    assert NODE is not None
    parse = """import fs from 'fs'; import vm from 'vm';
        for (const path of process.argv.slice(1)) new vm.SourceTextModule(fs.readFileSync(path, 'utf8'), {identifier: path});"""
    checked = subprocess.run(
        [NODE, "--experimental-vm-modules", "--input-type=module", "-e", parse, "--", *map(str, MODULES)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr


@needs_node
def test_the_pure_functions() -> None:
    assert NODE is not None
    ran = subprocess.run(
        [NODE, "--test", str(Path(__file__).with_name("pure.test.mjs"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert re.search(r"pass [1-9]\d*", ran.stdout)

"""Hooks of MkDocs that make the site complete in itself.

The pages are read in two places. In the repository a link to a file outside docs/ opens the file; in the built site there is no
such page, so the link becomes plain text. The theme loads one script from the internet, for the search in pages that are opened
from the disk; the site uses the copy in docs/assets.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.resolve()
SHIM = "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    folder = (DOCS / page.file.src_path).parent

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if target.is_relative_to(DOCS):
            return found[0]
        if not target.exists():
            raise ValueError(f"{page.file.src_path} links to {found[2]}, which does not exist")
        return f"{found[1]} (`{target.relative_to(DOCS.parent).as_posix()}`)"

    return LINK.sub(replaced, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page that it has rendered."""
    up = "../" * page.url.count("/")
    return output.replace(SHIM, f"{up}assets/iframe-worker.js")

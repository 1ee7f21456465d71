"""For mkdocs: the pages that stand at the top of the checkout, where a code host looks for them, are in the site, too.

So a link such as ``../SECURITY.md`` leads somewhere on both.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# By their names at the top, what they are called in the site; "README.md" would be its home.
TOP = {
    "README.md": "overview.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the top."""
    top = Path(config.config_file_path).parent
    for name, page in TOP.items():
        if (top / name).is_file():
            files.append(File.generated(config, page, content=(top / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to where their pages are in the site."""
    where = {page: name for name, page in TOP.items()}
    source = where.get(page.file.src_uri, posixpath.join("docs", page.file.src_uri))

    def in_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if source.startswith("docs/") and target.startswith("docs/"):
            return link[0]
        target = TOP.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}{link[2] or ''})"

    return _LINK.sub(in_site, markdown)

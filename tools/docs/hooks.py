"""What mkdocs does beside its own: files outside docs/, and one look at each page.

On the forge a page of docs/ links to `../CONTRIBUTING.md` or shows
`../benchmarks/results/h200.svg`, and CONTRIBUTING.md links to `docs/...`. On the site
both folders are one.
"""

from __future__ import annotations

import re
from pathlib import Path

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/results/*.svg")
BLOCKS = ("ul", "ol", "li", "table", "tr", "pre", "blockquote", "img", "h2", "h3")
log = get_plugin_logger(__name__)
# The beginning of a link's target, in Markdown or in an HTML attribute.
LINK = r'(\]\(|\b(?:src|href)=")'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warns where the site's Markdown makes something else of a page than the forge's.

    Python-Markdown wants four spaces for what belongs to an item of a list, and an
    empty line before a list; CommonMark does not.
    """
    name, text = page.file.src_uri, page.markdown or ""
    if "\n::: " in text:  # made of docstrings, of which the forge shows nothing
        if "<strong>" in html:
            log.warning("Doc file '%s': ** in a docstring wants backticks", name)
        return html
    forge = MarkdownIt("commonmark").enable("table").render(text)
    for tag in BLOCKS:
        here, there = (len(re.findall(f"<{tag}[ >]", x)) for x in (html, forge))
        if here != there:
            told = "Doc file '%s' has %d <%s> on the site, %d on the forge"
            log.warning(told, name, here, tag, there)
    return html


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    outside = page.file.generated_by is not None
    # The site's README.md is that of docs/: a link to the other one is told as broken.
    folder = "docs/" if outside else r"\.\./(?!README\.md)"
    return re.sub(LINK + folder, r"\1", markdown)

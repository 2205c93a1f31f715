"""What mkdocs does beside its own: files outside docs/ that its pages link to.

On the forge a page of docs/ links to `../CONTRIBUTING.md` or shows
`../benchmarks/results/h200.svg`, and CONTRIBUTING.md links to `docs/...`. On the site
both folders are one.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/results/*.svg")
# The beginning of a link's target, in Markdown or in an HTML attribute.
LINK = r'(\]\(|\b(?:src|href)=")'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    outside = page.file.generated_by is not None
    # The site's README.md is that of docs/: a link to the other one is told as broken.
    folder = "docs/" if outside else r"\.\./(?!README\.md)"
    return re.sub(LINK + folder, r"\1", markdown)

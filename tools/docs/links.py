"""Checks the documents' links to elsewhere: `python -m tools.docs.links`.

Needs a network. A page that is gone (404, 410) is an error. What else a server answers
to a program, or a server that is not reached, is listed and is none.
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from markdown_it import MarkdownIt
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
GONE = (404, 410)
URL = re.compile(r"https?://[^\s<>\"'`)\]]+[^\s<>\"'`)\].,;:]")


def main(argv: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs.links", description=summary
    )
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds")
    args = parser.parse_args(argv)
    links = collect([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda url: ask(url, args.timeout), links))
    table = Table("link", "named in", "answer")
    for (url, files), answer in zip(links.items(), answers, strict=True):
        table.add_row(url, ", ".join(files), answer)
    Console().print(table)
    return 1 if any(answer.startswith("gone") for answer in answers) else 0


def collect(pages: Sequence[Path]) -> dict[str, list[str]]:
    """URL -> the pages that name it, code and examples left out."""
    links: dict[str, list[str]] = {}
    for page in sorted(pages):
        for url in dict.fromkeys(_urls(page.read_text(encoding="utf-8"))):
            links.setdefault(url, []).append(page.name)
    return links


def _urls(text: str) -> Iterator[str]:
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if isinstance(target, str) and URL.fullmatch(target):
                yield target
            elif child.type == "text":
                yield from URL.findall(child.content)


def ask(url: str, timeout: float) -> str:
    """What a server says to a request for the page, in words."""
    request = urllib.request.Request(url, headers={"User-Agent": "zyfa-jax docs"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return str(response.status)
    except urllib.error.HTTPError as error:
        return f"{'gone' if error.code in GONE else 'refused'}: {error.code}"
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        return f"not reached: {getattr(error, 'reason', error)}"


if __name__ == "__main__":
    sys.exit(main())

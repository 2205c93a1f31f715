"""The documents: their code runs, and what they name is there."""

import re
import runpy
import shlex
import sys
import threading
import tomllib
import types
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import yaml
from markdown_it import MarkdownIt

import zyfa_jax
from tools.docs import links, pictures

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
CODE = [page for page in PAGES if "```python" in page.read_text()]
SKIP = re.compile(r"<!-- not run: .{10,} -->\s*")
SHELL = ("bash", "sh", "")
# What a path in this repository begins with.
FOLDERS = "zyfa_jax|csrc|tools|tests|benchmarks|examples|docs|cmake|\\.ci"


def name(page):
    return page.relative_to(ROOT).as_posix()


def pages(of=PAGES):
    return pytest.mark.parametrize("page", of, ids=name)


def tokens(page) -> Iterator:
    """Of Markdown, with those of each line's content in their places."""
    parser = MarkdownIt("commonmark").enable("table")
    for token in parser.parse(page.read_text()):
        yield token
        yield from token.children or ()


def python_blocks(page) -> Iterator[tuple[int, str]]:
    """The line each begins at, and its code."""
    previous = None
    for token in tokens(page):
        if token.type == "fence" and token.info == "python":
            skipped = previous is not None and SKIP.fullmatch(previous.content)
            if not skipped:
                yield token.map[0] + 1, token.content
        previous = token


@pages(CODE)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("__main__")
    for line, code in python_blocks(page):
        exec(compile("\n" * line + code, name(page), "exec"), vars(module))


def test_code_is_found_and_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n\n<!-- not run: needs another library -->\n"
        "```python\n1 / 0\n```\n\n- in a list\n\n  ```python\n  y = x\n  ```\n"
    )
    assert list(python_blocks(page)) == [(1, "x = 1\n"), (12, "y = x\n")]


# ---- Commands


def commands(page) -> Iterator[list[str]]:
    for token in tokens(page):
        if token.type == "code_inline":
            texts = [token.content]
        elif token.type == "code_block" or (
            token.type == "fence" and token.info in SHELL
        ):
            texts = token.content.replace("\\\n", " ").splitlines()
        else:
            continue
        for text in texts:
            if re.search(r"(^|\s)(python|pytest|pip)\s", text):
                for part in text.split("&&"):
                    words = shlex.split(part, comments=True)
                    while words and "=" in words[0]:  # an environment variable
                        words = words[1:]
                    yield words


class Parsed(Exception):
    pass


def parse(monkeypatch, words: list[str]) -> None:
    """Runs a Python command line up to the end of its options' parsing."""
    original = ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        original(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", words[words[0] == "-m" :])
    monkeypatch.chdir(ROOT)
    run = runpy.run_module if words[0] == "-m" else runpy.run_path
    with warnings.catch_warnings():
        # Other tests have imported what runs here once more.
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        with pytest.raises(Parsed):
            run(sys.argv[0], run_name="__main__")


def ours(words: list[str]) -> bool:
    module = words[1].partition(".")[0] if words[0] == "-m" else words[0]
    return (ROOT / module).exists()


PYTHON = sorted(
    {
        shlex.join(words[1:])
        for page in PAGES
        for words in commands(page)
        if words[:1] == ["python"]
        and len(words) > 1 + words.count("-m") + 1
        and ours(words[1:])
    }
)


@pytest.mark.parametrize("command", PYTHON)
def test_a_command_takes_its_options(command, monkeypatch):
    try:
        parse(monkeypatch, shlex.split(command))
    except ModuleNotFoundError as error:
        if (ROOT / str(error.name).partition(".")[0]).exists():
            raise
        pytest.skip(f"needs {error.name}, of another extra")


def test_commands_are_found():
    assert len(PYTHON) > 10
    assert "-m benchmarks accuracy" in PYTHON


@pytest.mark.parametrize("command", ["-m zyfa_jax chekc", "-m benchmarks cpu --tokn 1"])
def test_a_wrong_command_is_told(command, monkeypatch):
    with pytest.raises(SystemExit):
        parse(monkeypatch, shlex.split(command))


@pages()
def test_markers_extras_and_files_of_commands_are_there(page):
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    markers = project["tool"]["pytest"]["ini_options"]["markers"]
    markers = {marker.partition(":")[0] for marker in markers}
    extras = set(project["project"]["optional-dependencies"])
    for words in commands(page):
        if words[:1] == ["pytest"]:
            if "-m" in words:
                assert words[words.index("-m") + 1] in markers, words
            for word in words:
                assert "/" not in word or (ROOT / word).exists(), word
        if words[:1] == ["pip"]:
            for word in words:
                for found in re.findall(r"^(?:\.|zyfa-jax)\[(.*)\]$", word):
                    assert set(found.split(",")) <= extras, word


# ---- What a page names


@pages()
def test_links_and_pictures_are_there(page):
    for token in tokens(page):
        target = token.attrGet("href") or token.attrGet("src")
        if not isinstance(target, str) or urlsplit(target).scheme:
            continue
        path = unquote(urlsplit(target).path)
        file = page.parent / path if path else page
        assert file.exists(), target
        if token.type == "image":
            assert token.content, f"{target} has no text for those who cannot see it"
            assert file.stat().st_size < 300_000, target


@pages()
def test_paths_are_there(page):
    for token in tokens(page):
        if token.type == "code_inline" and re.fullmatch(
            rf"({FOLDERS})/[\w./*-]+", token.content
        ):
            assert any(ROOT.glob(token.content.rstrip("/"))), token.content


def nav(entries) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from nav([value] if isinstance(value, str) else value)


def test_the_sites_navigation_has_every_page():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(nav(config["nav"]))
    root = ("CONTRIBUTING.md", "CHANGELOG.md")
    assert sorted(listed) == sorted([*(x.name for x in ROOT.glob("docs/*.md")), *root])


def test_the_index_has_every_page():
    linked = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/README.md").read_text()))
    assert linked | {"README.md"} == {x.name for x in ROOT.glob("docs/*.md")}


def test_the_api_page_has_everything_public():
    page = (ROOT / "docs/api.md").read_text()
    listed = set(re.findall(r"^::: zyfa_jax\.(\w+)$", page, re.M))
    public = {
        name
        for name, value in vars(zyfa_jax).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert listed - {"reference"} == public


# ---- The tools


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(int(self.path[1:]))
            self.end_headers()

        def log_message(self, format, *args):
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_links_that_are_gone_are_an_error(server, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    monkeypatch.setattr(links, "ROOT", tmp_path)
    page.write_text(f"[here]({server}/200), <{server}/403>, `{server}/404`")
    assert links.main([]) == 0
    printed = capsys.readouterr().out
    assert "200" in printed
    assert "refused: 403" in printed
    page.write_text(f"| a |\n|---|\n| {server}/404. |\n")
    assert links.main([]) == 1
    assert "gone: 404" in capsys.readouterr().out
    server_that_is_not = "http://127.0.0.1:1/"
    assert links.ask(server_that_is_not, timeout=5).startswith("not reached: ")


def test_pictures_of_the_numerics_show_what_they_should(tmp_path, capsys):
    assert pictures.main(["--folder", str(tmp_path)]) == 0
    assert "quadratic term" in capsys.readouterr().out
    for drawn in tmp_path.iterdir():
        assert (pictures.FOLDER / drawn.name).exists()
    far = {}
    for name, (_, y) in pictures.block_scale().curves.items():
        far[name] = np.asarray(y)[-1]
        assert "scale" not in name or np.max(y) < 0.04
    assert far["P in [0, 1]"] == far["P times 2^8, one maximum"] == 1
    curves = pictures.before_rounding().curves
    errors = {name: np.abs(y).max() for name, (_, y) in curves.items()}
    assert errors["quadratic term"] < errors["two chords"] < 1.01
    assert 2 < errors["linear"] < 4
    linear, exact, _ = (np.asarray(y) for _, y in pictures.octave().curves.values())
    assert np.abs(linear - exact).max() == 1 / 16  # a step of e4m3

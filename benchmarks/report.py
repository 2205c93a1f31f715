"""What every benchmark's report and picture have in common.

A report is JSON: its format, the command and its options, the versions, the device, and
then what the benchmark found.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

import zyfa_jax
from zyfa_jax import _check

from . import plot

FORMAT = 1
"""Of the reports: goes up where a reader of them would have to change."""

NOT_OPTIONS = ("run", "json", "picture")


def positive(text: str) -> int:
    """The type of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="where a report goes")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG, SVG or PDF")


def check(args: argparse.Namespace) -> None:
    """Says before anything is measured what could not be written after.

    Raises:
      SystemExit: a folder is missing, or as `plot.check`.
    """
    for file in (args.json, args.picture):
        if file is not None and not file.parent.is_dir():
            raise SystemExit(f"there is no folder {file.parent} for {file.name}")
    if args.picture is not None:
        plot.check(args.picture)


def missing(peers: Mapping[str, str], console: Console) -> dict[str, str]:
    """{peer: why it takes no part}, of those that cannot be imported; told as well.

    Args:
      peers: name -> module.
      console: where it is told.
    """
    reasons = {}
    for name, module in peers.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # of whatever kind another package raises
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            line = f"{name} takes no part: {reason}"
            console.print(line, highlight=False, markup=False)
            reasons[name] = reason
    return reasons


def write(command: str, args: argparse.Namespace, device: Any, **found: Any) -> None:
    """Writes the report of `python -m benchmarks COMMAND`, if one is asked for.

    Args:
      command: its name.
      args: its options, of which `json` says where.
      device: JAX's, on which it ran.
      **found: the rest, of JSON's types.
    """
    if args.json is None:
        return
    options = {
        name: str(x) if isinstance(x, Path) else x
        for name, x in vars(args).items()
        if name not in NOT_OPTIONS
    }
    report = {
        "format": FORMAT,
        "command": f"benchmarks {command}",
        "options": options,
        **_check.environment(device),
        "zyfa_jax": zyfa_jax.__version__,
        **found,
    }
    args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")

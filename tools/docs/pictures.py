"""Draws what docs/numerics.md shows: `python -m tools.docs.pictures`.

The codes are those of `zyfa_jax.reference.fp8_softmax_block`, which every kernel gives:
nothing is measured, and every machine draws the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import plot
from zyfa_jax.reference import KEY_BLOCK, fp8_softmax_block

if TYPE_CHECKING:
    from jaxtyping import Float

FOLDER = Path(__file__).parents[2] / "docs/pictures"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
TOP = 8
"""The row's largest key is coded as 2**TOP."""

LINEAR, QUADRATIC, CHORDS = "linear", "quadratic term", "two chords"
CODES: dict[str, dict[str, Any]] = {
    LINEAR: {"quadratic": False},
    QUADRATIC: {"quadratic": True},
    CHORDS: {"quadratic": False, "chord_keys": KEY_BLOCK},
}
EXACT = "2^u, rounded to e4m3"


def main(argv: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs.pictures", description=summary
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    note = "By definition (zyfa_jax.reference); not measured."
    plot.save(
        args.folder / "probabilities.svg",
        "A probability without an exponential",
        [octave(), before_rounding()],
        note,
    )
    plot.save(
        args.folder / "block_scale.svg",
        "A block of keys far below the row's maximum",
        [block_scale()],
        f"{note} Logits of a block: up to 4 octaves below its own maximum.",
    )
    Console().print(table())
    return 0


def probabilities(
    t: Float[np.ndarray, " n"], maximum: float = 0.0, **code: Any
) -> Float[np.ndarray, " n"]:
    """2**t as codes have it, of logits in log2 at or below the row's maximum."""
    rows = np.resize(t, (-(-len(t) // KEY_BLOCK), KEY_BLOCK)).astype(np.float32)
    codes, shift, *_ = fp8_softmax_block(
        rows,
        np.ones(rows.shape, bool),
        np.ones(len(rows), np.float32),
        np.full(len(rows), maximum, np.float32),
        **code,
    )
    values = codes.view(E4M3).astype(np.float64)
    return (values * 2.0 ** -(TOP + shift[:, None])).ravel()[: len(t)]


def rounded(x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    return x.astype(E4M3).astype(np.float64)


def octave() -> plot.Curves:
    t = np.linspace(-1, 0, 1024)
    curves = {
        LINEAR: probabilities(t, **CODES[LINEAR]),
        EXACT: rounded(2.0 ** (t + TOP)) / 2**TOP,
        "2^u": 2.0**t,
    }
    return plot.Curves(
        "One octave below the row's maximum: the numbers that codes stand for",
        "probability",
        "u: logit in log2, less the row's maximum",
        {name: (t, y) for name, y in curves.items()},
    )


def before_rounding() -> plot.Curves:
    """The curves that are rounded to codes, as docs/numerics.md defines them."""
    u = np.linspace(0, 1, 257)[:-1]
    curves = {
        LINEAR: _number(u - 0.45 / 8),
        QUADRATIC: _number(u - 0.3437 * u * (1 - u)),
        CHORDS: _number(u) + _number(u + 0.5) / np.sqrt(2),
    }
    # A factor that all have is taken out by the division by the row's sum.
    errors = {
        name: 100 * (y / 2**u / np.mean(y / 2**u) - 1) for name, y in curves.items()
    }
    return plot.Curves(
        "Before rounding to e4m3, whose steps are 6 to 12 %",
        "error, % (common factor taken out)",
        "u, over one octave",
        {name: (u - 1, y) for name, y in errors.items()},
    )


def _number(x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The floating-point number whose bits are linear in x: chords below 2**x."""
    exponent = np.floor(x)
    return 2**exponent * (1 + x - exponent)


def block_scale() -> plot.Curves:
    distances = np.arange(0, 30.25, 0.5)
    within = -np.linspace(0, 4, KEY_BLOCK)
    errors: dict[str, list[float]] = {
        "P in [0, 1]": [],
        "P times 2^8, one maximum": [],
        "linear code, block scale": [],
        "quadratic term, block scale": [],
    }
    for distance in distances:
        t = within - distance
        exact = 2.0**t
        for of_method, p in zip(
            errors.values(),
            (
                rounded(exact),
                rounded(exact * 2**TOP) / 2**TOP,
                probabilities(t, **CODES[LINEAR]),
                probabilities(t, **CODES[QUADRATIC]),
            ),
            strict=True,
        ):
            of_method.append(float(np.linalg.norm(p - exact) / np.linalg.norm(exact)))
    return plot.Curves(
        "Error of the block's probabilities",
        "relative error",
        "the block's maximum below the row's, octaves",
        {name: (distances, y) for name, y in errors.items()},
        log=True,
    )


def table() -> Table:
    """Errors of codes over an octave, their mean taken out, as the row's sum does."""
    u = np.linspace(-1, 0, 4 * KEY_BLOCK, endpoint=False)
    found = Table("probability", title="Error of codes over an octave, in %")
    for column in ("mean", "rms about it", "largest about it"):
        found.add_column(column, justify="right")
    values = {name: probabilities(u, **code) for name, code in CODES.items()}
    values[EXACT] = rounded(2.0 ** (u + TOP)) / 2**TOP
    for name, p in values.items():
        error = 100 * (p / 2.0**u - 1)
        about = error - error.mean()
        cells = (error.mean(), np.sqrt(np.mean(about**2)), np.abs(about).max())
        found.add_row(name, *(f"{x:.2f}" for x in cells))
    return found


if __name__ == "__main__":
    sys.exit(main())

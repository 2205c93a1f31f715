"""Prefill of a model from a folder: `python -m examples.models FOLDER`."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress, track
from rich.table import Table

from .decoder import Decoder
from .errors import InputError
from .prefill import prefill
from .prompt import Prompt, read_prompt
from .sharding import AXES, make_mesh
from .weights import load


def parse_mesh(text: str) -> dict[str, int]:
    """`heads=8,tokens=1` as a dict."""
    try:
        pairs = [(name, int(size)) for name, size in _pairs(text)]
    except ValueError:
        pairs = [("", 0)]
    sizes = dict(pairs)
    once = len(sizes) == len(pairs)
    if not once or not set(sizes) <= set(AXES) or min(sizes.values()) < 1:
        raise argparse.ArgumentTypeError(
            f"a mesh is written heads=N,tokens=N, not {text!r}"
        )
    return sizes


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = [part.split("=") for part in text.split(",")]
    return [(name, size) for name, size in parts]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.models",
        description="Prefill of a Mistral, Qwen3 or DeepSeek-V2 model.",
    )
    add = parser.add_argument
    add("folder", type=Path, help="config.json, *.safetensors, perhaps tokenizer.json")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the prompt")
    text.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file of it")
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help="the prompt's first N tokens; without a prompt N random ones (512)",
    )
    add(
        "--precision",
        choices=("bf16", "fp8", "int8"),
        default="bf16",
        help="of attention",
    )
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of parameters and activations; with --precision bf16 of attention too",
    )
    add("--chunk", type=positive, metavar="N", help="tokens at once (all)")
    add(
        "--mesh",
        type=parse_mesh,
        default={},
        metavar="heads=N,tokens=N",
        help="devices over heads and over the sequence (1 and 1)",
    )
    add(
        "--random-weights",
        action="store_true",
        help="random numbers in place of the weights, to measure speed",
    )
    add("--top", type=positive, default=5, metavar="N", help="next tokens shown (5)")
    add("--repeats", type=positive, default=1, metavar="N", help="timed runs (1)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> None:
    mesh = make_mesh(**options.mesh) if options.mesh else None
    model = load(
        options.folder,
        dtype=jnp.dtype(options.dtype),
        precision=None if options.precision == "bf16" else options.precision,
        mesh=mesh,
        random=options.random_weights,
        progress=lambda parameters: track(
            parameters,
            "weights",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ),
    )
    prompt = read_prompt(
        options.folder,
        model.config.vocabulary,
        text=options.prompt,
        file=options.prompt_file,
        length=options.tokens,
    )
    describe(console, model, options, mesh)
    tokens = np.asarray([prompt.tokens], np.int32)
    logits, seconds = timed_prefill(
        console, model, tokens, chunk=options.chunk, repeats=options.repeats
    )
    first, *others = seconds
    best = min(others)
    console.print(
        f"{tokens.size} tokens: {first:.2f} s with compilation, then {best:.3f} s, "
        f"{tokens.size / best:.0f} tokens/s"
    )
    console.print(f"memory: {memory()}")
    console.print(next_tokens(prompt, logits, options.top))


def describe(
    console: Console, model: Decoder, options: argparse.Namespace, mesh: Mesh | None
) -> None:
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    count = sum(x.size for x in parameters)
    size = sum(x.nbytes for x in parameters)
    precision = options.precision
    attention = options.dtype if precision == "bf16" else precision.upper()
    where = "one device" if mesh is None else f"mesh {dict(mesh.shape)}"
    console.print(
        f"{model.config.architecture}, {model.config.layers} layers, {count:,} "
        f"parameters in {options.dtype}, {decimal(size)}; attention in {attention}; "
        f"{where} of {jax.devices()[0].device_kind}"
    )


def timed_prefill(
    console: Console,
    model: Decoder,
    tokens: np.ndarray,
    *,
    chunk: int | None,
    repeats: int,
) -> tuple[np.ndarray, list[float]]:
    """Logits (vocabulary,), and the seconds of each run; the first one compiles."""
    seconds = []
    logits: Any = None
    with Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        for run in range(repeats + 1):
            name = f"prefill {run} of {repeats}" if run else "compilation"
            task = progress.add_task(name, total=tokens.size)
            begin = time.perf_counter()
            logits = np.asarray(
                prefill(
                    model,
                    tokens,
                    chunk=chunk,
                    on_chunk=lambda count, task=task: progress.update(
                        task, advance=count
                    ),
                )
            )
            seconds.append(time.perf_counter() - begin)
    return logits[0], seconds


def memory() -> str:
    """The largest use of the devices' memory, or of the process's where they share."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(device.get("peak_bytes_in_use", 0) for device in stats)
    if peak:
        return f"at most {decimal(peak)} on a device"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"at most {decimal(peak)} in the process"


def next_tokens(prompt: Prompt, logits: np.ndarray, count: int) -> Table:
    table = Table("next token", "text", "logit", "probability")
    probabilities = np.asarray(jax.nn.softmax(jnp.asarray(logits)))
    for token in np.argsort(-logits)[:count]:
        table.add_row(
            str(token),
            prompt.text_of(int(token)),
            f"{logits[token]:.3f}",
            f"{probabilities[token]:.2%}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for a folder, prompt or mesh that cannot be run."""
    options = parse_arguments(arguments)
    try:
        run(options, Console())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

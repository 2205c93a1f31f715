"""How rotary frequencies are scaled for contexts longer than those trained on."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float32, Float64


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor`: position interpolation, arXiv:2306.15595."""

    factor: float

    def __post_init__(self):
        _check_positive(self)

    @property
    def amplitude(self) -> float:
        return 1.0

    def apply(
        self, frequencies: Float64[np.ndarray, "n"], theta: float
    ) -> Float64[np.ndarray, "n"]:
        del theta
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: slow channels are divided by `factor`, fast ones left as they are.

    A channel's speed is its turns within the original context: below
    `low_freq_factor` of them it is slow, above `high_freq_factor` fast, and between
    the two in proportion.

    Attributes:
      factor: what positions of slow channels are divided by.
      low_freq_factor: turns below which a channel is slow.
      high_freq_factor: turns above which it is fast.
      original_max_positions: tokens of the context trained on at first.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self):
        _check_positive(self)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                "Llama3Scaling takes low_freq_factor below high_freq_factor, not "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )

    @property
    def amplitude(self) -> float:
        return 1.0

    def apply(
        self, frequencies: Float64[np.ndarray, "n"], theta: float
    ) -> Float64[np.ndarray, "n"]:
        del theta
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        fast = (turns - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return _mix(frequencies / self.factor, frequencies, fast)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN's, Peng et al., arXiv:2309.00071: as Llama 3.1's, in proportion to channels.

    The channels that make `beta_fast` turns within the original context and more stay
    as they are, those that make `beta_slow` and fewer are divided by `factor`, and the
    ones between in proportion to their index.

    Attributes:
      factor: what positions of slow channels are divided by.
      original_max_positions: tokens of the context trained on at first.
      beta_fast: turns of the first channel that is scaled.
      beta_slow: turns of the last channel that is not scaled fully.
      attention_factor: what rotated queries and keys are multiplied by; by default
        `yarn_amplitude(factor)`, as in the paper. (DeepSeek-V2 takes the quotient of
        `yarn_amplitude(factor, mscale)` and `yarn_amplitude(factor, mscale_all_dim)`,
        and multiplies its softmax scale by the latter squared.)
      truncate: whether those two channels are rounded outwards to whole indices.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        _check_positive(self)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                "YarnScaling takes beta_fast not below beta_slow, not "
                f"{self.beta_fast} and {self.beta_slow}"
            )

    @property
    def amplitude(self) -> float:
        if self.attention_factor is None:
            return yarn_amplitude(self.factor)
        return self.attention_factor

    def apply(
        self, frequencies: Float64[np.ndarray, "n"], theta: float
    ) -> Float64[np.ndarray, "n"]:
        channels = len(frequencies)
        first, last = (
            self._channel(turns, channels, theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * channels - 1)
        # An empty range is a step.
        slow = (np.arange(channels) - first) / max(last - first, 1e-3)
        return _mix(frequencies, frequencies / self.factor, slow)

    def _channel(self, turns: float, channels: int, theta: float) -> float:
        """The (fractional) channel that makes `turns` within the original context."""
        wavelength = self.original_max_positions / turns
        return channels * math.log(wavelength / (2 * math.pi)) / math.log(theta)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN multiplies queries and keys: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def frequencies(
    theta: float, dim: int, scaling: RopeScaling | None = None
) -> Float32[np.ndarray, "dim/2"]:
    """Radians per token of each pair of channels: theta ** (-2 i / dim), scaled.

    Raises:
      ValueError: for a theta or a scaling that is none.
    """
    if not _is_positive(theta):
        raise ValueError(f"rotary embeddings take a positive theta, not {theta!r}")
    if not isinstance(scaling, RopeScaling | None):
        raise ValueError(
            "rotary embeddings take a scaling of zyfa_jax.flax.rope or None, not "
            f"{scaling!r}"
        )
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    scaled = plain if scaling is None else scaling.apply(plain, theta)
    return scaled.astype(np.float32)


def _mix(
    start: np.ndarray, end: np.ndarray, share: np.ndarray
) -> Float64[np.ndarray, "n"]:
    """From `start` to `end` as `share` goes from 0 to 1, and no further."""
    share = np.clip(share, 0.0, 1.0)
    return start * (1 - share) + end * share


def _check_positive(scaling: RopeScaling) -> None:
    for name, value in dataclasses.asdict(scaling).items():
        if name == "truncate" or (name == "attention_factor" and value is None):
            continue
        if not _is_positive(value):
            raise ValueError(
                f"{type(scaling).__name__} takes a positive {name}, not {value!r}"
            )


def _is_positive(value: Any) -> bool:
    """Whether it is a number, Python's or NumPy's, above 0 and finite."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and 0 < float(value) < math.inf

"""Attention for Flax nnx: an attention function, and modules of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from . import _attention_fn, _fold, _functional
from ._functional import Precision, Window

if TYPE_CHECKING:
    from flax.typing import Dtype, Initializer
    from jaxtyping import Array, Float, Int

    from .._attention import Implementation
    from .cache import KeyValueCache
    from .rope import RopeScaling

_Layer = TypeVar("_Layer", bound=nnx.Module)

_default_kernel_init = nnx.initializers.lecun_normal()
_default_bias_init = nnx.initializers.zeros_init()


def make_attention_fn(
    *,
    causal: bool = False,
    precision: Precision = None,
    window: Window = None,
    scale: Any = None,
    implementation: Implementation | None = None,
    rotated: bool = False,
) -> Callable[..., jax.Array]:
    """An `attention_fn` for `flax.nnx.MultiHeadAttention`.

    The function takes what that module passes, with `flax.nnx`'s meaning: query i of a
    causal call sees the keys up to i. Its softmax is always in float32, and float32
    inputs are multiplied in full precision, whatever `precision` the module is given.

    A mask is taken if its values are known when the function is traced and it is causal
    or all true; `is_causal=True` needs none. Any other mask, a bias, active dropout and
    sowing of the attention weights raise NotImplementedError.

    Args:
      causal: whether attention is causal without a mask or `is_causal`.
      precision: None computes in the dtype of the inputs; "fp8" quantizes them per
        head, keys centred over tokens, and "int8" by `zyfa_jax.quantize_qkv`; both let
        gradients straight through the rounding.
      window: as in `zyfa_jax.attention`.
      scale: what logits are multiplied by; 1 / sqrt(head dim) by default.
      implementation: as in `zyfa_jax.attention`.
      rotated: whether the module's weights come from `fold_rotation`. Changes "int8"
        alone, which then neither rotates nor balances.

    Raises:
      ValueError: if precision is something else.
    """
    _functional.check_precision(precision)
    attention_precision = precision

    def attention_fn(
        query: Float[Array, "*b t h d"],
        key: Float[Array, "*b s k d"],
        value: Float[Array, "*b s k e"],
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Dtype | None = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        promote_dtype: Callable[..., Any] = promote_dtype,
        is_causal: bool = False,
        input_positions: Array | None = None,
    ) -> Float[Array, "*b t h e"]:
        """`zyfa_jax.attention` for `flax.nnx`; see `make_attention_fn`."""
        del broadcast_dropout, dropout_rng, precision
        _attention_fn.refuse_dropout(dropout_rate, deterministic)
        _attention_fn.refuse(bias=bias, module=module, input_positions=input_positions)
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        return _attention_fn.call(
            query,
            key,
            value,
            mask=mask,
            causal=causal or is_causal,
            precision=attention_precision,
            rotated=rotated,
            window=window,
            scale=scale,
            implementation=implementation,
            hint="give is_causal=True or use make_attention_fn(causal=True)",
        )

    return attention_fn


attention_fn = make_attention_fn()
"""`make_attention_fn()`: causal with is_causal or a causal mask, as Flax's own."""


class GroupedQueryAttention(nnx.Module):
    """Self-attention with grouped heads and rotary embeddings, over whole sequences.

    Its parts are `query`, `key`, `value`, `out` (each a LinearGeneral) and, with
    qk_norm, `query_norm` and `key_norm` (RMSNorm over the head dim, before the
    rotation).

    Args:
      num_heads: query heads.
      in_features: features of the input.
      num_kv_heads: key/value heads, a divisor of num_heads; num_heads by default.
      head_dim: by default in_features / num_heads.
      out_features: features of the output; in_features by default.
      rope_theta: base of the rotary embeddings, which rotate channel i against channel
        i + head_dim / 2; None leaves them out.
      rope_scaling: how the rotary frequencies are scaled for long contexts, of
        `zyfa_jax.flax.rope`; None for not at all.
      qk_norm: whether queries and keys are normalised per head.
      norm_epsilon: added to the mean square in those norms.
      causal: whether a token sees no later one.
      window: how many tokens are seen beside the own one, as in `zyfa_jax.attention`.
      scale: what logits are multiplied by; 1 / sqrt(head_dim) by default.
      use_bias: whether the projections add a bias.
      dtype: dtype of the computation; by default inferred from input and parameters.
      param_dtype: dtype of the parameters.
      precision: None attends in `dtype`; "fp8" in FP8 and "int8" with int8 queries and
        keys, with gradients straight through the rounding (see `make_attention_fn`).
        The projections stay in `dtype`.
      kernel_init: initializer of the projections.
      bias_init: initializer of their biases.
      implementation: as in `zyfa_jax.attention`.
      attention: called in place of `zyfa_jax.attention`, with its arguments; for
        sequences that are spread over devices.
      rotated: whether the weights come from `fold_rotation`. Changes "int8" alone,
        which then neither rotates nor balances.
      rngs: random keys for the parameters.

    Raises:
      ValueError: for heads or dims that do not go together.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        *,
        rope_theta: float | None = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        qk_norm: bool = False,
        norm_epsilon: float = 1e-6,
        causal: bool = True,
        window: Window = None,
        scale: float | None = None,
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = _default_kernel_init,
        bias_init: Initializer = _default_bias_init,
        implementation: Implementation | None = None,
        attention: Callable[..., Any] | None = None,
        rotated: bool = False,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _functional.check_heads(num_heads, num_kv_heads)
        _functional.check_precision(precision)
        head_dim = head_dim or _functional.default_head_dim(in_features, num_heads)
        linear = functools.partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        self.query = linear(in_features, (num_heads, head_dim))
        self.key = linear(in_features, (num_kv_heads, head_dim))
        self.value = linear(in_features, (num_kv_heads, head_dim))
        self.out = linear(
            (num_heads, head_dim), out_features or in_features, axis=(-2, -1)
        )
        self.query_norm = self.key_norm = nnx.data(None)
        if qk_norm:
            norm = functools.partial(
                nnx.RMSNorm,
                epsilon=norm_epsilon,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )
            self.query_norm = norm(head_dim)
            self.key_norm = norm(head_dim)
        self.qk_norm = qk_norm
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.causal = causal
        self.window = window
        self.scale = scale
        self.precision: Precision = precision
        self.implementation = implementation
        self.attention = attention
        self.rotated = rotated
        if rotated:
            _projections(self)

    @overload
    def __call__(
        self,
        inputs: Float[Array, "*b s f"],
        *,
        positions: Int[Array, "*b s"] | None = None,
        lengths: Int[Array, "*b"] | None = None,
        cache: None = None,
    ) -> Float[Array, "*b s o"]: ...

    @overload
    def __call__(
        self,
        inputs: Float[Array, "*b s f"],
        *,
        positions: Int[Array, "*b s"] | None = None,
        lengths: Int[Array, "*b"] | None = None,
        cache: KeyValueCache,
    ) -> tuple[Float[Array, "*b s o"], KeyValueCache]: ...

    def __call__(
        self,
        inputs: Float[Array, "*b s f"],
        *,
        positions: Int[Array, "*b s"] | None = None,
        lengths: Int[Array, "*b"] | None = None,
        cache: KeyValueCache | None = None,
    ) -> Any:
        """Applies attention to `inputs`.

        Args:
          inputs: (batch..., tokens, features), any number of batch axes.
          positions: integers that broadcast to (batch..., tokens), for the rotary
            embeddings alone; by default 0 .. tokens - 1, after those of the cache.
          lengths: integers that broadcast to (batch...): how many tokens of each
            sequence there are. Later ones are padding: not seen, and attention gives
            zeros for them.
          cache: the tokens before `inputs`, which are its next ones. They are seen as
            well.

        Returns:
          (batch..., tokens, out_features). With a cache, a pair of it and the cache
          with these tokens in it.

        Raises:
          ValueError: for dims or arguments that do not go together.
        """
        q, k, v = self.query(inputs), self.key(inputs), self.value(inputs)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        x, cache = _functional.grouped_attention(
            self, q, k, v, positions=positions, lengths=lengths, cache=cache
        )
        x = self.out(x)
        return x if cache is None else (x, cache)


class MultiHeadLatentAttention(nnx.Module):
    """Multi-head latent attention in its prefill form: DeepSeek-V2, arXiv:2405.04434.

    Keys and values are projected up from one latent vector per token, and attention
    runs on whole heads (192 channels of q and k and 128 of v by default), causal.

    Its parts are `query`, or `query_down`, `query_norm`, `query_up` with q_lora_rank;
    `kv_down` (the latent, then the rotary key that all heads share), `kv_norm`, `kv_up`
    (for each head its key channels without rotation, then its value); `out`.

    DeepSeek's checkpoints rotate neighbouring channels; here channel i is rotated
    against channel i + qk_rope_head_dim / 2, so the rotary columns of theirs are to be
    reordered: even ones first, then odd ones.

    Args:
      num_heads: heads.
      in_features: features of the input.
      kv_lora_rank: channels of the latent vector of keys and values.
      q_lora_rank: channels of the latent vector of queries; None projects directly.
      qk_nope_head_dim: channels of a query or key head that are not rotated.
      qk_rope_head_dim: channels that are.
      v_head_dim: channels of a value head.
      out_features: features of the output; in_features by default.
      rope_theta: base of the rotary embeddings.
      rope_scaling: how the rotary frequencies are scaled for long contexts, of
        `zyfa_jax.flax.rope`; None for not at all.
      norm_epsilon: added to the mean square in the norms of the latent vectors.
      scale: what logits are multiplied by; 1 / sqrt(channels of a query head) by
        default.
      dtype: dtype of the computation; by default inferred from input and parameters.
      param_dtype: dtype of the parameters.
      precision: None attends in `dtype`; "fp8" in FP8 and "int8" with int8 queries and
        keys, with gradients straight through the rounding (see `make_attention_fn`).
        The projections stay in `dtype`.
      kernel_init: initializer of the projections.
      implementation: as in `zyfa_jax.attention`.
      attention: called in place of `zyfa_jax.attention`, with its arguments; for
        sequences that are spread over devices.
      rotated: whether the weights come from `fold_rotation`. Changes "int8" alone,
        which then rotates only the channels with rotary embeddings, and balances none.
      rngs: random keys for the parameters.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        kv_lora_rank: int = 512,
        q_lora_rank: int | None = None,
        *,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        out_features: int | None = None,
        rope_theta: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        norm_epsilon: float = 1e-6,
        scale: float | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = _default_kernel_init,
        implementation: Implementation | None = None,
        attention: Callable[..., Any] | None = None,
        rotated: bool = False,
        rngs: nnx.Rngs,
    ):
        _functional.check_precision(precision)
        linear = functools.partial(
            nnx.LinearGeneral,
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        norm = functools.partial(
            nnx.RMSNorm,
            epsilon=norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        q_heads = (num_heads, qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank is None:
            self.query = linear(in_features, q_heads)
        else:
            self.query_down = linear(in_features, q_lora_rank)
            self.query_norm = norm(q_lora_rank)
            self.query_up = linear(q_lora_rank, q_heads)
        self.kv_down = linear(in_features, kv_lora_rank + qk_rope_head_dim)
        self.kv_norm = norm(kv_lora_rank)
        self.kv_up = linear(kv_lora_rank, (num_heads, qk_nope_head_dim + v_head_dim))
        self.out = linear(
            (num_heads, v_head_dim), out_features or in_features, axis=(-2, -1)
        )
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.scale = scale
        self.precision: Precision = precision
        self.implementation = implementation
        self.attention = attention
        self.rotated = rotated

    @overload
    def __call__(
        self,
        inputs: Float[Array, "*b s f"],
        *,
        positions: Int[Array, "*b s"] | None = None,
        lengths: Int[Array, "*b"] | None = None,
        cache: None = None,
    ) -> Float[Array, "*b s o"]: ...

    @overload
    def __call__(
        self,
        inputs: Float[Array, "*b s f"],
        *,
        positions: Int[Array, "*b s"] | None = None,
        lengths: Int[Array, "*b"] | None = None,
        cache: KeyValueCache,
    ) -> tuple[Float[Array, "*b s o"], KeyValueCache]: ...

    def __call__(
        self,
        inputs: Float[Array, "*b s f"],
        *,
        positions: Int[Array, "*b s"] | None = None,
        lengths: Int[Array, "*b"] | None = None,
        cache: KeyValueCache | None = None,
    ) -> Any:
        """Applies attention to `inputs`; arguments as in `GroupedQueryAttention`."""
        if self.q_lora_rank is None:
            q = self.query(inputs)
        else:
            q = self.query_up(self.query_norm(self.query_down(inputs)))
        x, cache = _functional.latent_attention(
            self,
            q,
            self.kv_down(inputs),
            self.kv_norm,
            self.kv_up,
            positions=positions,
            lengths=lengths,
            cache=cache,
        )
        x = self.out(x)
        return x if cache is None else (x, cache)


def fold_rotation(layer: _Layer, *sample: Any) -> _Layer:
    """A copy of a layer whose queries and keys come out rotated.

    The kernels, and biases, of the projections to queries and keys are multiplied by
    the Hadamard matrix of `zyfa_jax.quantize_qkv`, head by head, so that it need not
    rotate. Attention's logits are the same, up to the weights' rounding to their dtype.

    Layers of this module come back with `rotated` set. To Flax's own set
    `attention_fn = make_attention_fn(precision="int8", rotated=True)`.

    Of latent attention the channels without rotary embeddings are rotated so.

    Args:
      layer: a `GroupedQueryAttention` without rope_theta and qk_norm, a
        `MultiHeadLatentAttention` or a `flax.nnx.MultiHeadAttention` without
        normalize_qk: what lies between projections and attention elsewhere does not
        commute with the rotation.
      *sample: what the layer may be called with, such as some of a model's activations.
        Channels are then balanced as well, by the powers of two that `quantize_qkv`
        finds for the queries and keys of this call; else they are not.

    Raises:
      ValueError: for another layer, one with something in between, or one that is
        rotated already.
    """
    to = _projections(layer)
    if getattr(layer, "rotated", False):
        raise ValueError(
            "fold_rotation takes a layer whose weights are not yet rotated"
        )
    exponents: Any = None, None
    if sample:
        record = _fold.Recorder()
        recorded: Any = nnx.clone(layer)
        if isinstance(layer, nnx.MultiHeadAttention):
            recorded.attention_fn = record
            recorded.decode, recorded.dropout_rate = False, 0.0
        else:
            recorded.attention, recorded.precision = record, None
        recorded(*sample)
        exponents = _fold.exponents(record.q, record.k, to.channels)
    folded: Any = nnx.clone(layer)
    for name, exponent in zip((to.query, to.key), exponents, strict=True):
        linear = getattr(folded, name)
        for weight in (linear.kernel, linear.bias):
            if weight is not None:
                weight[...] = _fold.fold(weight[...], to.channels, exponent)
    if not isinstance(layer, nnx.MultiHeadAttention):
        folded.rotated = True
    return folded


def _projections(layer: Any) -> _fold.Projections:
    return _fold.projections(
        layer, GroupedQueryAttention, MultiHeadLatentAttention, nnx.MultiHeadAttention
    )

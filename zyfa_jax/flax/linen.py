"""Attention for Flax linen: an attention function, and modules of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

from . import _attention_fn, _fold, _functional
from ._functional import Precision, Window

if TYPE_CHECKING:
    from flax.typing import Dtype, Initializer
    from jaxtyping import Array, Float, Int

    from .._attention import Implementation
    from .cache import KeyValueCache
    from .rope import RopeScaling

_default_kernel_init = nn.initializers.lecun_normal()
_default_bias_init = nn.initializers.zeros_init()


def make_attention_fn(
    *,
    causal: bool = False,
    precision: Precision = None,
    window: Window = None,
    scale: Any = None,
    implementation: Implementation | None = None,
    rotated: bool = False,
) -> Callable[..., jax.Array]:
    """An `attention_fn` for `flax.linen.MultiHeadDotProductAttention`.

    The function takes what that module passes, with `flax.linen`'s meaning: query i of
    a causal call sees the keys up to i. Its softmax is always in float32, and float32
    inputs are multiplied in full precision, whatever `precision` and
    `force_fp32_for_softmax` the module is given.

    A mask is taken if its values are known when the function is traced and it is causal
    or all true. Any other mask, a bias, active dropout, replaced einsums and sowing of
    the attention weights raise NotImplementedError.

    Args:
      causal: whether attention is causal without a mask.
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
        key: Float[Array, "*b s h d"],
        value: Float[Array, "*b s h e"],
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Dtype | None = None,
        precision: Any = None,
        module: nn.Module | None = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
    ) -> Float[Array, "*b t h e"]:
        """`zyfa_jax.attention` for `flax.linen`; see `make_attention_fn`."""
        del broadcast_dropout, dropout_rng, precision, force_fp32_for_softmax
        _attention_fn.refuse_dropout(dropout_rate, deterministic)
        _attention_fn.refuse(
            bias=bias,
            module=module,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        query, key, value = promote_dtype(query, key, value, dtype=dtype)
        return _attention_fn.call(
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            precision=attention_precision,
            rotated=rotated,
            window=window,
            scale=scale,
            implementation=implementation,
            hint="use make_attention_fn(causal=True)",
        )

    return attention_fn


attention_fn = make_attention_fn()
"""`make_attention_fn()`: causal only with a causal mask, as Flax's own function."""


class GroupedQueryAttention(nn.Module):
    """Self-attention with grouped heads and rotary embeddings, over whole sequences.

    Parameters: `query`, `key`, `value`, `out` (each a DenseGeneral) and, with qk_norm,
    `query_norm` and `key_norm` (RMSNorm over the head dim, before the rotation).

    Attributes:
      num_heads: query heads.
      num_kv_heads: key/value heads, a divisor of num_heads; num_heads by default.
      head_dim: by default features / num_heads.
      out_features: features of the output; those of the input by default.
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
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    rope_theta: float | None = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    norm_epsilon: float = 1e-6
    causal: bool = True
    window: Window = None
    scale: float | None = None
    use_bias: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: Precision = None
    kernel_init: Initializer = _default_kernel_init
    bias_init: Initializer = _default_bias_init
    implementation: Implementation | None = None
    attention: Callable[..., Any] | None = None
    rotated: bool = False

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

    @nn.compact
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
          ValueError: for heads, dims or arguments that do not go together.
        """
        num_kv_heads = (
            self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        )
        _functional.check_heads(self.num_heads, num_kv_heads)
        if self.rotated:
            _projections(self)
        features = inputs.shape[-1]
        head_dim = self.head_dim or _functional.default_head_dim(
            features, self.num_heads
        )
        dense = functools.partial(
            nn.DenseGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        q = dense((self.num_heads, head_dim), name="query")(inputs)
        k = dense((num_kv_heads, head_dim), name="key")(inputs)
        v = dense((num_kv_heads, head_dim), name="value")(inputs)
        if self.qk_norm:
            norm = functools.partial(
                nn.RMSNorm,
                epsilon=self.norm_epsilon,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
            )
            q = norm(name="query_norm")(q)
            k = norm(name="key_norm")(k)
        x, cache = _functional.grouped_attention(
            self, q, k, v, positions=positions, lengths=lengths, cache=cache
        )
        x = dense(self.out_features or features, axis=(-2, -1), name="out")(x)
        return x if cache is None else (x, cache)


class MultiHeadLatentAttention(nn.Module):
    """Multi-head latent attention in its prefill form: DeepSeek-V2, arXiv:2405.04434.

    Keys and values are projected up from one latent vector per token, and attention
    runs on whole heads (192 channels of q and k and 128 of v by default), causal.

    Parameters: `query`, or `query_down`, `query_norm`, `query_up` with q_lora_rank;
    `kv_down` (the latent, then the rotary key that all heads share), `kv_norm`, `kv_up`
    (for each head its key channels without rotation, then its value); `out`.

    DeepSeek's checkpoints rotate neighbouring channels; here channel i is rotated
    against channel i + qk_rope_head_dim / 2, so the rotary columns of theirs are to be
    reordered: even ones first, then odd ones.

    Attributes:
      num_heads: heads.
      kv_lora_rank: channels of the latent vector of keys and values.
      q_lora_rank: channels of the latent vector of queries; None projects directly.
      qk_nope_head_dim: channels of a query or key head that are not rotated.
      qk_rope_head_dim: channels that are.
      v_head_dim: channels of a value head.
      out_features: features of the output; those of the input by default.
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
    """

    num_heads: int
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    out_features: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    scale: float | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: Precision = None
    kernel_init: Initializer = _default_kernel_init
    implementation: Implementation | None = None
    attention: Callable[..., Any] | None = None
    rotated: bool = False

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

    @nn.compact
    def __call__(
        self,
        inputs: Float[Array, "*b s f"],
        *,
        positions: Int[Array, "*b s"] | None = None,
        lengths: Int[Array, "*b"] | None = None,
        cache: KeyValueCache | None = None,
    ) -> Any:
        """Applies attention to `inputs`; arguments as in `GroupedQueryAttention`."""
        dense = functools.partial(
            nn.DenseGeneral,
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
        )
        norm = functools.partial(
            nn.RMSNorm,
            epsilon=self.norm_epsilon,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
        q_heads = (self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            q = dense(q_heads, name="query")(inputs)
        else:
            latent = dense(self.q_lora_rank, name="query_down")(inputs)
            q = dense(q_heads, name="query_up")(norm(name="query_norm")(latent))
        down = dense(self.kv_lora_rank + self.qk_rope_head_dim, name="kv_down")(inputs)
        kv_heads = (self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        x, cache = _functional.latent_attention(
            self,
            q,
            down,
            norm(name="kv_norm"),
            dense(kv_heads, name="kv_up"),
            positions=positions,
            lengths=lengths,
            cache=cache,
        )
        features = self.out_features or inputs.shape[-1]
        x = dense(features, axis=(-2, -1), name="out")(x)
        return x if cache is None else (x, cache)


def fold_rotation(
    layer: nn.Module, variables: Mapping[str, Any], *sample: Any
) -> dict[str, Any]:
    """The variables of a layer whose queries and keys come out rotated.

    The kernels, and biases, of the projections to queries and keys are multiplied by
    the Hadamard matrix of `zyfa_jax.quantize_qkv`, head by head, so that it need not
    rotate: give them to a layer with `rotated=True`, or with an attention function that
    has it. Attention's logits are the same, up to the weights' rounding to their dtype,
    with `rotated` or without.

    Of latent attention the channels without rotary embeddings are rotated so.

    Args:
      layer: a `GroupedQueryAttention` without rope_theta and qk_norm, a
        `MultiHeadLatentAttention` or a `flax.linen.MultiHeadDotProductAttention`
        without normalize_qk: what lies between projections and attention elsewhere does
        not commute with the rotation.
      variables: of this layer, with "params".
      *sample: what the layer may be called with, such as some of a model's activations.
        Channels are then balanced as well, by the powers of two that `quantize_qkv`
        finds for the queries and keys of this call; else they are not.

    Returns:
      A copy of `variables`, for the same layer.

    Raises:
      ValueError: for another layer, or one with something in between.
    """
    to = _projections(layer)
    params = variables["params"]
    if not {to.query, to.key} <= params.keys():
        raise ValueError(
            f"fold_rotation takes the variables of the layer itself, with params "
            f"{to.query!r} and {to.key!r}, got {sorted(params)}"
        )
    exponents: Any = None, None
    if sample:
        record = _fold.Recorder()
        if isinstance(layer, nn.MultiHeadDotProductAttention):
            recorded = layer.clone(attention_fn=record, dropout_rate=0.0)
        else:
            recorded = layer.clone(attention=record, precision=None)
        recorded.apply(variables, *sample)
        exponents = _fold.exponents(record.q, record.k, to.channels)
    folded = {
        name: jax.tree.map(lambda x, e=e: _fold.fold(x, to.channels, e), params[name])
        for name, e in zip((to.query, to.key), exponents, strict=True)
    }
    return {**variables, "params": {**params, **folded}}


def _projections(layer: Any) -> _fold.Projections:
    return _fold.projections(
        layer,
        GroupedQueryAttention,
        MultiHeadLatentAttention,
        nn.MultiHeadDotProductAttention,
    )

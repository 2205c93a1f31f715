"""What `python -m benchmarks cuda` times, each found when it runs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zyfa_jax

from .calls import Call, Case, Given, Tensor, descales_of, jax_nn, tensors_of
from .shapes import BF16, FP8, INT8, SHORT

# XLA's own holds them in float32, more than once.
MOST_LOGIT_BYTES = 12 << 30
FP8_MAX = 448.0


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call on inputs that lie on the device.

    Attributes:
      call: gives the output, not awaited.
      out_scale: what the output is multiplied with.
    """

    call: Call
    out_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One kernel, or another's.

    Attributes:
      name: of whoever made it.
      dtype: of q, k and v.
      prepare: raises ImportError where there is no such thing here.
    """

    name: str
    dtype: str
    prepare: Callable[[Case, Given], Prepared]

    def __str__(self) -> str:
        return f"{self.name} {SHORT[self.dtype]}"

    @property
    def given_dtype(self) -> str:
        """Of what `prepare` is given: int8 is rounded there, from bfloat16."""
        return BF16 if self.dtype == INT8 else self.dtype

    @property
    def ours(self) -> bool:
        return self.name == "zyfa_jax"


def options_of(case: Case, given: Given) -> dict[str, Any]:
    return {"causal": case.causal, **descales_of(case, given)}


def _on_device(given: Given) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.asarray, given.arrays))


def _zyfa(case: Case, given: Given) -> Prepared:
    options = options_of(case, given)
    attention = jax.jit(functools.partial(zyfa_jax.attention, **options))
    return Prepared(functools.partial(attention, *_on_device(given)))


def _zyfa_int8(case: Case, given: Given) -> Prepared:
    """Rounded together, before the clock starts."""
    rounded = zyfa_jax.quantize_qkv(*_on_device(given))
    attention = jax.jit(functools.partial(zyfa_jax.attention, causal=case.causal))
    return Prepared(functools.partial(attention, *(x.detach() for x in rounded)))


def _cudnn_attention() -> Any:
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def _cudnn(case: Case, given: Given) -> Prepared:
    """By jax.nn, or, for values of another head dim, by what it calls."""
    _refuse_cpu("cuDNN")
    if case.head_dims[0] == case.head_dims[1]:
        attention = functools.partial(
            jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn"
        )
    else:
        cudnn = _cudnn_attention()
        attention = functools.partial(
            cudnn.dot_product_attention,
            scale=case.head_dims[0] ** -0.5,
            mask_type=cudnn.MaskType.CAUSAL if case.causal else cudnn.MaskType.NO_MASK,
        )
    return Prepared(functools.partial(jax.jit(attention), *_on_device(given)))


def _cudnn_fp8(case: Case, given: Given) -> Prepared:
    """Its probabilities are in [0, 1], and its output is in FP8."""
    _refuse_cpu("cuDNN")
    if case.head_dims[0] != case.head_dims[1]:
        raise ValueError("cuDNN's FP8 attention takes one head dim for keys and values")
    cudnn = _cudnn_attention()

    def number(x: float) -> jax.Array:
        return jnp.full((1, 1, 1, 1), x, jnp.float32)

    # No output exceeds the largest value.
    out_scale = FP8_MAX / (float(np.abs(given.arrays[2].astype(np.float32)).max())
                         * given.descales[2])  # fmt: skip
    parameters = dict.fromkeys(cudnn.fp8_params_keys, number(1.0)) | {
        "descale_q": number(given.descales[0]),
        "descale_k": number(given.descales[1]),
        "descale_v": number(given.descales[2]),
        "scale_s": number(256.0),
        "descale_s": number(1 / 256.0),
        "scale_o": number(out_scale),
    }

    @jax.jit
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, parameters: Any) -> Any:
        return cudnn.dot_product_attention(
            q, k, v, fp8_params=parameters, scale=case.head_dims[0] ** -0.5,
            mask_type=cudnn.MaskType.CAUSAL, use_fp8=True,
        )[0]  # fmt: skip

    call = functools.partial(attention, *_on_device(given), parameters)
    return Prepared(call, 1 / out_scale)


def _torch(case: Case, given: Given) -> Prepared:
    torch: Any = importlib.import_module("torch")
    backends: Any = importlib.import_module("torch.nn.attention")
    _refuse_cpu("torch's cuDNN")
    q, k, v = (x.transpose(1, 2) for x in tensors_of(torch, given))

    def attention() -> Any:
        with backends.sdpa_kernel(backends.SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=True
            )
        return Tensor(torch, out.transpose(1, 2))

    return Prepared(attention)


def _flash(case: Case, given: Given) -> Prepared:
    flash: Any = importlib.import_module("flash_attn3_jax")
    _refuse_cpu("FlashAttention-3")
    if case.head_dims != (128, 128):
        raise ValueError("flash-attn3-jax is built for head dim 128 alone")
    attention = jax.jit(functools.partial(flash.flash_mha, is_causal=case.causal))
    return Prepared(functools.partial(attention, *_on_device(given)))


def _pallas(case: Case, given: Given) -> Prepared:
    """In float16, and with queries scaled before: it has no scale of its own."""
    _refuse_cpu("Pallas")
    if case.head_dims[0] != case.head_dims[1]:
        raise ValueError("attention_mgpu takes one head dim for keys and values")
    pallas: Any = importlib.import_module(
        "jax.experimental.pallas.ops.gpu.attention_mgpu"
    )
    config = pallas.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=case.causal
    )
    q, k, v = (x.astype(jnp.float32) for x in _on_device(given))
    q = q * case.head_dims[0] ** -0.5
    arrays = [x.astype(jnp.float16) for x in (q, k, v)]

    @jax.jit
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out = pallas.attention(q, k, v, config)
        return out[0] if isinstance(out, tuple | list) else out

    return Prepared(functools.partial(attention, *arrays))


def _xla(case: Case, given: Given) -> Prepared:
    if case.logit_bytes > MOST_LOGIT_BYTES:
        raise ValueError(f"it would hold {case.logit_bytes / 2**30:.0f} GiB of logits")
    return Prepared(jax_nn(case, given))


def _refuse_cpu(what: str) -> None:
    if jax.default_backend() == "cpu":
        raise ImportError(f"{what} needs a GPU")


IMPLEMENTATIONS = (
    Implementation("zyfa_jax", FP8, _zyfa),
    Implementation("cuDNN", FP8, _cudnn_fp8),
    Implementation("zyfa_jax", INT8, _zyfa_int8),
    Implementation("zyfa_jax", BF16, _zyfa),
    Implementation("cuDNN", BF16, _cudnn),
    Implementation("torch cuDNN", BF16, _torch),
    Implementation("FlashAttention-3", BF16, _flash),
    Implementation("Pallas", BF16, _pallas),
    Implementation("XLA", BF16, _xla),
)

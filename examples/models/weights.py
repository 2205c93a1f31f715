"""Parameters from the tensors of a folder: their names, and how they are laid out."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from . import sharding
from .config import Config, GroupedHeads, LatentHeads, read_config
from .decoder import Decoder
from .errors import InputError
from .folder import Tensors


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a parameter comes from.

    Attributes:
      tensor: the tensor's name in the folder, "{}" standing for the expert.
      inputs: how many of the parameter's first axes are summed over. The folder's
        matrices are (outputs, inputs). 0 for one that is laid out as it is there.
      rotary: how many of the last channels are rotated as neighbouring pairs there;
        ours are rotated half against half.
      experts: how many tensors, one for each expert, are stacked; None for no stack.
    """

    tensor: str
    inputs: int = 0
    rotary: int = 0
    experts: int | None = None

    @property
    def tensors(self) -> list[str]:
        if self.experts is None:
            return [self.tensor]
        return [self.tensor.format(expert) for expert in range(self.experts)]

    def read(self, folder: Tensors, shape: tuple[int, ...]) -> np.ndarray:
        """The parameter, which is to be of `shape`."""
        if self.experts is None:
            return self._laid_out(folder, self.tensor, shape)
        return np.stack(
            [self._laid_out(folder, name, shape[1:]) for name in self.tensors]
        )

    def _laid_out(
        self, folder: Tensors, name: str, shape: tuple[int, ...]
    ) -> np.ndarray:
        if not self.inputs:
            return folder.read(name, shape)
        inputs, outputs = shape[: self.inputs], shape[self.inputs :]
        x = folder.read(name, (math.prod(outputs), math.prod(inputs)))
        x = x.T.reshape(shape)
        if not self.rotary:
            return x
        plain, pairs = np.split(x, [x.shape[-1] - self.rotary], axis=-1)
        return np.concatenate([plain, pairs[..., ::2], pairs[..., 1::2]], axis=-1)


def sources(config: Config) -> dict[str, Source]:
    """The source of every parameter, by its path: "layers/0/attention/query/kernel"."""
    found = {
        "embed/embedding": Source("model.embed_tokens.weight"),
        "norm/scale": Source("model.norm.weight"),
    }
    if not config.tied:
        found["head/kernel"] = Source("lm_head.weight", 1)
    for layer in range(config.layers):
        parts = {
            "attention_norm/scale": Source("input_layernorm"),
            "mlp_norm/scale": Source("post_attention_layernorm"),
            **_attention(config.attention),
            **_mlp(config, layer),
        }
        for path, part in parts.items():
            tensor = f"model.layers.{layer}.{part.tensor}.weight"
            found[f"layers/{layer}/{path}"] = dataclasses.replace(part, tensor=tensor)
    return found


def _attention(heads: GroupedHeads | LatentHeads) -> dict[str, Source]:
    if isinstance(heads, GroupedHeads):
        found = {
            "query/kernel": Source("q_proj", 1),
            "key/kernel": Source("k_proj", 1),
            "value/kernel": Source("v_proj", 1),
        }
        if heads.qk_norm:
            found["query_norm/scale"] = Source("q_norm")
            found["key_norm/scale"] = Source("k_norm")
    else:
        rotary = heads.qk_rope_head_dim
        found = {
            "kv_down/kernel": Source("kv_a_proj_with_mqa", 1, rotary),
            "kv_norm/scale": Source("kv_a_layernorm"),
            "kv_up/kernel": Source("kv_b_proj", 1),
        }
        if heads.q_lora_rank is None:
            found["query/kernel"] = Source("q_proj", 1, rotary)
        else:
            found["query_down/kernel"] = Source("q_a_proj", 1)
            found["query_norm/scale"] = Source("q_a_layernorm")
            found["query_up/kernel"] = Source("q_b_proj", 1, rotary)
    found["out/kernel"] = Source("o_proj", 2)
    return {
        f"attention/{path}": dataclasses.replace(
            part, tensor=f"self_attn.{part.tensor}"
        )
        for path, part in found.items()
    }


def _mlp(config: Config, layer: int) -> dict[str, Source]:
    kinds = ("gate", "up", "down")
    if config.experts is None or not config.has_experts(layer):
        return {f"mlp/{kind}/kernel": Source(f"mlp.{kind}_proj", 1) for kind in kinds}
    found = {"mlp/router": Source("mlp.gate", 1)}
    for kind in kinds:
        found[f"mlp/{kind}"] = Source(
            f"mlp.experts.{{}}.{kind}_proj", 1, experts=config.experts.count
        )
        found[f"mlp/shared/{kind}/kernel"] = Source(
            f"mlp.shared_experts.{kind}_proj", 1
        )
    return found


def load(
    folder: Path,
    *,
    dtype: Any = jnp.bfloat16,
    precision: Any = None,
    mesh: Mesh | None = None,
    random: bool = False,
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> Decoder:
    """The model in a folder, each parameter where it lies on the mesh.

    Args:
      folder: with config.json and the weights as safetensors.
      dtype: bfloat16 or float32, of parameters and computation.
      precision: None, "fp8" for attention in FP8, or "int8" with queries and keys in
        int8.
      mesh: as in `Decoder`.
      random: whether to take random numbers in place of weights, of which there need
        be none: to measure speed.
      progress: takes the list of parameters and gives them one by one.

    Raises:
      InputError: for a wrong or partial folder.
    """
    config = read_config(folder)
    model = nnx.eval_shape(
        lambda: Decoder(
            config, dtype=dtype, precision=precision, mesh=mesh, rngs=nnx.Rngs(0)
        )
    )
    graph, state = nnx.split(model)

    def fill(value: Callable[[str, tuple[int, ...], Any], Any]) -> Decoder:
        values = {}
        for path, variable in progress(list(nnx.to_flat_state(state))):
            name = "/".join(map(str, path))
            place = sharding.of_parameter(name, variable.shape, mesh)
            array = value(name, variable.shape, variable.dtype)
            values[path] = variable.replace(jax.device_put(array, place))
        return nnx.merge(graph, nnx.from_flat_state(values))

    if random:
        return fill(_random_value)
    where = sources(config)
    with Tensors(folder) as tensors:
        _check_names(folder, tensors.names, where.values(), config)
        return fill(
            lambda name, shape, dtype: (
                where[name].read(tensors, shape).astype(dtype, copy=False)
            )
        )


def _random_value(name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if name.endswith("/scale"):
        return jnp.ones(shape, dtype)
    key = jax.random.key(zlib.crc32(name.encode()))
    return jnp.asarray(0.02, dtype) * jax.random.normal(key, shape, dtype)


def _check_names(
    folder: Path, there: set[str], where: Iterable[Source], config: Config
) -> None:
    """Raises for tensors that are not there, and for those that would be ignored."""
    needed = {name for source in where for name in source.tensors}
    missing = sorted(needed - there)
    if missing:
        raise InputError(
            f"{len(missing)} of {len(needed)} tensors are not in {folder}: "
            f"{_some(missing)}"
        )
    # Older files keep the rotary frequencies, and some the tied matrix twice.
    ignored = {"lm_head.weight"} if config.tied else set()
    unknown = sorted(
        name
        for name in there - needed - ignored
        if not name.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise InputError(
            f"{folder} holds {len(unknown)} tensors that {config.architecture} with "
            f"{config.layers} layers does not have: {_some(unknown)}"
        )


def _some(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")

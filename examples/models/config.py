"""What a model is made of, from the config.json of Hugging Face's models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zyfa_jax.flax.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_amplitude,
)

from .errors import InputError
from .folder import read_json


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embeddings: their base, and how they are scaled for long contexts."""

    theta: float
    scaling: RopeScaling | None = None


@dataclasses.dataclass(frozen=True)
class GroupedHeads:
    """Grouped-query attention, as in Mistral and Qwen3.

    `windows` says for each layer how many tokens are seen, the own one included; None
    for all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    windows: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class LatentHeads:
    """Multi-head latent attention, as in DeepSeek-V2."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, in all layers but the first ones.

    A token goes to the `per_token` experts with the highest probabilities among those
    of its best `groups_per_token` groups of experts, and to the shared experts.
    """

    count: int
    per_token: int
    groups: int
    groups_per_token: int
    mlp_width: int
    shared_mlp_width: int
    routed_scale: float
    first_dense_layers: int


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder: embeddings, layers of attention and MLP with RMS norms, logits."""

    architecture: str
    vocabulary: int
    width: int
    layers: int
    mlp_width: int
    epsilon: float
    tied: bool
    """Whether the logits' matrix is the embeddings'."""
    rope: Rope
    attention: GroupedHeads | LatentHeads
    experts: Experts | None = None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.first_dense_layers


def read_config(folder: Path) -> Config:
    """The config of the model in a folder.

    Raises:
      InputError: for a folder without one, of another architecture, or with a setting
        that is not offered.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    fields = _Fields(read_json(folder / "config.json"))
    match fields.get("architectures"):
        case [str(architecture), *_] if architecture in ARCHITECTURES:
            pass
        case other:
            raise InputError(
                f"{folder / 'config.json'} has architectures={other!r}; offered are "
                f"{', '.join(ARCHITECTURES)}"
            )
    _refuse(
        fields,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        quantization_config=None,
    )
    return ARCHITECTURES[architecture](architecture, fields)


class _Fields:
    """The fields of config.json, with a clear error for what is not there or wrong."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self._values = values
        self._where = where

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or the default where it is null or not there."""
        value = self._values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._needed(name, default)
        if not isinstance(value, int) or value < least:
            raise InputError(
                f"{self._where} has {name}={value!r}, where a whole number from "
                f"{least} on is taken"
            )
        return value

    def even(self, name: str, default: int | None = None) -> int:
        value = self.whole(name, default)
        if value % 2:
            raise InputError(
                f"{self._where} has {name}={value}, where rotary embeddings take an "
                "even number"
            )
        return value

    def whole_or_none(self, name: str) -> int | None:
        return None if self.get(name) is None else self.whole(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._needed(name, default)
        if not isinstance(value, int | float) or value <= 0:
            raise InputError(
                f"{self._where} has {name}={value!r}, where a positive number is taken"
            )
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def part(self, name: str) -> _Fields:
        """The fields of an object in a field; none of them where it is not there."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise InputError(f"{self._where} has {name}={value!r}, which is no object")
        return _Fields(value, f"{name} in {self._where}")

    def _needed(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise InputError(f"{self._where} has no {name}")
        return value


def _refuse(fields: _Fields, **only: Any) -> None:
    for name, taken in only.items():
        got = fields.get(name, taken)
        if got != taken:
            raise InputError(
                f"config.json has {name}={got!r}; only {taken!r} is offered"
            )


def _common(architecture: str, fields: _Fields) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "vocabulary": fields.whole("vocab_size"),
        "width": fields.whole("hidden_size"),
        "layers": fields.whole("num_hidden_layers"),
        "mlp_width": fields.whole("intermediate_size"),
        "epsilon": fields.number("rms_norm_eps"),
        "tied": bool(fields.get("tie_word_embeddings", False)),
        "rope": _rope(fields),
    }


def _rope_fields(fields: _Fields) -> _Fields:
    """`rope_parameters`, or `rope_scaling` of earlier files."""
    return fields.part(
        "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    )


def _rope(fields: _Fields) -> Rope:
    rope = _rope_fields(fields)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_SCALINGS:
        raise InputError(
            f"config.json has rope scaling {kind!r}; offered are "
            f"{', '.join(_ROPE_SCALINGS)}"
        )
    try:
        return Rope(theta, _ROPE_SCALINGS[kind](rope))
    except InputError:
        raise
    except ValueError as error:  # settings that do not go together
        raise InputError(f"config.json: {error}") from None


def _linear(rope: _Fields) -> LinearScaling:
    return LinearScaling(rope.number("factor"))


def _llama3(rope: _Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.whole("original_max_position_embeddings"),
    )


def _yarn(rope: _Fields) -> YarnScaling:
    factor, amplitude = rope.number("factor"), rope.number_or_none("attention_factor")
    if amplitude is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        amplitude = yarn_amplitude(factor, rope.number("mscale"))
        amplitude /= yarn_amplitude(factor, rope.number("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_positions=rope.whole("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32),
        beta_slow=rope.number("beta_slow", 1),
        attention_factor=amplitude,
        truncate=bool(rope.get("truncate", True)),
    )


_ROPE_SCALINGS: dict[str, Callable[[_Fields], RopeScaling | None]] = {
    "default": lambda rope: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


_WHOLE, _WINDOWED = "full_attention", "sliding_attention"


def _grouped(
    fields: _Fields, *, qk_norm: bool, windows: tuple[int | None, ...]
) -> GroupedHeads:
    heads = fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"config.json has num_attention_heads={heads}, which is to be a multiple "
            f"of num_key_value_heads={kv_heads}"
        )
    return GroupedHeads(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.even("head_dim", fields.whole("hidden_size") // heads),
        qk_norm=qk_norm,
        windows=windows,
    )


def _mistral(architecture: str, fields: _Fields) -> Config:
    common = _common(architecture, fields)
    windows = (fields.whole_or_none("sliding_window"),) * common["layers"]
    return Config(**common, attention=_grouped(fields, qk_norm=False, windows=windows))


def _qwen3(architecture: str, fields: _Fields) -> Config:
    """Its window, if it is used, is that of the layers that `layer_types` names, or of
    those from `max_window_layers` on."""
    common = _common(architecture, fields)
    layers = common["layers"]
    window, first = None, layers
    kinds = fields.get("layer_types")
    if fields.get("use_sliding_window"):
        window = fields.whole("sliding_window")
        if kinds is None:
            first = fields.whole("max_window_layers", least=0)
    if kinds is None:
        kinds = [_WHOLE if i < first else _WINDOWED for i in range(layers)]
    offered = (_WHOLE,) if window is None else (_WHOLE, _WINDOWED)
    listed = isinstance(kinds, list) and len(kinds) == layers
    if not listed or any(kind not in offered for kind in kinds):
        raise InputError(
            f"config.json has layer_types={kinds!r}, where {layers} of "
            f"{', '.join(offered)} are taken"
        )
    windows = tuple(window if kind == _WINDOWED else None for kind in kinds)
    return Config(**common, attention=_grouped(fields, qk_norm=True, windows=windows))


def _deepseek_v2(architecture: str, fields: _Fields) -> Config:
    common = _common(architecture, fields)
    nope, rotary = fields.whole("qk_nope_head_dim"), fields.even("qk_rope_head_dim")
    scale = (nope + rotary) ** -0.5
    rope = _rope_fields(fields)
    if rope.get("mscale_all_dim"):
        factor, mscale = rope.number("factor"), rope.number("mscale_all_dim")
        scale *= yarn_amplitude(factor, mscale) ** 2
    attention = LatentHeads(
        heads=fields.whole("num_attention_heads"),
        q_lora_rank=fields.whole_or_none("q_lora_rank"),
        kv_lora_rank=fields.whole("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotary,
        v_head_dim=fields.whole("v_head_dim"),
        scale=scale,
    )
    experts = _experts(fields) if fields.get("n_routed_experts") else None
    return Config(**common, attention=attention, experts=experts)


def _experts(fields: _Fields) -> Experts:
    _refuse(fields, norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1)
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise InputError(
            f"config.json has topk_method={method!r}; offered are 'greedy' and "
            "'group_limited_greedy'"
        )
    limited = method == "group_limited_greedy"
    mlp_width = fields.whole("moe_intermediate_size")
    experts = Experts(
        count=fields.whole("n_routed_experts"),
        per_token=fields.whole("num_experts_per_tok"),
        groups=fields.whole("n_group") if limited else 1,
        groups_per_token=fields.whole("topk_group") if limited else 1,
        mlp_width=mlp_width,
        shared_mlp_width=mlp_width * fields.whole("n_shared_experts"),
        routed_scale=fields.number("routed_scaling_factor", 1.0),
        first_dense_layers=fields.whole("first_k_dense_replace", 0, least=0),
    )
    offered = experts.count // experts.groups * experts.groups_per_token
    if experts.count % experts.groups or not experts.per_token <= offered:
        raise InputError(
            f"config.json has {experts.per_token} of {experts.count} experts for each "
            f"token, from {experts.groups_per_token} of {experts.groups} groups"
        )
    return experts


ARCHITECTURES: dict[str, Callable[[str, _Fields], Config]] = {
    "MistralForCausalLM": _mistral,
    "Qwen3ForCausalLM": _qwen3,
    "DeepseekV2ForCausalLM": _deepseek_v2,
}

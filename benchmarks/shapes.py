"""The attention shapes of real models, as published, and the dtypes they are run in."""

from __future__ import annotations

import dataclasses

FP8, BF16, INT8 = "float8_e4m3fn", "bfloat16", "int8"
SHORT = {FP8: "FP8", BF16: "BF16", INT8: "INT8"}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's attention.

    Attributes:
      name: of the model.
      heads: query heads and key/value heads.
      head_dims: of queries and keys, and of values.
    """

    name: str
    heads: tuple[int, int]
    head_dims: tuple[int, int]

    def share(self, devices: int) -> Model:
        """What each of so many devices has of the heads; at least one of each kind."""
        heads, kv_heads = (max(x // devices, 1) for x in self.heads)
        return dataclasses.replace(self, heads=(heads, kv_heads))


MISTRAL_7B = Model("Mistral-7B", (32, 8), (128, 128))
QWEN3_8B = Model("Qwen3-8B", (32, 8), (128, 128))
# Latent attention as prefill computes it: every head with keys and values of its own.
DEEPSEEK_V2_LITE = Model("DeepSeek-V2-Lite", (16, 16), (192, 128))

"""`examples.models` beside the transformers package: the same weights, the same logits.

transformers makes small models with random weights and saves them; ours reads the
folder. Needs the extra `models-peer`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _flax_cases import relative

from examples import models

NEEDS = "is not installed: pip install '.[models-peer]'"
torch = pytest.importorskip("torch", reason=f"torch {NEEDS}")
transformers = pytest.importorskip("transformers", reason=f"transformers {NEEDS}")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCABULARY, TOKENS = 96, 37

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    # Large enough that attention is far from uniform.
    "initializer_range": 0.15,
}
GROUPED = {**SMALL, "head_dim": 128, "num_key_value_heads": 2}
LATENT = {
    **SMALL,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral window": ("Mistral", {**GROUPED, "sliding_window": 9}),
    "mistral linear": (
        "Mistral",
        {
            **GROUPED,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 1e4,
                "factor": 4.0,
            },
        },
    ),
    "mistral llama3": (
        "Mistral",
        {**GROUPED, "sliding_window": None, "rope_parameters": LLAMA3},
    ),
    "qwen3": ("Qwen3", GROUPED),
    "qwen3 yarn, tied, late window": (
        "Qwen3",
        {
            **GROUPED,
            "rope_parameters": YARN,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "deepseek": (
        "DeepseekV2",
        {
            **LATENT,
            "topk_method": "greedy",
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek groups, latent queries": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    folder: Path
    tokens: np.ndarray
    logits: np.ndarray
    """Of transformers, in float32."""
    bfloat16_error: float
    """Of transformers' own logits in bfloat16."""

    def load(self, mesh=None, **options):
        mesh = mesh and models.make_mesh(*mesh)
        return models.load(self.folder, mesh=mesh, **options)

    def prefill(self, model, chunk=None):
        logits = models.prefill(model, self.tokens, chunk=chunk, last_only=False)
        assert logits.dtype == jnp.float32
        assert logits.shape == self.logits.shape
        return np.asarray(logits)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    name, settings = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
        # Several files and an index.
        model.save_pretrained(folder, max_shard_size="500KB")
        tokens = np.random.default_rng(1).integers(VOCABULARY, size=(2, TOKENS))
        logits = model(torch.tensor(tokens)).logits.numpy()
        rounded = model.bfloat16()(torch.tensor(tokens)).logits.float().numpy()
    return Case(folder, tokens, logits, relative(rounded, logits))


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax's own layers promote dtypes implicitly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("mesh", [None, (8, 1), (2, 4)])
def test_float32(case, mesh):
    """Whole and in chunks, on one device and eight."""
    model = case.load(mesh, dtype=jnp.float32)
    errors = [relative(case.prefill(model, chunk), case.logits) for chunk in (None, 8)]
    print(f"errors {errors[0]:.1e} and, in chunks, {errors[1]:.1e}")
    assert max(errors) < 3e-6


@pytest.mark.parametrize(("mesh", "chunk"), [(None, None), (None, 16), ((2, 2), 16)])
def test_bfloat16(case, mesh, chunk):
    """As near to float32 as transformers is in bfloat16."""
    error = relative(case.prefill(case.load(mesh), chunk), case.logits)
    print(f"error {error:.4f}, of transformers {case.bfloat16_error:.4f}")
    assert error < 1.2 * case.bfloat16_error


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize(("mesh", "chunk"), [(None, 16), ((2, 2), None)])
def test_8_bits(case, mesh, chunk, precision):
    """Attention alone is in 8 bits: more than bfloat16's rounding, not much more."""
    model = case.load(mesh, precision=precision)
    error = relative(case.prefill(model, chunk), case.logits)
    print(f"error {error:.4f}")
    assert 1.5 * case.bfloat16_error < error < 0.15

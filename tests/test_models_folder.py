"""`examples.models` on folders written here: its errors, its command, its sharding."""

import collections
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _flax_cases import relative
from flax import nnx

for package in ("safetensors", "tokenizers", "rich"):
    pytest.importorskip(
        package, reason=f"{package} is not installed: pip install '.[models]'"
    )

import safetensors.numpy  # noqa: E402
import tokenizers  # noqa: E402

from examples import models  # noqa: E402
from examples.models import __main__ as command  # noqa: E402
from examples.models import moe, weights  # noqa: E402
from examples.models.config import Experts, GroupedHeads  # noqa: E402
from examples.models.prefill import init_caches, step  # noqa: E402

MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "sliding_window": 6,
    "rope_theta": 10_000.0,
}
DEEPSEEK: dict[str, Any] = {
    **MISTRAL,
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax's own layers promote dtypes implicitly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def save(folder: Path, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Writes config.json and random weights in one file; returns the weights."""
    (folder / "config.json").write_text(json.dumps(settings))
    config = models.read_config(folder)
    model = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
    sources = weights.sources(config)
    rng = np.random.default_rng(0)
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        source = sources["/".join(map(str, path))]
        shape = variable.shape if source.experts is None else variable.shape[1:]
        if source.inputs:
            inputs, outputs = shape[: source.inputs], shape[source.inputs :]
            shape = math.prod(outputs), math.prod(inputs)
        for name in source.tensors:
            tensor = 0.2 * rng.standard_normal(shape, np.float32)
            tensors[name] = tensor + 1 if "norm" in name else tensor
    write(folder, tensors)
    return tensors


def write(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def save_tokenizer(folder: Path) -> None:
    """A tokenizer with a token for each of the words a0, a1, ... of the vocabulary."""
    words = {f"a{i}": i for i in range(40)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def mistral(tmp_path):
    save(tmp_path, MISTRAL)
    return tmp_path


def run(capsys, *arguments):
    """The command's exit code, and what it printed to stdout and stderr."""
    try:
        code = command.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), " ".join(captured.err.split())


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        (MISTRAL, (), "512 tokens: "),
        (MISTRAL, ("--dtype", "float32", "--tokens", 9), "attention in float32"),
        (
            MISTRAL,
            ("--tokens", 30, "--chunk", 8, "--precision", "fp8", "--mesh", "heads=2"),
            "attention in FP8; mesh {'heads': 2, 'tokens': 1} of cpu",
        ),
        (
            MISTRAL,
            ("--tokens", 30, "--precision", "int8", "--mesh", "tokens=2"),
            "attention in INT8; mesh {'heads': 1, 'tokens': 2} of cpu",
        ),
        (DEEPSEEK, ("--tokens", 21, "--chunk", 8), "DeepseekV2ForCausalLM, 2 layers"),
    ],
)
def test_command(tmp_path, capsys, settings, arguments, said):
    save(tmp_path, settings)
    code, out, err = run(capsys, tmp_path, *arguments, "--top", 3)
    assert (code, err) == (0, "")
    assert said in out
    assert re.search(r"with compilation, then \d+\.\d+ s, \d+ tokens/s", out)
    assert re.search(r"memory: at most [\d.]+ [MG]B", out)
    assert len(re.findall(r"\d\.\d\d%", out)) == 3


def test_command_with_random_weights(tmp_path, capsys):
    """Needs a config alone, and gives another prediction than uniform."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    code, out, err = run(capsys, tmp_path, "--tokens", 9, "--random-weights")
    assert (code, err) == (0, "")
    assert "9 tokens: " in out
    assert len(set(re.findall(r"\d\.\d\d\d │", out))) > 1


def collectives(program: str) -> dict[str, int]:
    """How many there are of each kind, of floating-point numbers."""
    return collections.Counter(
        re.findall(
            r"= \(?(?:f32|bf16)\[.*? (all-\w+|collective-permute|reduce-scatter)\(",
            program,
        )
    )


@pytest.mark.parametrize(
    ("mesh", "settings", "chunked", "expected"),
    [
        # The embeddings, and the ends of attention and MLP in each layer.
        ((2, 1), MISTRAL, True, {"all-reduce": 5}),
        ((4, 1), DEEPSEEK, False, {"all-reduce": 5}),
        # Besides: keys and values, of each chunk and of the whole cache; last token.
        ((2, 4), MISTRAL, True, {"all-reduce": 6, "all-gather": 8}),
    ],
)
def test_collectives(tmp_path, mesh, settings, chunked, expected):
    """Nothing is gathered or reduced but what the mesh asks for."""
    save(tmp_path, settings)
    model = models.load(tmp_path, mesh=models.make_mesh(*mesh))
    graph, state = nnx.split(model)
    caches = init_caches(graph, state, 1, 64) if chunked else None
    tokens = jnp.zeros((1, 32), jnp.int32)
    program = step.lower(graph, state, tokens, caches, jnp.int32(3)).compile()
    assert collectives(program.as_text()) == expected


def test_command_on_text(mistral, capsys):
    """What the command prints is what the model says of the text's tokens."""
    save_tokenizer(mistral)
    text = mistral / "prompt.txt"
    text.write_text("a3 a1 a4 a1 a5 a9 a2 a6")
    model = models.load(mistral)
    logits = models.prefill(model, np.array([[3, 1, 4, 1, 5, 9]]))[0]
    best = int(np.argmax(logits))
    for arguments in (("--prompt-file", text), ("--prompt", text.read_text())):
        code, out, _ = run(capsys, mistral, *arguments, "--tokens", 6, "--top", 1)
        assert code == 0
        assert "6 tokens: " in out
        assert f"│ {best} │ 'a{best}' │ {logits[best]:.3f} │" in out


def remove(name):
    return lambda folder: (folder / name).unlink()


def settings(**changes):
    def change(folder):
        kept = {k: v for k, v in {**MISTRAL, **changes}.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def tensors(change):
    def apply(folder):
        held = safetensors.numpy.load_file(folder / "model.safetensors")
        change(held)
        write(folder, held)

    return apply


def shards(folder):
    """Two files and an index, the second file missing."""
    held = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {name: names[i % 2] for i, name in enumerate(held)}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    first = {name: x for name, x in held.items() if index[name] == names[0]}
    safetensors.numpy.save_file(first, folder / names[0])


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def spoil(name, text):
    return lambda folder: (folder / name).write_text(text)


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
WRONG = {
    "no config": (remove("config.json"), "there is no config.json in"),
    "config is no JSON": (spoil("config.json", "{"), r"config.json cannot be read"),
    "config is a list": (spoil("config.json", "[]"), "holds no JSON object"),
    "architecture": (
        settings(architectures=["GPT2LMHeadModel"]),
        r"architectures=\['GPT2LMHeadModel'\]; offered are MistralForCausalLM, ",
    ),
    "no architecture": (settings(architectures=None), "architectures=None; offered"),
    "architecture is no list": (settings(architectures=5), "architectures=5; offered"),
    "architecture is no text": (
        settings(architectures=[[]]),
        r"architectures=\[\[\]\]",
    ),
    "odd head dim": (settings(head_dim=5), "head_dim=5, where .* take an even number"),
    "setting missing": (settings(hidden_size=None), "config.json has no hidden_size"),
    "setting no number": (
        settings(hidden_size="32"),
        "hidden_size='32', where a whole number from 1 on is taken",
    ),
    "heads": (
        settings(num_key_value_heads=3),
        "num_attention_heads=4, which is to be a multiple of num_key_value_heads=3",
    ),
    "activation": (settings(hidden_act="gelu"), "hidden_act='gelu'; only 'silu'"),
    "bias": (settings(attention_bias=True), "attention_bias=True; only False"),
    "quantized": (
        settings(quantization_config={"quant_method": "fp8"}),
        "only None is offered",
    ),
    "rope": (
        settings(rope_scaling={"type": "longrope"}),
        "rope scaling 'longrope'; offered are default, linear, llama3, yarn",
    ),
    "rope without factor": (
        settings(rope_scaling={"type": "linear"}),
        "rope_scaling in config.json has no factor",
    ),
    "rope of no sense": (
        settings(rope_scaling={"type": "linear", "factor": -2}),
        "rope_scaling in config.json has factor=-2, where a positive number is taken",
    ),
    "rope settings that do not go together": (
        settings(
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 64,
                "beta_fast": 1,
                "beta_slow": 32,
            }
        ),
        "config.json: YarnScaling takes beta_fast not below beta_slow, not 1.0 and 32",
    ),
    "rope is no object": (settings(rope_scaling=3), "rope_scaling=3, which is no obj"),
    "no weights": (remove("model.safetensors"), "neither model.safetensors nor"),
    "weights cut off": (truncate, "model.safetensors is damaged or incomplete"),
    "index of no files": (
        spoil("model.safetensors.index.json", '{"weight_map": {"a": 3}}'),
        "index.json has weight_map entries that are no file names",
    ),
    "shard missing": (shards, "1 of 2 weight files.*model-00002-of-00002"),
    "tensor missing": (
        tensors(lambda held: held.pop(QUERY)),
        f"1 of 21 tensors are not in .*: {QUERY}",
    ),
    "tensors missing": (
        settings(num_hidden_layers=4),
        r"18 of 39 tensors .*: model.layers.2.input_layernorm.weight, .*, \.\.\.",
    ),
    "tensor too many": (
        settings(num_hidden_layers=1),
        "holds 9 tensors that MistralForCausalLM with 1 layers does not have: model.la",
    ),
    "bias in the weights": (
        tensors(lambda held: held.update({"model.q.bias": np.zeros(3)})),
        "holds 1 tensors that .* does not have: model.q.bias",
    ),
    "tensor of another shape": (
        settings(intermediate_size=24),
        r"mlp.*_proj.weight has shape \(.*48.*\), where config.json makes it \(.*24",
    ),
    "tensor of whole numbers": (
        tensors(lambda held: held.update({NORM: np.zeros(32, np.int32)})),
        f"tensor {NORM} is int32; float32, float16 and bfloat16 are taken",
    ),
    "tokenizer": (spoil("tokenizer.json", "{}"), "tokenizer.json cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folder(mistral, capsys, name):
    spoil, message = WRONG[name]
    spoil(mistral)
    code, out, err = run(capsys, mistral, "--tokens", 4)
    assert (code, out) == (2, "")
    assert re.match(f"error: .*{message}", err), err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method='noaux_tc'; offered are 'greedy'"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True; only False is offered"),
        ({"num_experts_per_tok": 9}, "9 of 8 experts for each token"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
            "2 of 8 experts for each token, from 2 of 3 groups",
        ),
        ({"q_lora_rank": 1.5}, "q_lora_rank=1.5, where a whole number"),
        ({"kv_lora_rank": None}, "has no kv_lora_rank"),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 16,
                    "mscale": "1",
                    "mscale_all_dim": 1,
                }
            },
            "rope_scaling in config.json has mscale='1', where a positive number",
        ),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim=5, where .* take an even number"),
    ],
)
def test_wrong_deepseek(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK, **changes}))
    with pytest.raises(models.InputError, match=message):
        models.read_config(tmp_path)


QWEN3 = {**MISTRAL, "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"max_window_layers": 1}, (None, 6)),
        ({"layer_types": ["sliding_attention", "full_attention"]}, (6, None)),
        ({"layer_types": ["full_attention"] * 2}, (None, None)),
        ({"use_sliding_window": False}, (None, None)),
    ],
)
def test_windows_of_qwen3(tmp_path, changes, windows):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    attention = models.read_config(tmp_path).attention
    assert isinstance(attention, GroupedHeads)
    assert attention.windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "has no max_window_layers"),
        ({"layer_types": ["full_attention"]}, "where 2 of full_attention, sliding_att"),
        ({"layer_types": ["linear_attention"] * 2}, r"layer_types=\['linear_attention"),
        ({"layer_types": 3}, "layer_types=3, where 2 of"),
        (
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
            "where 2 of full_attention are taken",
        ),
    ],
)
def test_wrong_windows_of_qwen3(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    with pytest.raises(models.InputError, match=message):
        models.read_config(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a1"), "error: a prompt of text takes a tokenizer.json"),
        (("--mesh", "heads=16"), "error: a mesh of heads=16 x tokens=1 .* there are 8"),
        (
            ("--mesh", "heads=4,tokens=2"),
            "tokens=2 takes heads=N that divide the model's 2 key/value heads",
        ),
        (("--mesh", "rows=2"), "heads=N,tokens=N, not 'rows=2'"),
        (("--mesh", "heads=2,heads=1"), "heads=N,tokens=N, not 'heads=2,heads=1'"),
        (("--mesh", "heads=0"), "heads=N,tokens=N, not 'heads=0'"),
        (("--chunk", "0"), "'0' is not a positive whole number"),
        (("--precision", "fp4"), "invalid choice: 'fp4'"),
    ],
)
def test_wrong_arguments(mistral, capsys, arguments, message):
    code, _, err = run(capsys, mistral, *arguments)
    assert code == 2
    assert re.search(message, err)


@pytest.mark.parametrize(
    ("prompt", "length", "message"),
    [
        ("a1 a2", 3, "the prompt has 2 tokens, 3 asked for"),
        ("", None, "the prompt has 0 tokens, 1 asked for"),
    ],
)
def test_short_prompt(mistral, capsys, prompt, length, message):
    save_tokenizer(mistral)
    asked = () if length is None else ("--tokens", length)
    code, _, err = run(capsys, mistral, "--prompt", prompt, *asked)
    assert (code, err) == (2, f"error: {message}")


def test_no_such_folder_or_prompt(mistral, capsys):
    assert run(capsys, mistral / "none")[2].endswith("none is not a folder")
    save_tokenizer(mistral)
    code, _, err = run(capsys, mistral, "--prompt-file", mistral / "none")
    assert code == 2
    assert "error: the prompt cannot be read" in err


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_any_floating_dtype_is_read(mistral, dtype):
    def convert(held):
        held.update({name: x.astype(dtype) for name, x in held.items()})

    whole = models.load(mistral, dtype=jnp.float32)
    tensors(convert)(mistral)
    rounded = models.load(mistral, dtype=jnp.float32)
    got, want = (
        jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (rounded, whole)
    )
    assert {x.dtype for x in got} == {jnp.dtype("float32")}
    assert max(map(relative, got, want)) <= float(jnp.finfo(dtype).eps)


def test_older_files_are_read(mistral):
    """The keys' rotary frequencies were kept once, and the rope named otherwise."""
    tensors(lambda held: held.update({"model.rotary_emb.inv_freq": np.zeros(8)}))(
        mistral
    )
    models.load(mistral)
    scaling = {"type": "linear", "factor": 2.0}
    settings(rope_scaling=scaling, rope_theta=5e4)(mistral)
    old = models.read_config(mistral).rope
    settings(
        rope_theta=None,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
    )(mistral)
    assert models.read_config(mistral).rope == old
    assert old.theta == 5e4


def test_parameters_lie_on_the_mesh(tmp_path):
    """Heads, channels and vocabulary are split; norms and the router are not."""
    save(tmp_path, DEEPSEEK)
    model = models.load(tmp_path, mesh=models.make_mesh(heads=4, tokens=2))
    shares = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        x = variable[...]
        name = "/".join(map(str, path))
        shares[name] = x.size // x.addressable_shards[0].data.size
    whole = {name for name, share in shares.items() if share == 1}
    assert set(shares.values()) == {1, 4}
    assert whole == {
        name
        for name in shares
        if "norm" in name or "router" in name or "kv_down" in name
    }


def test_experts_that_a_mesh_does_not_divide(tmp_path):
    save(tmp_path, DEEPSEEK)
    with pytest.raises(models.InputError, match=r"the 16 channels .*, not heads=3"):
        models.load(tmp_path, mesh=models.make_mesh(heads=3))


def test_last_logits_alone(mistral):
    model = models.load(mistral, dtype=jnp.float32)
    tokens = np.arange(21)[None] % 40
    every = models.prefill(model, tokens, last_only=False)
    assert every.shape == (1, 21, 40)
    for chunk in (None, 8, 7):
        last = models.prefill(model, tokens, chunk=chunk)
        np.testing.assert_allclose(last, every[:, -1], atol=1e-5)


def test_prefill_of_nothing_is_an_error(mistral):
    model = models.load(mistral)
    for shape, chunk in (((1, 0), None), ((1, 5), 0)):
        with pytest.raises(ValueError, match="chunks of one or more"):
            models.prefill(model, np.zeros(shape, int), chunk=chunk)


def plain_experts(x, chosen, weights, gate, up, down):
    """Every expert for every token, weighted by the choices."""
    share = np.zeros((len(x), len(gate)))
    np.put_along_axis(share, chosen, weights, axis=-1)
    hidden = np.einsum("nw,ewm->nem", x, gate)
    hidden = hidden / (1 + np.exp(-hidden)) * np.einsum("nw,ewm->nem", x, up)
    return np.einsum("nem,emw,ne->nw", hidden, down, share)


@pytest.mark.parametrize(
    ("tokens", "experts", "one"), [(3, 8, False), (500, 8, False), (500, 8, True)]
)
def test_expert_mlps(tokens, experts, one):
    """Few rows, several tiles an expert, and all rows of few experts."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, 16), np.float32)
    scores = rng.random((tokens, experts))
    if one:
        scores[..., [2, 5]] += 1
    chosen = np.argsort(-scores, axis=-1)[..., :2].astype(np.int32)
    weights = rng.random(chosen.shape, np.float32)
    kernels = [
        0.3 * rng.standard_normal((experts, *shape), np.float32)
        for shape in ((16, 12), (16, 12), (12, 16))
    ]
    got = jax.jit(moe.expert_mlps)(x, chosen, weights, *kernels)
    np.testing.assert_allclose(
        got, plain_experts(x, chosen, weights, *kernels), atol=1e-5
    )


def test_routing_is_limited_to_groups():
    """The second expert is of the token's best group, though others are likelier."""
    config = Experts(
        count=6,
        per_token=2,
        groups=3,
        groups_per_token=1,
        mlp_width=8,
        shared_mlp_width=8,
        routed_scale=3.0,
        first_dense_layers=0,
    )
    logits = np.array([0.0, 3.0, 2.5, 2.0, 2.9, 2.8], np.float32)
    chosen, weights = moe.route(logits[None], np.eye(6, dtype=np.float32), config)
    assert chosen.tolist() == [[1, 0]]
    odds = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(weights, [3 * odds[[1, 0]]], rtol=1e-5)

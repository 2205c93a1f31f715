"""Plain jnp forms of the Flax modules, on the parameters that both Flax APIs name
alike, and the inputs that their tests share."""

import jax
import jax.numpy as jnp
import numpy as np

FEATURES = 48


def inputs(*shape, seed=0, dtype=jnp.float32):
    """Normal numbers, made by NumPy: nothing to compile."""
    normal = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(normal, dtype)


def randomized(params, seed=7):
    """`params` with every leaf moved, so that no scale is 1 and no bias 0."""
    rng = np.random.default_rng(seed)

    def moved(leaf):
        change = 0.2 * rng.standard_normal(leaf.shape)
        return jnp.asarray(np.asarray(leaf, np.float32) + change, leaf.dtype)

    return jax.tree.map(moved, params)


def relative(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def attention(q, k, v, *, causal=True, left=None, lengths=None, scale=None):
    """(B, S, H, D) attention by a mask over all logits."""
    group = q.shape[-2] // k.shape[-2]
    k, v = (jnp.repeat(x, group, axis=-2) for x in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")
    logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
    i, j = np.ogrid[: q.shape[1], : k.shape[1]]
    mask = np.ones((1, 1, *logits.shape[-2:]), bool)
    if causal:
        mask = mask & (j <= i)
    if left is not None:
        mask = mask & (j >= i - left)
    if lengths is not None:
        mask = mask & (j < np.asarray(lengths)[:, None, None, None])
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
    out = jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")
    if lengths is not None:
        valid = np.arange(q.shape[1]) < np.asarray(lengths)[:, None]
        out = jnp.where(valid[..., None, None], out, 0)
    return out


def rotated(x, positions, theta):
    """Rotary embedding as a product of complex numbers, one per channel pair."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions, np.float64)[..., None, None] * (
        theta ** -(np.arange(half) / half)
    )
    turn = jnp.asarray(np.exp(1j * angle), jnp.complex64)
    z = jax.lax.complex(x[..., :half], x[..., half:]) * turn
    return jnp.concatenate([z.real, z.imag], axis=-1)


def project(layer, x, equation):
    y = jnp.einsum(equation, x, layer["kernel"], precision="highest")
    return y + layer["bias"] if "bias" in layer else y


def normalized(layer, x, epsilon=1e-6):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * layer["scale"]


def grouped_query(params, x, *, theta=10_000.0, positions=None, **options):
    """What GroupedQueryAttention computes from x (B, S, F)."""
    q, k, v = (
        project(params[name], x, "bsf,fhd->bshd") for name in ("query", "key", "value")
    )
    if "query_norm" in params:
        q = normalized(params["query_norm"], q)
        k = normalized(params["key_norm"], k)
    if theta is not None:
        positions = np.arange(x.shape[1]) if positions is None else positions
        q, k = (rotated(y, positions, theta) for y in (q, k))
    return project(params["out"], attention(q, k, v, **options), "bshd,hdf->bsf")


def latent(params, x, *, rank, nope, theta=10_000.0, positions=None, **options):
    """What MultiHeadLatentAttention computes from x (B, S, F)."""
    positions = np.arange(x.shape[1]) if positions is None else positions
    if "query" in params:
        q = project(params["query"], x, "bsf,fhd->bshd")
    else:
        down = project(params["query_down"], x, "bsf,fr->bsr")
        down = normalized(params["query_norm"], down)
        q = project(params["query_up"], down, "bsr,rhd->bshd")
    down = project(params["kv_down"], x, "bsf,fr->bsr")
    c = normalized(params["kv_norm"], down[..., :rank])
    kv = project(params["kv_up"], c, "bsr,rhd->bshd")
    shared = rotated(down[..., None, rank:], positions, theta)
    heads = []
    for h in range(q.shape[2]):
        q_h = jnp.concatenate(
            [
                q[:, :, h, :nope],
                rotated(q[:, :, h : h + 1, nope:], positions, theta)[:, :, 0],
            ],
            axis=-1,
        )
        k_h = jnp.concatenate([kv[:, :, h, :nope], shared[:, :, 0]], axis=-1)
        heads.append((q_h, k_h, kv[:, :, h, nope:]))
    q, k, v = (jnp.stack(x, axis=2) for x in zip(*heads, strict=True))
    return project(params["out"], attention(q, k, v, **options), "bshd,hdf->bsf")

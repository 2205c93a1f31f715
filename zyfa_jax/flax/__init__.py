"""Attention functions and modules for Flax: `zyfa_jax.flax.linen`, `zyfa_jax.flax.nnx`.

Neither is imported here, so that each needs only what it uses.
"""

"""Eight CPU devices and strict dtype promotion, set before any test touches JAX."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

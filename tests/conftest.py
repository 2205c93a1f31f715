"""Eight CPU devices, strict dtype promotion and quick compilation, for every test."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# The time goes into compiling small programs, not into running them.
jax.config.update("jax_disable_most_optimizations", True)

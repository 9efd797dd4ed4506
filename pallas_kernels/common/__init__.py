"""What backends share: token layouts, masks, quantization, merging; index arithmetic and `jnp`, no kernels.

Uses nothing of this package outside itself; every backend and `jaxkv` may use it. What two backends need goes here.
"""

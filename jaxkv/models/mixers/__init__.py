"""Mixers of tokens that keep a state of fixed size instead of keys and values: their configs and modules.

Each module has the three steps of `jaxkv.nnx.Attention`: `inputs` of tokens, `attend` over the cache, and `output`.
A new mixer is a config in `block_config`, a module here, and a line of `modules`. Imported by `jaxkv.models`.
"""

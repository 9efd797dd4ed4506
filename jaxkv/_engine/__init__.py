"""Who serves: requests, rows, steps and samples over one cache.

Stands on `_core`, `_tiers` and `_files`. What a model family needs goes into `jaxkv.models`, not here.
"""

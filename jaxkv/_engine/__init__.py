"""Who serves: requests, rows, steps and samples over one cache.

Four wings, each standing on those before it: requests, programs, runner, frontend. Stands on `_core`, `_tiers` and
`_files`. What a model family needs goes into `jaxkv.models`, not here.
"""

"""Who serves: requests, rows, steps and samples over one cache.

Five wings, each standing on those before it: requests, programs, runner, hosts, frontend. Stands on `_core`, `_tiers`
and `_files`. What a model family needs goes into `jaxkv.models`, not here.
"""

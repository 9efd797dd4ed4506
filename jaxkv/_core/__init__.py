"""What a cache is: its config, its state, and the pure functions that return a new one.

Five wings, each standing on those before it: config, state, cache, blocks, attention. Imports `pallas_kernels` and
nothing else of the project.
"""

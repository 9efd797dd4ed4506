"""The front door: checks arguments, has a backend chosen, and runs it with a gradient.

Uses everything in `pallas_kernels`; only `pallas_kernels/__init__.py` and `jaxkv` use it. What callers see goes here:
an argument, its check, a refusal, the choice of a backend.
"""

"""Recurrences over states in plain XLA: `steps` runs a step, by `decode` or `prefill`, both by the same `formulas`.

Used by `mixers` beside it, and by tests of the kernels. A layer's arithmetic belongs in `formulas`, what reads or
writes pools in `slots`.
"""

"""One step over a cache: its plan, the write of keys and values, and attention by the kernels.

Stands on `blocks`. An option of `attention` goes into `attention_options`, what a step computes once into `plan`.
"""

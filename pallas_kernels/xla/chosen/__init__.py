"""Attention to chosen tokens in plain XLA: `index` scores and chooses them, `tokens` attends to them.

`chosen_rows` brings their rows together for the kernels of `gpu` and `tpu`, which attend to them there.
"""

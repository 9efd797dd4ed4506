"""Paged attention on NVIDIA Hopper GPUs, in Pallas Mosaic GPU.

`_attention` prepares a step and calls the kernels: `_decode` for rows with one new token, `_prefill` for the others.
Both take their work from lists built on the device (`_work`) and their tile sizes from `_tuning`, and share `_tiles`;
`_support` refuses what they cannot do. The write of the cache is XLA's in-place scatter.
"""

from pallas_kernels.gpu._attention import paged_attention as paged_attention
from pallas_kernels.gpu._support import unsupported as unsupported

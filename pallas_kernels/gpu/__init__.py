"""Paged attention on NVIDIA Hopper GPUs, in Pallas Mosaic GPU.

`_attention` prepares a step and calls the kernels of `_decode`. They take their work from lists built on the device
(`_work`) and their tile sizes from `_tuning`; `_support` refuses. The write of the cache is XLA's in-place scatter.
"""

from pallas_kernels.gpu._attention import paged_attention as paged_attention
from pallas_kernels.gpu._support import unsupported as unsupported

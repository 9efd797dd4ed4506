"""Paged attention on NVIDIA GPUs, in Pallas Mosaic GPU."""


def unsupported(op, arguments):
    return "There are no GPU kernels yet."

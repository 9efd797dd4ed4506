"""Paged attention on TPUs, in Pallas Mosaic TPU."""


def unsupported(op, arguments):
    return "There are no TPU kernels yet."

"""What a backend is: a module with these names, `pallas_kernels.xla`, `gpu`, `tpu` and `reference`.

To add one of your own: `pallas_kernels.register_backend`. To add one to this package: write the module, and name it in
`backends.IMPLEMENTATIONS` and `pallas_kernels._LATE`; its mixers and its choice of tokens, where it has them, in
`mixer_dispatch.MODULES` and `selection.MODULES`.
"""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from pallas_kernels.common.batch import Call, MaskSpec, PagedBatch, SoftmaxOptions, StoredKV


class Backend(Protocol):
    """What a backend provides, all of it: a module with these names, or any object. See `register_backend`.

    Names:
      FORMATS: the names of the storage formats that it reads, beside what is not quantized.
      OPTIONS: the options that it takes, of `alibi`, `blocks`, `causal`, `chunk`, `compress_ratio`, `deterministic`,
        `residual_length`, `sink_tokens`, `spans`, `stripe`, `tokens` and `tree`. A call with another one does not reach
        it.
      READS_LATENT_ROWS: whether it reads latent rows.
      READS_SHARED_ONCE: whether it takes `options.shared` itself; else shared blocks are read in a call of their own.
      unsupported: `(op, call)` to why it cannot run a call of these shapes, and the way out; None: it can. Asked last.
      paged_attention: `(q, stored, batch, mask, options)` to the output, or with `options.return_lse` that and the LSE.
      write_kv: `(k, v, stored, batch)` to the pool with a step's tokens; None: XLA writes.
      write_and_attend: `(q, k, v, stored, batch, mask, options)` to what both return; None: the one after the other.
      mixers: optional, what layers with states compute; see `pallas_kernels/api/mixer_dispatch.py`.

    >>> import pallas_kernels.xla
    >>> backend: Backend = pallas_kernels.xla
    >>> backend.READS_LATENT_ROWS
    True
    """

    FORMATS: Collection[str]
    OPTIONS: Collection[str]
    READS_LATENT_ROWS: bool
    READS_SHARED_ONCE: bool
    unsupported: Callable[[str, Call], str | None]
    paged_attention: Callable[[Any, StoredKV, PagedBatch, MaskSpec, SoftmaxOptions], Any]
    write_kv: Callable[[Any, Any, StoredKV, PagedBatch], StoredKV] | None
    write_and_attend: Callable[..., tuple[Any, StoredKV]] | None

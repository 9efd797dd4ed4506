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

    >>> import pallas_kernels.xla
    >>> backend: Backend = pallas_kernels.xla
    >>> backend.READS_LATENT_ROWS
    True
    """

    # 1. The names of the storage formats that it reads, beside what is not quantized.
    FORMATS: Collection[str]
    # 2. The options that it takes, of those in `Call.given_options`.
    OPTIONS: Collection[str]
    # 3. Whether it reads latent rows.
    READS_LATENT_ROWS: bool
    # 4. Whether it takes `shared` itself; else `cascade.read_once` does it in two calls, where it can.
    READS_SHARED_ONCE: bool

    # 5. Why it cannot run an op on a call of these shapes, and the way out; None: it can. Asked last.
    unsupported: Callable[[str, Call], str | None]
    # 6. The output, or with `return_lse` that and the LSE.
    paged_attention: Callable[[Any, StoredKV, PagedBatch, MaskSpec, SoftmaxOptions], Any]
    # 7. `(k, v, stored, batch)` to the pool with a step's tokens; None: XLA writes.
    write_kv: Callable[[Any, Any, StoredKV, PagedBatch], StoredKV] | None
    # 8. `(q, k, v, stored, batch, mask, options)` to what both return; None: the one after the other.
    write_and_attend: Callable[..., tuple[Any, StoredKV]] | None
    # 9. Optional, and only of what `register_backend` takes: `mixers`, as `mixer_dispatch` says.

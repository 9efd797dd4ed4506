"""What `tpu_cycles.py` measures, and what stands in for a kernel's arguments in scalar memory there."""

from collections.abc import Callable
from typing import Any, NamedTuple

BLOCK_SIZE, QUANTISED_BLOCK_SIZE = 16, 128
LATENT_BLOCK_SIZE = 64  # a token of one row is a fraction of what eight heads take: so many for a copy of that size
# Query heads and heads of keys and values, of 128 numbers, where no known model is meant.
HEADS = {
    "2 x 4 heads": (8, 4), "1 x 4 heads": (4, 1), "1 x 8 heads": (8, 1), "7 x 4 heads": (28, 4), "8 x 4 heads": (32, 4),
}  # fmt: skip
LLAMA = {
    "vocab_size": 1024, "embed_dim": 4096, "mlp_dim": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
    "max_seq_len": 8192, "attention_scale": 0.1, "tie_embeddings": True,
}  # fmt: skip
NARROW = LLAMA | {"embed_dim": 2048, "mlp_dim": 8192, "head_dim": 64}
MODELS = {  # decoders' shapes
    "Llama 3 8B": LLAMA, "the same with norms of queries and keys": LLAMA | {"qk_norm": True}, "Llama 3.2 1B": NARROW,
}  # fmt: skip
# How keys and values stand in a pool's rows, as is written behind a work's name, and what `CacheConfig` takes for it.
FORMS = {"": False, ", one row": "head", ", pairs": True}


CHIPS = {"v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}


class Work(NamedTuple):
    """One measurement. Rows of a decode step have `context` tokens, or lengths from 128 on in steps of 256; a prefill
    has one row of `tokens` new ones on top of `context`."""

    kernel: str  # "decode", "prefill" or "write"; what else the step needs is measured where `layer` is True
    shape: str = "llama3-8b"
    rows: int = 1
    context: int = 0
    tokens: int = 1
    table: int = 8192  # places of a row in the tables
    ragged: bool = False
    kept: bool = False  # rows have 5 to 45 % of 2,048 tokens, in the mean a quarter, as heads that evict keep them
    kind: str | None = None  # how the pool is stored; None: as bfloat16
    layer: bool = False
    step: bool = False
    latent: bool = False
    deterministic: bool = False
    form: str = ""  # of `FORMS`
    model: str | None = None  # of a whole layer of this decoder: norms, projections, rotation and MLP, too
    prefix: int | None = None  # tokens that a decode step's rows share beside their context; None: it is not looked for

    @property
    def is_mixed(self) -> bool:
        """Tells whether a decode step's last row has a prompt of `tokens` new ones instead."""
        return self.kernel == "decode" and self.tokens > 1

    @property
    def lengths(self) -> list[int]:
        length = (lambda row: 128 + 256 * row) if self.ragged else (lambda row: 102 + 117 * (row & 7))
        return [length(row) if self.ragged or self.kept else self.context for row in range(self.rows)]

    def steps(self, block_rows: int, segment: int, segments: int) -> int:
        """Of a block of rows in decode, each as long as in any other."""
        return -(-sum(-(-n // segment) for n in self.lengths[:block_rows]) // segments)

    @property
    def block_size(self) -> int:
        if self.kind is not None:
            return QUANTISED_BLOCK_SIZE
        return LATENT_BLOCK_SIZE if self.latent else BLOCK_SIZE


WORKS = {
    "decode 8 x 1024": Work("decode", rows=8, context=1024),
    "decode 32 x 1024": Work("decode", rows=32, context=1024),
    "decode 64 x 128": Work("decode", rows=64, context=128),
    "decode 32 rows of 128 to 8,064": Work("decode", rows=32, ragged=True),
    "decode 8 x 1024, window and cap": Work("decode", "gemma2-2b", rows=8, context=1024),
    "write of 1,024 tokens": Work("write", tokens=1024),
    "write of 32 rows' tokens": Work("write", rows=32),
    "prefill of 1,024 tokens": Work("prefill", tokens=1024),
    "prefill of 1,024 tokens, 28/4 heads": Work("prefill", "7 x 4 heads", tokens=1024),
    "prefill of 1,024 tokens, 32/4 heads": Work("prefill", "8 x 4 heads", tokens=1024),
    "chunk of 512 tokens on 4,096": Work("prefill", tokens=512, context=4096),
    **{  # a device's heads, of eight
        f"{name}, {heads}/1 heads": work._replace(shape=f"1 x {heads} heads")
        for heads in (4, 8)
        for name, work in {
            "prefill of 1,024 tokens": Work("prefill", tokens=1024),
            "chunk of 512 tokens on 4,096": Work("prefill", tokens=512, context=4096),
        }.items()
    },
    "decode 8 x 1024, int8": Work("decode", rows=8, context=1024, kind="int8"),
    "decode 32 x 1024, int8": Work("decode", rows=32, context=1024, kind="int8"),
    "decode 64 x 128, int8": Work("decode", rows=64, context=128, kind="int8"),
    **{
        f"{name}, {kind}": work._replace(kind=kind)
        for kind in ("int4", "k5v3")
        for name, work in {
            "decode 8 x 1024": Work("decode", rows=8, context=1024),
            "decode 32 x 1024": Work("decode", rows=32, context=1024),
            "decode 64 x 128": Work("decode", rows=64, context=128),
            "write of 1,024 tokens": Work("write", tokens=1024),
            "write of 32 rows' tokens": Work("write", rows=32),
            "prefill of 1,024 tokens": Work("prefill", tokens=1024),
        }.items()
    },
    **{f"decode 8 x 4096, {kind}": Work("decode", rows=8, context=4096, kind=kind) for kind in ("int8", "int4")},
    "decode 8 x 1024, float8_e4m3fn": Work("decode", rows=8, context=1024, kind="float8_e4m3fn"),
    "prefill of 1,024 tokens, float8_e4m3fn": Work("prefill", tokens=1024, kind="float8_e4m3fn"),
    "write of 1,024 tokens, int8": Work("write", tokens=1024, kind="int8"),
    "write of 32 rows' tokens, int8": Work("write", rows=32, kind="int8"),
    "prefill of 1,024 tokens, int8": Work("prefill", tokens=1024, kind="int8"),
    "decode 8 x 1024, deterministic": Work("decode", rows=8, context=1024, deterministic=True),
    "decode 64 x 128, deterministic": Work("decode", rows=64, context=128, deterministic=True),
    "prefill of 1,024 tokens, deterministic": Work("prefill", tokens=1024, deterministic=True),
    **{
        f"{name}, head_dim 64{form}": work._replace(shape="llama3.2-1b", form=form)
        for name, work in {
            "decode 8 x 1024": Work("decode", rows=8, context=1024),
            "decode 64 x 128": Work("decode", rows=64, context=128),
            "decode 32 rows of 128 to 8,064": Work("decode", rows=32, ragged=True),
            "write of 1,024 tokens": Work("write", tokens=1024),
            "write of 32 rows' tokens": Work("write", rows=32),
            "prefill of 1,024 tokens": Work("prefill", tokens=1024),
            "chunk of 512 tokens on 4,096": Work("prefill", tokens=512, context=4096),
            "layer, prefill of 1,024 tokens": Work("prefill", tokens=1024, layer=True),
            "layer, decode 32 x 1024": Work("decode", rows=32, context=1024, layer=True),
        }.items()
        for form in FORMS
    },
    **{
        f"{name}, head_dim 64, int8{form}": work._replace(shape="llama3.2-1b", kind="int8", form=form)
        for name, work in {
            "decode 8 x 1024": Work("decode", rows=8, context=1024),
            "decode 32 rows of 128 to 8,064": Work("decode", rows=32, ragged=True),
            "write of 1,024 tokens": Work("write", tokens=1024),
            "write of 32 rows' tokens": Work("write", rows=32),
            "prefill of 1,024 tokens": Work("prefill", tokens=1024),
            "layer, decode 32 x 1024": Work("decode", rows=32, context=1024, layer=True),
        }.items()
        for form in ("", ", one row")
    },
    "latent decode 32 x 4096": Work("decode", "deepseek-v3", rows=32, context=4096, latent=True),
    "latent decode 32 x 4096, 16 heads": Work("decode", "deepseek-v2-lite", rows=32, context=4096, latent=True),
    "latent decode 32 x 4096, int8": Work("decode", "deepseek-v3", rows=32, context=4096, latent=True, kind="int8"),
    "latent prefill of 1,024 tokens, int8": Work("prefill", "deepseek-v3", tokens=1024, latent=True, kind="int8"),
    "latent prefill of 1,024 tokens": Work("prefill", "deepseek-v3", tokens=1024, latent=True),
    "latent prefill of 1,024 tokens, 16 heads": Work("prefill", "deepseek-v2-lite", tokens=1024, latent=True),
    **{
        f"step, decode 64 x {context:,}{how}": Work(
            "decode",
            "2 x 4 heads",
            rows=64,
            context=context,
            table=context + 16 + (prefix or 0),
            prefix=prefix,
            step=True,
        )
        for context, prefix, how in (
            (256, None, ""),
            (256, 0, ", may share"),
            (8448, None, ""),
            (256, 8192, " on 8,192 shared"),
            (33024, None, ""),
            (256, 32768, " on 32,768 shared"),
        )
    },
    **{
        f"decode {rows} x {context:,}{how}": Work(
            "decode", shape, rows=rows, context=context, table=table, kept="heads" in how
        )
        for rows, shape in ((8, "llama3-8b"), (64, "1 x 4 heads"))
        for context, table, how in (
            (2048, 2048, ""),
            (512, 2048, " of 2,048 kept"),
            (512, 512, " and no more"),
            *([(512, 2048, " of 2,048 kept, 102 to 921 by heads")] if rows == 64 else []),
        )
    },
    **{
        f"layer, 31 rows and a prompt of 256{', ' * (kind is not None)}{kind or ''}": Work(
            "decode", rows=32, context=1024, tokens=256, kind=kind, layer=True
        )
        for kind in (None, "int8", "int4")
    },
    "layer, prefill of 1,024 tokens": Work("prefill", tokens=1024, layer=True),
    "layer, decode 32 x 1024": Work("decode", rows=32, context=1024, layer=True),
    **{
        f"{model}, {name}": work._replace(model=model)
        for model in ("Llama 3 8B", "the same with norms of queries and keys")
        for name, work in {
            "prefill of 1,024 tokens": Work("prefill", tokens=1024),
            "decode 32 x 1024": Work("decode", rows=32, context=1024),
            "prefill of 1,024 tokens, int8": Work("prefill", tokens=1024, kind="int8"),
            "decode 32 x 1024, int8": Work("decode", rows=32, context=1024, kind="int8"),
        }.items()
    },
    **{
        f"Llama 3.2 1B, {name}{form}": work._replace(model="Llama 3.2 1B", form=form)
        for name, work in {
            "prefill of 1,024 tokens": Work("prefill", tokens=1024),
            "decode 32 x 1024": Work("decode", rows=32, context=1024),
        }.items()
        for form in (", one row", ", pairs")
    },
}


def one_chip(chip: str) -> tuple[Any, Callable[..., Any]]:
    """Returns the mesh of one chip, which is not there, and what makes the shape of an array on it."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip], chips_per_host_bounds=(1, 1, 1))
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(*axes: int, dtype: Any = "float32") -> Any:
        return jax.ShapeDtypeStruct(axes, dtype, sharding=whole)

    return mesh, array


class Scalars:
    """Stands in for an argument in scalar memory, by arithmetic that the cycle model resolves. What is written to it is
    forgotten."""

    def __init__(self, function: Callable[[Any], Any], dtype: str = "int32", shape: tuple[int, ...] = ()):
        self.function, self.dtype, self.shape = function, dtype, shape

    def __getitem__(self, index: Any) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(self.function(index), self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


def number(x: int, *shape: int) -> Scalars:
    """The same at every place, but no constant to the compiler: that folds away, which the model does not survive."""
    import jax.numpy as jnp

    return Scalars(lambda i: jnp.where(i == 9999, x + 1, x), shape=shape)


def stand_ins(
    work: Work, block_rows: int, segment: int, segments: int, tile: int, page: int
) -> dict[str, list[Scalars]]:
    """For each kernel, its scalar arguments."""
    row_blocks = work.table // work.block_size
    decodes = work.kernel == "decode"
    limits = Scalars(lambda row: 128 + 256 * row) if work.ragged else number(work.context if decodes else 0)
    limits = Scalars(lambda row: 102 + 117 * (row & 7)) if work.kept else limits
    successors = Scalars(lambda row: row) if decodes else number(work.rows)
    steps = work.steps(block_rows, segment, segments) if decodes else 0
    block, knobs = Scalars(lambda i: i + 1), Scalars(lambda i: 0.1, "float32")
    target = Scalars(lambda row: (row + 1) * row_blocks)
    together = work.prefix is not None
    start = Scalars(lambda i: (0 if together else work.context) + i * tile)
    limit = Scalars(lambda i: (0 if together else work.context) + (i + 1) * tile)
    first = Scalars(lambda i: i * tile)
    token_masks = [number(0), number(work.prefix), number(0), number(work.prefix)] if together else []
    if work.rows == 1 or work.is_mixed:
        runs = [block, number(0), Scalars(lambda i: i * page), number(0), number(page), number(work.tokens // page)]
    else:  # a token a row, each at another place of its page
        place = Scalars(lambda i: i & (page - 1))
        token = Scalars(lambda i: i - (i & (page - 1)))
        runs = [block, number(0), token, place, Scalars(lambda i: (i & (page - 1)) + 1), number(work.rows)]
    return {
        "paged_decode": [limits, successors, target, number(steps), block, knobs],
        "paged_prefill": [number(0), first, start, limit, block, knobs, *token_masks],
        "paged_write": runs,
    }

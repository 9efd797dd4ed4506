"""What four bits and fewer would cost real models on real text: newest tokens exact, keys by channel, keys in more bits
than values, and more.

    python benchmarks/four_bits.py [--model gemma3] [--documents 4] [--length 1024] [--forms "int4" ...]

Nothing of it is in the cache: attention is dense, and what a form stores is encoded and decoded on the way. What a
query reads exactly, in bfloat16, depends on its position alone. So outputs and what is stored are those of decoding by
token, however a prompt is split. The text is that of `quality.py`, and every other token of it is predicted. Costs are
in percent of the loss over float32, with the errors of means over pieces of 512 tokens. The divergence is that of
Kullback and Leibler from the predictions over float32, and much less noisy than the loss. Bits are of a number of keys
and values, with scales and zero points, and at rows of 1,024 and 8,192 tokens with a buffer for the exact tokens.
"""

import argparse
import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import RESULTS, save, table
from _models import load_gemma3, load_smollm2, unroll
from quality import read_documents

from jaxkv.models.layers import rms_norm
from pallas_kernels.common.quantization import FORMATS
from pallas_kernels.common.quantization.levels import FOUR_BITS
from pallas_kernels.common.rotation import rotate

PIECE, CHUNK = 512, 256
# Levels above 0. Those of fewer bits are Lloyd's and Max's for normal numbers.
LEVELS = {
    "even": np.arange(8) + 0.5, "levels": np.array(FOUR_BITS.above_0),
    "even 3": np.arange(4) + 0.5, "levels 3": np.array([0.2451, 0.7560, 1.3439, 2.1520]),
    "even 2": np.arange(2) + 0.5, "levels 2": np.array([0.4528, 1.5104]),
    "levels 5": (np.arange(16) + 0.5) * ((np.arange(16) + 0.5) ** 2 + 558),
    "levels 6": (np.arange(32) + 0.5) * ((np.arange(32) + 0.5) ** 2 + 2168),
}  # fmt: skip
# Shares of the scale by which the largest number is the last level: those that are tried, where scales are searched.
RATIOS = {"even": np.arange(13, 21) / 20, "levels": np.arange(17, 25) / 20,
          "even 3": np.arange(12, 21) / 20, "levels 3": np.arange(13, 27) / 20,
          "even 2": np.arange(9, 21) / 20, "levels 2": np.arange(9, 25) / 20,
          "levels 5": np.arange(17, 25) / 20, "levels 6": np.arange(17, 25) / 20}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Codec:
    """How keys or values are stored.

    Fields:
      block: tokens that share a scale in each channel; None: a token has scales of its own.
      group: entries of a head that share a scale, without a block; None: all.
      zero: what is taken away before, in each channel and block: "middle" of the range, or "mean".
      wide: bits of a scale and of a zero point, 16 (bfloat16) or 8 (e4m3, and whole halves of a step).
      exact_block: tokens of a block which a query in it reads exactly; with `block` it is that.
      blocks_back: how many blocks before its own it reads so too.
      exact_last: or how many tokens, the newest and its own, wherever blocks end.
      unturned: whether keys are stored as they are before RoPE.
    """

    block: int | None = None
    group: int | None = 32
    levels: str = "levels"
    zero: str | None = None
    wide: int = 16
    searched: bool = True
    rotated: bool = False
    unturned: bool = False
    exact_block: int | None = None
    blocks_back: int = 0
    exact_last: int | None = None
    bits: int = 4

    @property
    def tail(self) -> int:
        """Most tokens of a row that are read exactly, without the one that asks."""
        size = self.block or self.exact_block or 0
        return size * (1 + self.blocks_back) or (self.exact_last or 1) - 1

    def count_bits(self, head_dim: int, length: int) -> float:
        scales = (1 if self.zero is None else 2) * self.wide / (self.block or self.group or head_dim)
        return self.bits + scales + 16 * self.tail / length


@dataclasses.dataclass(frozen=True)
class Form:
    """How a model stores keys and values; None: exactly."""

    keys: Codec | None
    values: Codec | None
    exact_tokens: int = 0  # the first of a row that stay in bfloat16
    wide_layers: int = 0  # first and last layers that store int8

    def count_bits(self, model: Any, length: int) -> float:
        head_dim, count = model.config.layers[0].head_dim, model.config.num_layers
        own = sum(16 if x is None else x.count_bits(head_dim, length) for x in (self.keys, self.values)) / 2
        own += 12 * self.exact_tokens / length
        return own + 2 * self.wide_layers / count * (8 + 32 / head_dim - own)


def code(x: jax.Array, codec: Codec, wanted: jax.Array | None = None) -> jax.Array:
    """Returns what is read of numbers `[..., n]` that share a scale; `wanted` says which of them count."""
    counts = jnp.ones(x.shape, bool) if wanted is None else jnp.broadcast_to(wanted, x.shape)
    levels = jnp.asarray(LEVELS[codec.levels] / LEVELS[codec.levels][-1], jnp.float32)
    half_step = 1 / 15  # of the range to one side, so that a step of even levels is 2 / 15
    many = jnp.maximum(counts.sum(axis=-1, keepdims=True), 1)
    low = jnp.where(counts, x, jnp.inf).min(axis=-1, keepdims=True)
    high = jnp.where(counts, x, -jnp.inf).max(axis=-1, keepdims=True)
    middle = {None: jnp.zeros_like(low), "middle": (low + high) / 2,
              "mean": jnp.where(counts, x, 0).sum(axis=-1, keepdims=True) / many}[codec.zero]  # fmt: skip
    largest = jnp.maximum(jnp.maximum(high - middle, middle - low), 1e-8)

    def read(scale: jax.Array) -> jax.Array:
        if codec.wide == 16:
            scale, zero = (y.astype(jnp.bfloat16).astype(jnp.float32) for y in (scale, middle))
        else:
            scale = jnp.clip(scale * 16, 2.0**-9, 448).astype(jnp.float8_e4m3fn).astype(jnp.float32) / 16
            zero = jnp.clip(jnp.round(middle / (scale * half_step)), -128, 127) * (scale * half_step)
        y = (x - zero) / scale
        above = sum((jnp.abs(y) > bar).astype(jnp.int32) for bar in (levels[1:] + levels[:-1]) / 2)
        return jnp.where(y < 0, -levels[above], levels[above]) * scale + zero

    if not codec.searched:
        return read(largest)
    best, least = x, jnp.full(low.shape, jnp.inf)
    for ratio in RATIOS[codec.levels]:
        found = read(largest * float(ratio))
        lost = jnp.where(counts, (found - x) ** 2, 0).sum(axis=-1, keepdims=True)
        best, least = jnp.where(lost < least, found, best), jnp.minimum(lost, least)
    return best


def store(x: jax.Array, codec: Codec | None, exact_tokens: int) -> jax.Array:
    """Returns what is read of keys or values `[T, K, D]`."""
    if codec is None:
        return x
    x = rotate(x) if codec.rotated else x
    if codec.bits == 8:
        found = FORMATS["int8"].decode(*FORMATS["int8"].encode(x), x.shape[-1])
    elif codec.block is None:
        size = codec.group or x.shape[-1]
        found = code(x.reshape(*x.shape[:-1], -1, size), codec).reshape(x.shape)
    else:
        blocks = jnp.moveaxis(x.reshape(-1, codec.block, *x.shape[1:]), 1, -1)
        wanted = jnp.arange(len(x)).reshape(-1, 1, 1, codec.block) >= exact_tokens
        found = jnp.moveaxis(code(blocks, codec, wanted), -1, 1).reshape(x.shape)
    return rotate(found) if codec.rotated else found


def attend(q: jax.Array, k: jax.Array, v: jax.Array, attention: Any, form: Form) -> jax.Array:
    """Computes attention of queries `[T, H, D]` over what a form stores of `[T, K, D]`."""
    tokens, _, head_dim = q.shape
    positions = jnp.arange(tokens)
    rope = getattr(attention.position_fn, "rope", attention.position_fn)

    def turn(x: jax.Array, sign: int) -> jax.Array:
        return rope._rotate(x, x, sign * positions)[0]

    stored = turn(k, -1) if form.keys is not None and form.keys.unturned else k
    stored = store(stored, form.keys, form.exact_tokens)
    stored = turn(stored, 1) if form.keys is not None and form.keys.unturned else stored
    read = store(v, form.values, form.exact_tokens)
    if form != EXACT:
        k, v = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))
    is_first = (positions < form.exact_tokens)[:, None, None]
    stored, read = (jnp.where(is_first, exact, x) for exact, x in ((k, stored), (v, read)))

    def exactly(codec: Codec | None, mine: jax.Array, theirs: jax.Array) -> jax.Array | None:
        if codec is None or not (codec.exact_last or codec.tail):
            return None
        if codec.exact_last:
            return mine - theirs < codec.exact_last
        size = codec.block or codec.exact_block
        return mine // size - theirs // size <= codec.blocks_back

    size = min(tokens, CHUNK)
    assert tokens % size == 0
    grouped = q.reshape(tokens, k.shape[1], -1, head_dim) * attention.scale
    out = []
    for begin in range(0, tokens, size):  # queries of a chunk over all that they may see
        mine = positions[begin : begin + size, None]
        first = 0 if attention.window is None else max(0, begin - attention.window + 1) // size * size
        near = max(first, begin - size)  # what may be read exactly lies behind it
        theirs, diagonal = positions[None, first : begin + size], slice(near - first, None)
        asked = grouped[begin : begin + size]
        logits = jnp.einsum("tkgd,ckd->kgtc", asked, stored[first : begin + size])
        seen = mine >= theirs
        seen = seen if attention.window is None else seen & (mine - theirs < attention.window)
        own = [exactly(codec, mine, theirs[:, diagonal]) for codec in (form.keys, form.values)]
        if own[0] is not None:
            exact = jnp.einsum("tkgd,ckd->kgtc", asked, k[near : begin + size])
            logits = jnp.concatenate(
                [logits[..., : diagonal.start], jnp.where(own[0], exact, logits[..., diagonal])], -1
            )
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        found = jnp.einsum("kgtc,ckd->tkgd", weights, read[first : begin + size])
        if own[1] is not None:
            missed = (v - read)[near : begin + size]
            found += jnp.einsum("kgtc,ckd->tkgd", jnp.where(own[1], weights[..., diagonal], 0), missed)
        out.append(found)
    return jnp.concatenate(out).reshape(q.shape)


@functools.partial(jax.jit, static_argnames="form")
def run_block(block: Any, x: jax.Array, form: Form) -> jax.Array:
    """Returns the residual stream `[T, E]` behind a block."""
    ((q, k, v, _),) = block.inputs(x, jnp.arange(len(x)))
    return block.output(x, (attend(q, k, v, block.attention, form),))


@jax.jit
def score(model: Any, x: jax.Array, exact: jax.Array, following: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns sums of the losses of `following` i32[N], and of the divergences from the exact model's predictions."""

    def predict(x: jax.Array) -> jax.Array:
        head = model.embed if model.head is None else model.head
        return jax.nn.log_softmax(rms_norm(x, model.norm, model.config) @ head[...].T)

    ours, theirs = predict(x), predict(exact)
    losses = jnp.take_along_axis(ours, following[:, None], axis=-1)[:, 0]
    return -jnp.sum(jnp.where(following >= 0, losses, 0)), jnp.sum(jnp.exp(theirs) * (theirs - ours))


def run(model: Any, tokens: np.ndarray, form: Form) -> jax.Array:
    """Returns the residual stream `[T, E]` behind the last block."""
    x = jnp.take(model.embed[...], jnp.asarray(tokens), axis=0) * model.config.embed_scale
    for i, block in enumerate(model.layers):
        is_wide = min(i, len(model.layers) - 1 - i) < form.wide_layers
        x = run_block(block, x, WIDE if is_wide else form)
    return x


def measure(model: Any, documents: np.ndarray, form: Form, exact: list[jax.Array]) -> np.ndarray:
    """Returns `[2, pieces]`: mean losses and mean divergences of pieces of text."""
    found = []
    for tokens, wanted in zip(documents, exact, strict=True):
        x, following = run(model, tokens, form), np.append(tokens[1:], -1)
        for begin in range(0, len(tokens), PIECE):
            part = slice(begin, begin + PIECE, 2)  # every other token: predictions take half of the time
            sums = score(model, x[part], wanted[part], following[part])
            found.append([float(y) / np.sum(following[part] >= 0) for y in sums])
    return np.array(found).T


def list_forms() -> dict[str, Form]:
    """Returns the forms by name; of those named "K" and "V" the others of a token are stored exactly."""
    now, head = Codec(rotated=True), Codec(rotated=True, group=None)
    channels = {size: Codec(block=size, levels="even", zero="middle", searched=False) for size in (32, 64, 128)}
    change = dataclasses.replace
    found = {"int4": Form(now, now)}
    for name, codec in (("int4", now), ("int4, a scale a head", head)):
        own = {f"own block of {size}": change(codec, exact_block=size) for size in (32, 64, 128)}
        last = {f"last {size}": change(codec, exact_last=size) for size in (32, 64)}
        found |= {f"{name}, {which} exact": Form(x, x) for which, x in (own | last).items()}
    found["K by channel in 32, V int4, own block exact"] = Form(channels[32], change(now, exact_block=32))
    found["K by channel in 64, V int4, own block exact"] = Form(channels[64], change(now, exact_block=64))
    narrow = change(channels[64], wide=8)
    found["K by channel in 64, scales of 8 bits, V a scale a head, own block exact"] = Form(
        narrow, change(head, exact_block=64)
    )
    keys = {"int4": now}
    keys |= {f"int4, last {size} exact": change(now, exact_last=size) for size in (1, 8, 32, 64)}
    keys["int4, own block of 64 exact"] = change(now, exact_block=64)
    for size, codec in channels.items():
        keys[f"by channel in {size}"] = codec
        keys[f"by channel in {size}, before RoPE"] = change(codec, unturned=True)
    keys["by channel in 32, the block before exact too"] = change(channels[32], blocks_back=1)
    keys["by channel in 64, scales of 8 bits"] = narrow
    keys["by channel in 64, rotated"] = change(channels[64], rotated=True)
    keys["by channel in 64, no zero points"] = change(channels[64], zero=None, searched=True)
    for levels in LEVELS:
        for zero in ("middle", "mean"):
            keys[f"by channel in 64, {levels}, {zero}, searched"] = change(
                channels[64], levels=levels, zero=zero, searched=True
            )
    found |= {f"K {name}": Form(codec, None) for name, codec in keys.items()}
    of_bits = {
        (bits, size): Codec(group=size, levels="levels" if bits == 4 else f"levels {bits}", bits=bits, rotated=True)
        for bits in (6, 5, 4, 3, 2) for size in (32, 64)
    }  # fmt: skip
    for size in (32, 64):
        found[f"K 5 bits, V 3, a scale per {size}"] = Form(of_bits[5, size], of_bits[3, size])
    for tail in (32, 128):
        kept = {each: change(codec, exact_last=tail) for each, codec in of_bits.items()}
        for size in (32, 64):
            for keys_bits, values_bits in ((6, 2), (5, 3), (4, 3), (4, 2), (3, 3), (3, 2), (2, 2)):
                name = f"K {keys_bits} bits, V {values_bits}, a scale per {size}, last {tail} exact"
                found[name] = Form(kept[keys_bits, size], kept[values_bits, size])
    for bits in (3, 2):
        values = Codec(levels=f"even {bits}", bits=bits, zero="middle", searched=False, exact_block=64)
        by_channel = change(channels[64], levels=f"even {bits}", bits=bits)
        found[f"KIVI in {bits} bits, blocks of 64, own block exact"] = Form(by_channel, values)
        found[f"KIVI in {bits} bits, blocks of 64, own block and the one before exact"] = Form(
            change(by_channel, blocks_back=1), change(values, blocks_back=1)
        )
    for name in ("int4", "int4, last 32 exact", "by channel in 64"):
        found[f"K {name}, first 4 exact"] = Form(keys[name], None, exact_tokens=4)
        found[f"K {name}, first and last layer int8"] = Form(keys[name], None, wide_layers=1)
    found["V int4"], found["V int4, last 32 exact"] = (Form(None, x) for x in (now, change(now, exact_last=32)))
    return found


def describe(name: str, form: Form, model: Any, exact: np.ndarray, found: np.ndarray) -> dict[str, Any]:
    loss, root = exact[0].mean(), len(found[0]) ** 0.5
    row: dict[str, Any] = {"form": name}
    for what, more in (("cost", found[0] - exact[0]), ("divergence", found[1])):
        row[f"{what}, %"] = float(100 * more.mean() / loss)
        row[f"{what}'s error"] = float(100 * more.std(ddof=1) / root / loss)
    lengths = {"bits": math.inf, "bits at 1k": 1024, "bits at 8k": 8192}
    return row | {what: form.count_bits(model, length) for what, length in lengths.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "gemma3"), default="smollm2")
    parser.add_argument("--documents", type=int, default=8, help="half of them English, half source")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a document")
    parser.add_argument("--forms", nargs="+", choices=list(list_forms()), metavar="NAME", help="all, if none is named")
    arguments = parser.parse_args()
    model, text = load_smollm2() if arguments.model == "smollm2" else load_gemma3()
    model = unroll(model)
    documents = read_documents(text).reshape(2, 4, -1)[:, : arguments.documents // 2, : arguments.length]
    documents = documents.reshape(-1, documents.shape[-1])
    if arguments.model == "gemma3":
        documents[:, 1:], documents[:, 0] = documents[:, :-1].copy(), model.config.bos_id
    exact = [run(model, tokens, EXACT) for tokens in documents]
    losses = measure(model, documents, EXACT, exact)
    file, table_name = RESULTS / "four_bits.json", f"{arguments.model}, {len(documents)} x {documents.shape[1]}"
    for name, form in list_forms().items():
        if arguments.forms and name not in arguments.forms:
            continue
        row = describe(name, form, model, losses, measure(model, documents, form, exact))
        print(row, flush=True)
        tables = json.loads(file.read_text())["rows"] if file.exists() else {}
        before = [x for x in tables.get(table_name, []) if x["form"] != name]
        save("four_bits", tables | {table_name: [*before, row]})
    table(json.loads(file.read_text())["rows"][table_name])


INT8 = Codec(bits=8, group=None)
WIDE, EXACT = Form(INT8, INT8), Form(None, None)


if __name__ == "__main__":
    main()

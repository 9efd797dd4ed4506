"""What layers cannot be stored together, refused by name: the rules that `CacheConfig` holds its fields against."""

from collections.abc import Sequence

from jaxkv._core.config.byte_sizes import ByteSizes
from jaxkv._core.config.kv_packing import can_hold
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import MOST_INDEX
from pallas_kernels.common.quantization import QUANTIZED


def check_formats(config: ByteSizes) -> None:
    """Raises ValueError if a layer cannot be stored in its format."""
    for i, layer in enumerate(config.layers):
        kind = config.kind(i)
        if layer.is_recurrent:
            continue
        if any(size % kind.numbers_per_entry for size in (config.padded_head_dim(i), layer.row_dim, layer.value_dim)):
            raise ValueError(
                f"{kind.name} stores two numbers to a byte, so head_dim and head_dim_multiple must be even, but "
                f"layer {i} has {layer.row_dim} and {config.head_dim_multiple}: choose another dtype for it."
            )
        if not can_hold(layer, kind):
            rows = "latent" if layer.v_head_dim is None else "one with v_head_dim"
            raise ValueError(
                f"{kind.name} stores keys and values of one width, but layer {i} is {rows}, whose rows hold both: "
                'choose "int4" or "int8" for it.'
            )
        if layer.rotate and (not kind.is_quantized or layer.row_rank is not None):
            rows = "latent" if layer.v_head_dim is None else "one with v_head_dim, of rows"
            what = f"stored in {kind.name}" if layer.row_rank is None else rows
            raise ValueError(
                f"CacheConfig.layers[{i}].rotate is for heads in a quantized format, but the layer is {what}: "
                "leave it out, or choose int8, say."
            )


def check_recurrent(config: ByteSizes) -> None:
    """Raises ValueError if layers that keep a state cannot be stored so."""
    recurrent = config.recurrent_layers
    if recurrent and len(recurrent) == len(config.layers):
        raise ValueError(
            "CacheConfig.layers must name at least one attention layer, whose tables count the tokens of rows, but "
            "all of them are recurrent."
        )
    if recurrent and config.layout == "contiguous":
        raise ValueError(
            f"CacheConfig.layers[{recurrent[0]}] is one {config.layers[recurrent[0]].retention}, which has a pool of "
            'its own, and cannot be stored with layout="contiguous": leave it out.'
        )


def check_residual(config: ByteSizes, layers: Sequence[LayerConfig], length: int) -> None:
    """Raises ValueError if the newest `length` tokens of some of a model's layers cannot be stored apart."""
    if not any(layer.keeps_quantized(config.dtype) for layer in layers):
        raise ValueError(
            f"CacheConfig.residual_length={length} is for quantized layers, and no layer is one: leave it out, or "
            f"give CacheConfig.dtype a quantized format, one of {', '.join(QUANTIZED)}."
        )
    if config.layout == "contiguous":
        raise ValueError(
            f"CacheConfig.residual_length={length} frees the blocks of older tokens, and with "
            'layout="contiguous" no block is freed: leave one out.'
        )
    for i, layer in enumerate(layers):
        owner = layer if layer.shares_with is None else layers[layer.shares_with]
        if not owner.keeps_quantized(config.dtype):
            continue
        wrong = [name for name in ("chunk", "evict", "index_dim") if getattr(layer, name) is not None]
        if layer.window is not None and layer.window <= length:
            wrong.append("window")
        if wrong:
            raise ValueError(
                f"CacheConfig.residual_length={length} does not go with {wrong[0]}={getattr(layer, wrong[0])!r} of "
                f'layer {i}: give that layer dtype="bfloat16", or leave residual_length out.'
            )


def check_snapshots(config: ByteSizes, every: int) -> None:
    """Raises ValueError if states cannot stay every so many tokens."""
    if not config.recurrent_layers:
        raise ValueError(
            f"CacheConfig.snapshot_every={every} is for recurrent layers, and all layers are attention layers, "
            "which can go back to any token: leave it out."
        )
    if every % config.block_size:
        raise ValueError(
            f"CacheConfig.snapshot_every must be a multiple of block_size = {config.block_size}, not {every}."
        )
    if config.is_endless:
        raise ValueError(
            f"CacheConfig.snapshot_every={every} counts tokens up to max_seq_len, but rows of these layers may "
            "grow beyond, as no attention layer keeps all tokens: leave it out."
        )


def check_evicting(config: ByteSizes) -> None:
    """Raises ValueError if layers that evict lack their own tables, or rows with bounds have one block."""
    evicting = [i for i, layer in enumerate(config.layers) if layer.evict is not None]
    if evicting and (config.contiguous or config.stacked):
        what = "stacked=True, in which layers share tables" if config.stacked else 'layout="contiguous"'
        raise ValueError(
            f"CacheConfig.layers[{evicting[0]}].evict frees blocks of a table of its own, and there is none "
            f"with {what}: leave one out."
        )
    if config.contiguous and any(layer.bounds for layer in config.layers):
        raise ValueError(
            'LayerConfig.bounds tell a row\'s blocks apart, and with layout="contiguous" it has one: leave one out.'
        )


def check_compressed(config: ByteSizes) -> None:
    """Raises ValueError if blocks do not hold whole entries of layers that compress."""
    for i, layer in enumerate(config.layers):
        if layer.compress_ratio is not None and config.block_size % layer.compress_ratio:
            name, way_out = ("max_seq_len", "") if config.contiguous else ("block_size", ", or leave block_size out")
            raise ValueError(
                f"CacheConfig.{name}={config.block_size} holds no whole entries of layer {i}, which has "
                f"compress_ratio={layer.compress_ratio}: choose a multiple of it{way_out}."
            )


def check_indices(config: ByteSizes) -> None:
    """Raises ValueError if an int32 cannot count the blocks, or the entries of a table."""
    pairs = zip(config.groups, config.group_blocks, strict=True)
    most = max((blocks + 1) * (len(layers) if config.stacked else 1) for layers, blocks in pairs)
    if most > MOST_INDEX:
        raise ValueError(
            f"A pool would have {most} blocks, null blocks included, but indices are int32 and end at "
            f"{MOST_INDEX}: choose fewer, or a larger block_size."
        )
    widths = zip(config.table_widths, config.group_heads, strict=True)
    width, heads = max(widths, key=lambda both: both[0] * both[1])
    if (entries := config.max_seqs * width * heads) > MOST_INDEX:
        raise ValueError(
            f"A table of max_seqs={config.max_seqs} rows of {width} blocks has {entries} entries, "
            f"but there can be {MOST_INDEX}: choose a smaller max_seqs or max_seq_len, or a larger block_size."
        )


def check_shared(config: ByteSizes, i: int, layer: LayerConfig) -> None:
    """Raises ValueError if a layer cannot read what the one that it names keeps."""
    if layer.shares_with is None:
        return
    if layer.shares_with >= i or config.layers[layer.shares_with].shares_with is not None:
        raise ValueError(
            f"CacheConfig.layers[{i}].shares_with must be an earlier layer that stores keys and values of its own, "
            f"not {layer.shares_with}."
        )
    owner = config.layers[layer.shares_with]
    if owner.is_recurrent:
        raise ValueError(
            f"CacheConfig.layers[{i}] shares with layer {layer.shares_with}, {owner.retention}, which has no keys "
            "and values to share."
        )
    shape = ("num_kv_heads", "head_dim", "v_head_dim", "rank")
    alike = all(getattr(layer, name) == getattr(owner, name) for name in shape)
    own = (layer.dtype, layer.rotate, layer.evict, layer.index_dim, layer.bounds)
    if not alike or own != (None, None, None, None, False):
        raise ValueError(
            f"CacheConfig.layers[{i}] shares with layer {layer.shares_with}, so it must have the same "
            "num_kv_heads and head_dim (v_head_dim too; if latent, rank and rope_dim), and no dtype or rotate "
            "of its own, nor evict, index_dim or bounds."
        )
    if (reason := owner.retention.reader_refusal(layer.retention)) is not None:
        raise ValueError(f"CacheConfig.layers[{i}] shares with layer {layer.shares_with}, {reason}.")

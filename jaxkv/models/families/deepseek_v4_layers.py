"""What DeepSeek V4's config.json says of attention: sizes, kinds of layers, and their rotary embeddings."""

from typing import Any

from jaxkv.models.config import CompressedConfig, CompressorConfig, DecoderConfig, IndexConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, SLIDING, Fields
from jaxkv.models.families.family import make_part, read_layer_kinds
from jaxkv.models.rope import Rope
from jaxkv.models.rope_fields import parse_ropes, render_rope

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # by what published configs call their compress_ratios
RATES = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
MAIN, COMPRESS, PARTIAL = "main", "compress", "partial_rotary_factor"


def read_attention(fields: Fields, head_dim: int) -> CompressedConfig:
    """Reads the sizes of attention. The entries that rotate are written as a number, or as a share of a head."""
    size, share = fields.size("qk_rope_head_dim", None, most=head_dim), fields.number(PARTIAL, None, above=0)
    found = int(head_dim * (64 / 512 if share is None else share)) if size is None or share is not None else size
    if size not in (None, found) or found % 2 or not 0 < found <= head_dim:
        given = fields.refuse(PARTIAL, share, f"a share of head_dim, {head_dim}, that is even")
        raise given if size is None else fields.refuse("qk_rope_head_dim", size, "an even number, as a share the same")
    return CompressedConfig(
        rope_dim=found,
        query_rank=fields.size("q_lora_rank", 1024, most=MOST_DIM),
        out_groups=fields.size("o_groups", 8, most=MOST_HEADS),
        out_rank=fields.size("o_lora_rank", 1024, most=MOST_DIM),
    )


def read_ropes(fields: Fields, max_seq_len: int, head_dim: int, rope_dim: int) -> dict[str, Rope]:
    """Reads the rotary embeddings of layers with a window alone, and of those that compress tokens: both together, or
    the scaling of the latter beside both bases."""
    theta, other = (fields.number(name, x, least=1) for name, x in (("rope_theta", 1e4), ("compress_rope_theta", 16e4)))
    name = "rope_parameters" if fields.left.get("rope_parameters") is not None else "rope_scaling"
    written = fields.take(name, None)
    given = fields.nest({} if written is None else written, name)
    if MAIN in given.left and COMPRESS in given.left:
        both = {label: fields.nest(given.left[label], f"{label} of {name}") for label in (MAIN, COMPRESS)}
    else:
        share = {PARTIAL: rope_dim / head_dim}
        scaled = given.left | share | {"rope_theta": other}
        if "yarn" in (scaled.get("rope_type"), scaled.get("type")):  # as published: angles are scaled, and no more
            scaled.setdefault("attention_factor", 1.0)
        both = {MAIN: fields.nest(share, name), COMPRESS: fields.nest(scaled, name)}
    ropes = {}
    for label, parameters in both.items():
        if int(head_dim * (share := parameters.number(PARTIAL, 1.0, above=0))) != rope_dim:
            raise parameters.refuse(PARTIAL, share, f"{rope_dim / head_dim}, the share of a head's entries that rotate")
        own = fields.nest({name: parameters.left}, label)
        ropes[label] = parse_ropes(own, max_seq_len, theta=theta, interleaved=True)[FULL]
    return ropes


def read_layers(fields: Fields, num_layers: int) -> list[CompressorConfig | None]:
    """Reads what compresses tokens in each layer; None: nothing. Kinds of layers are written by name, or in published
    files by a number, behind which stand those of other layers."""
    rates, ratios = fields.take("compress_rates", None), fields.take("compress_ratios", None)
    given = fields.nest({} if rates is None else rates, "compress_rates")
    found = {kind: given.size(kind, fields.size(name, rate, least=2), least=2) for kind, (name, rate) in RATES.items()}
    given.finish()
    index = make_part(
        IndexConfig, "indexers", fields, heads=fields.size("index_n_heads", 64, most=MOST_HEADS),
        dim=fields.size("index_head_dim", 128, most=MOST_DIM), top_k=fields.size("index_topk", 512, most=MOST_DIM),
    )  # fmt: skip
    default = ([HEAVY] * 2 + [HEAVY, SPARSE] * num_layers)[:num_layers]
    if ratios is not None:
        own = ratios[:num_layers] if isinstance(ratios, list) else []
        if len(own) < num_layers or not all(type(x) is int and x in KINDS for x in own):
            raise fields.refuse("compress_ratios", ratios, f"0, 4 or 128 for each of the {num_layers} layers")
        default = [KINDS[x] for x in own]
    kinds = read_layer_kinds(fields, "layer_types", default, (SLIDING, SPARSE, HEAVY))
    parts = {
        SLIDING: None,
        SPARSE: CompressorConfig(ratio=found[SPARSE], overlaps=2, index=index),
        HEAVY: CompressorConfig(ratio=found[HEAVY]),
    }
    return [parts[kind] for kind in kinds]


def render_layers(config: DecoderConfig) -> dict[str, Any]:
    """Writes what `read_attention`, `read_ropes` and `read_layers` read."""
    own, compressors = config.compressed, [config.block(i).compressor for i in range(config.num_layers)]
    assert own is not None
    kinds = [SLIDING if x is None else HEAVY if x.index is None else SPARSE for x in compressors]
    rates = {kind: x.ratio for kind, x in zip(kinds, compressors, strict=True) if x is not None}
    index, share = (
        next((x.index for x in compressors if x and x.index), None),
        {PARTIAL: own.rope_dim / config.head_dim},
    )
    ropes = {MAIN: Rope(interleaved=True), COMPRESS: Rope(theta=16e4, interleaved=True)}
    ropes |= {MAIN if kind == SLIDING else COMPRESS: rope for kind, rope in zip(kinds, config.ropes, strict=True)}
    return share | {
        "q_lora_rank": own.query_rank, "o_groups": own.out_groups, "o_lora_rank": own.out_rank,
        "sliding_window": config.windows[0], "layer_types": kinds,
        "compress_rates": {kind: rates.get(kind, rate) for kind, (_, rate) in RATES.items()},
        "rope_parameters": {label: render_rope(rope) | share for label, rope in ropes.items()},
    } | ({} if index is None else {
        "index_n_heads": index.heads, "index_head_dim": index.dim, "index_topk": index.top_k,
    })  # fmt: skip

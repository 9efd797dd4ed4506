"""Gemma 4: full layers have wider heads, fewer of keys and values, and a rotation of a share of their pairs.

Norm weights are around one, heads' values are normalised too, and logits are not scaled. Where a model has them: keys
that are values too, in full layers; last layers that read the keys and values of an earlier one of their kind; further
embeddings for each layer; experts beside the MLP. Of models for images and sound, the text model is read. Refuses
attention in both directions but for images, other layer types, and layers that read those of none.
"""

from typing import Any

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv.models.config import DecoderConfig, ExpertsConfig
from jaxkv.models.config_fields import FULL, MOST_DIM, MOST_HEADS, SLIDING, Fields, first_given
from jaxkv.models.families import gemma_shared
from jaxkv.models.families.family import Family, half, read_num_layers, read_windows, transpose
from jaxkv.models.families.nested import make_nested
from jaxkv.models.mixers.block_config import BlockConfig
from jaxkv.models.rope_fields import SCALINGS, parse_ropes

TENSORS: dict[str, Any] = gemma_shared.TENSORS | {
    "scale": "layer_scalar",
    "mlp_own_norm": "post_feedforward_layernorm_1.weight",
    "experts_own_norm": "post_feedforward_layernorm_2.weight",
    "experts.norm": "pre_feedforward_layernorm_2.weight",
    "experts.router": "router.proj.weight",
    "experts.router_norm": "router.scale",
    "experts.weight_scale": "router.per_expert_scale",
    "experts.gate": half("experts.gate_up_proj", 0, transposed=True),
    "experts.up": half("experts.gate_up_proj", 1, transposed=True),
    "experts.down": transpose("experts.down_proj"),
}
ROPES = {SLIDING: {"rope_type": "default", "rope_theta": 1e4},
         FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}  # fmt: skip
# What transformers takes for fields that a text_config leaves out.
DEFAULTS = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "max_position_embeddings": 131_072, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), gemma_shared.read_common(fields, num_kv_heads=4)
    if fields.left.get("use_bidirectional_attention") == "vision":  # for the tokens of an image alone
        fields.take("use_bidirectional_attention")
    layers = gemma_shared.share_layers(fields, _read_layers(fields, num_layers, common))
    values_are_keys, is_wide = fields.flag("attention_k_eq_v", False), fields.flag("use_double_wide_mlp", False)
    ropes = parse_ropes(fields, common["max_seq_len"], theta=1e6, local_theta=1e4, default=ROPES,
                        scalings=(*SCALINGS, "proportional"))  # fmt: skip
    wide, experts = 2 * common["mlp_dim"], _read_experts(fields)
    return DecoderConfig(
        **common, layers=layers, ropes=tuple(ropes[FULL if x.window is None else SLIDING] for x in layers),
        blocks=tuple(
            BlockConfig(
                values_are_keys=values_are_keys and layer.window is None and layer.shares_with is None,
                mlp_dim=wide if is_wide and layer.shares_with is not None else None,
            )
            for layer in layers
        ),
        experts=experts, expert_layers=(True,) * num_layers if experts else (),
        per_layer=gemma_shared.read_per_layer(fields), layer_scale=True,
    )  # fmt: skip


def _read_layers(fields: Fields, num_layers: int, common: dict[str, Any]) -> list[LayerConfig]:
    """Reads each layer's window and heads, which the base `common` loses."""
    pattern = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(num_layers)]
    types = first_given(fields.take("layer_types", None), pattern)
    if isinstance(types, list) and types:
        types = [*types[:-1], FULL]  # as transformers has it
    fields.left["layer_types"] = types
    windows = read_windows(fields, [FULL] * num_layers, fields.size("sliding_window", 512, None))
    kv_heads, head_dim = common.pop("num_kv_heads"), common.pop("head_dim")
    wide = {"head_dim": fields.size("global_head_dim", 512, None, most=MOST_DIM) or head_dim}
    few = fields.size("num_global_key_value_heads", None, most=MOST_HEADS)
    wide |= {"num_key_value_heads": few} if few and fields.left.get("attention_k_eq_v") else {}
    given = fields.take("per_layer_config", None)
    if given is None:
        given = {str(i): wide for i, window in enumerate(windows) if window is None}
    each = fields.nest(given, "per_layer_config")
    layers = []
    for i, window in enumerate(windows):
        own = each.nest(each.take(str(i), {}), f"layer {i}")
        layers.append(LayerConfig(
            num_kv_heads=own.size("num_key_value_heads", kv_heads, most=MOST_HEADS),
            head_dim=own.size("head_dim", head_dim, most=MOST_DIM), window=window,
        ))  # fmt: skip
        own.finish()
    each.finish()
    return layers


def _read_experts(fields: Fields) -> ExpertsConfig | None:
    fields.take("expert_intermediate_size", None)  # an earlier name, unused
    limits = {"num_experts": MOST_HEADS, "top_k_experts": MOST_HEADS, "moe_intermediate_size": MOST_DIM}
    sizes = {name: fields.size(name, None, most=most) for name, most in limits.items()}
    if not fields.flag("enable_moe_block", False):
        return None
    if missing := [name for name, size in sizes.items() if size is None]:
        raise ValueError(f"{fields.where} lacks the field {missing[0]}, which enable_moe_block needs.")
    count, per_token, mlp_dim = sizes.values()
    if per_token > count:
        raise fields.refuse("top_k_experts", per_token, f"at most the num_experts, {count}")
    return ExpertsConfig(count=count, per_token=per_token, mlp_dim=mlp_dim, normalise=True, beside_mlp=True)


def render(config: DecoderConfig) -> dict[str, Any]:
    wide, experts = any(block.mlp_dim for block in config.blocks), config.experts
    shapes = {str(i): {"head_dim": layer.head_dim, "num_key_value_heads": layer.num_kv_heads}
              for i, layer in enumerate(config.layers)}  # fmt: skip
    fields = gemma_shared.render_common(config) | {
        "per_layer_config": shapes, "use_double_wide_mlp": wide, "enable_moe_block": experts is not None,
        "attention_k_eq_v": any(block.values_are_keys for block in config.blocks),
    }  # fmt: skip
    return fields if experts is None else fields | {
        "num_experts": experts.count, "top_k_experts": experts.per_token, "moe_intermediate_size": experts.mlp_dim,
    }  # fmt: skip


FAMILY = Family(
    parse=parse, render=render, architectures=("Gemma4ForCausalLM",), tensors=TENSORS,
    name_tensor=gemma_shared.name_tensor,
)  # fmt: skip
NESTED_FAMILY = make_nested(
    {"gemma4_text": FAMILY}, "Gemma4ForConditionalGeneration", towers=("vision", "audio"), defaults=DEFAULTS
)

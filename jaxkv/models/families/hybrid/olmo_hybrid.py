"""OLMo hybrid: OLMo 2 with gated delta nets in three of four layers, whose norms stand before them.

Their projections are apart, and what is learned of a value may be more than all of it (negative eigenvalues). A
`rope_theta` of null is no rotation, as in the published models. Refuses delta nets without a gate.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, Fields
from jaxkv.models.families.family import Family, read_num_layers, render_common
from jaxkv.models.families.hybrid_common import (
    delta_names,
    every_fourth,
    join_convs,
    kinds_of,
    mix,
    mixer_of,
    read_delta,
    read_kinds,
    render_delta,
)
from jaxkv.models.families.postnorm.olmo2 import TENSORS as OLMO, read_olmo
from jaxkv.models.rope import Rope
from jaxkv.models.rope_fields import parse_ropes, render_rope

NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "gate": "g_proj", "beta": "b_proj", "decay": "a_proj",
         "norm": "o_norm", "out": "o_proj"}  # fmt: skip
TENSORS = OLMO | delta_names("linear_attn")
TENSORS |= {f"mixer.{name}": f"linear_attn.{stored}.weight" for name, stored in NAMES.items()}
# Of the norms of delta nets' layers, in published checkpoints.
RENAMED = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
INITIAL = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
STILL = Rope(partial_rotary_factor=0.0)


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_olmo(fields, norm_eps=1e-6)
    kinds = every_fourth(num_layers)
    kinds = read_kinds(fields, kinds if FULL in kinds else [*kinds[:-1], FULL])
    for name in INITIAL:
        fields.take(name, None)
    fields.must_be("linear_use_gate", True)
    heads = common["num_heads"]
    delta = read_delta(
        fields, heads=(heads, heads), key_dim=int(0.75 * common["embed_dim"] / heads), value_dim=None, norm_eps=1e-5,
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
    )  # fmt: skip
    return DecoderConfig(
        **common, blocks=mix(kinds, delta), ropes=(_read_rope(fields, common["max_seq_len"]),) * num_layers
    )


def _read_rope(fields: Fields, max_seq_len: int) -> Rope:
    written = fields.left.get("rope_parameters")
    inside = isinstance(written, dict) and written.get("rope_theta", 0) is None
    if not inside and not (written is None and fields.left.get("rope_theta", 0) is None):
        return parse_ropes(fields, max_seq_len, theta=10_000.0)[FULL]
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        fields.take(name, None)
    return STILL


def render(config: DecoderConfig) -> dict[str, Any]:
    delta, rope = mixer_of(config), config.ropes[0]
    rotation = {"rope_type": "default", "rope_theta": None} if rope == STILL else render_rope(rope)
    return render_common(config) | render_delta(delta) | {
        "pad_token_id": None, "rope_parameters": rotation, "attention_bias": config.out_bias,
        "layer_types": kinds_of(config), "linear_allow_neg_eigval": delta is None or delta.beta_scale == 2.0,
    }  # fmt: skip


def name_tensor(name: str, config: Any) -> str:
    """Returns a tensor's name in transformers."""
    for published, own in RENAMED.items():
        name = name.replace(f".{published}.", f".{own}.")
    return name


FAMILY = Family(
    parse=parse, render=render, architectures=("OlmoHybridForCausalLM",), tensors=TENSORS, name_tensor=name_tensor,
    repack=join_convs,
)  # fmt: skip

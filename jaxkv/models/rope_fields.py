"""Rotary embeddings as a config.json writes them, in the old form (`rope_scaling`) and the new (`rope_parameters`)."""

from typing import Any

from jaxkv.models.config_fields import FULL, SLIDING, Fields, first_given
from jaxkv.models.rope import Rope

SCALINGS = ("default", "linear", "llama3")
YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def parse_ropes(
    fields: Fields, max_seq_len: int, *, theta: float, local_theta: float | None = None, yarn: bool = False,
    default: dict[str, Any] | None = None, interleaved: bool = False,
) -> dict[str, Rope]:  # fmt: skip
    """The rotary embedding of each kind of layer.

    Args:
      theta: where the config says none.
      local_theta: the same for layers with a window, where a family gives them a rotation of their own.
      yarn: whether the family knows that scaling.
      default: what it takes where there is nothing.
      interleaved: how it pairs entries.
    """
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    if new is not None and old is not None:
        raise fields.refuse("rope_scaling", old, "it only where there are no rope_parameters, its new name")
    theta = fields.number("rope_theta", theta, least=1)
    scalings = (*SCALINGS, "yarn") if yarn else SCALINGS

    def parse(parameters: Any, theta: float) -> Rope:
        given = Fields(first_given(parameters, {}), f"The rotary embedding in {fields.where}")
        return _parse(given, scalings, theta, max_seq_len, interleaved)

    if local_theta is None:
        rope = parse(first_given(new, old, default, {}), theta)
        return {FULL: rope, SLIDING: rope}
    # Gemma 3 rescales only what its full-attention layers see; the others keep short waves of their own.
    local_theta = fields.number("rope_local_base_freq", local_theta, least=1)
    kinds = Fields({FULL: first_given(old, {})} if new is None else new, f"rope_parameters in {fields.where}")
    ropes = {FULL: parse(kinds.take(FULL, None), theta), SLIDING: parse(kinds.take(SLIDING, None), local_theta)}
    kinds.finish()
    return ropes


def _parse(fields: Fields, scalings: tuple[str, ...], theta: float, max_seq_len: int, interleaved: bool) -> Rope:
    old_name = fields.take("type", "default")
    scaling = fields.take("rope_type", old_name)
    if not isinstance(scaling, str) or scaling not in scalings:
        raise fields.refuse("rope_type", scaling, ", ".join(scalings))
    if (partial := fields.number("partial_rotary_factor", None)) not in (None, 1.0):
        raise fields.refuse("partial_rotary_factor", partial, "1.0: all of a head's entries are rotated")
    options: dict[str, Any] = {"scaling": scaling, "interleaved": interleaved}
    if scaling != "default":
        options["factor"] = fields.number("factor", above=0)
    if scaling == "llama3":
        options["low_freq_factor"] = fields.number("low_freq_factor", above=0)
        options["high_freq_factor"] = fields.number("high_freq_factor", above=options["low_freq_factor"])
    if scaling == "yarn":
        values = {name: fields.number(name, None, above=0) for name in YARN}
        options |= {name: value for name, value in values.items() if value is not None}
        options["truncate"] = fields.flag("truncate", True)
    if scaling in ("llama3", "yarn"):
        options["original_max_position"] = fields.size("original_max_position_embeddings", max_seq_len)
    rope = Rope(theta=fields.number("rope_theta", theta, least=1), **options)
    fields.finish()
    return rope


def render_rope(rope: Rope) -> dict[str, Any]:
    """The fields of one rotary embedding, in the new form."""
    fields: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "default":
        fields["factor"] = rope.factor
    if rope.scaling == "llama3":
        fields["low_freq_factor"] = rope.low_freq_factor
        fields["high_freq_factor"] = rope.high_freq_factor
    if rope.scaling == "yarn":
        values = {name: getattr(rope, name) for name in (*YARN, "truncate")}
        fields |= {name: value for name, value in values.items() if value is not None}
    if rope.scaling in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.original_max_position
    return fields

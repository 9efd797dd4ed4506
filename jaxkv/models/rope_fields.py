"""Reads and writes the rotary embeddings of a config.json, as `rope_scaling` (old) or `rope_parameters` (new)."""

from typing import Any

from jaxkv._core.config.validation import integer
from jaxkv.models.config_fields import FULL, SLIDING, Fields, first_given
from jaxkv.models.rope import Rope

SCALINGS = ("default", "linear", "llama3", "yarn")
YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def parse_ropes(
    fields: Fields, max_seq_len: int, *, theta: float, local_theta: float | None = None,
    default: dict[str, Any] | None = None, interleaved: bool = False,
) -> dict[str, Rope]:  # fmt: skip
    """Returns the rotary embedding of each kind of layer.

    Args:
      theta: default of `rope_theta`.
      local_theta: the same for layers with a sliding window, where a family gives them a rotation of their own.
      default: the family's default parameters.
      interleaved: whether the family pairs adjacent entries.
    """
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    if new is not None and old is not None:
        raise fields.refuse("rope_scaling", old, "it only where there are no rope_parameters, its new name")
    theta = fields.number("rope_theta", theta, least=1)
    # Phi 3 introduced it beside the other fields; transformers gives it priority there.
    original = fields.size("original_max_position_embeddings", None)

    def parse(parameters: Any, theta: float) -> Rope:
        given = fields.nest(first_given(parameters, {}), "The rotary embedding")
        return _parse(given, theta, max_seq_len, original, interleaved)

    if local_theta is None:
        rope = parse(first_given(new, old, default, {}), theta)
        return {FULL: rope, SLIDING: rope}
    # Gemma 3 scales only the rotation of its full-attention layers; the others have short waves of their own.
    local_theta = fields.number("rope_local_base_freq", local_theta, least=1)
    kinds = fields.nest({FULL: first_given(old, {})} if new is None else new, "rope_parameters")
    ropes = {FULL: parse(kinds.take(FULL, None), theta), SLIDING: parse(kinds.take(SLIDING, None), local_theta)}
    kinds.finish()
    return ropes


def _parse(fields: Fields, theta: float, max_seq_len: int, original: int | None, interleaved: bool) -> Rope:
    old_name = fields.take("type", "default")
    scaling = fields.take("rope_type", old_name)
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        raise fields.refuse("rope_type", scaling, ", ".join(SCALINGS))
    if (partial := fields.number("partial_rotary_factor", None)) not in (None, 1.0):
        raise fields.refuse("partial_rotary_factor", partial, "1.0: all of a head's entries are rotated")
    options: dict[str, Any] = {"scaling": scaling, "interleaved": interleaved}
    if scaling != "default":
        options["factor"] = _read_factor(fields, scaling, max_seq_len)
    if scaling == "llama3":
        options["low_freq_factor"] = fields.number("low_freq_factor", above=0)
        options["high_freq_factor"] = fields.number("high_freq_factor", above=options["low_freq_factor"])
    if scaling == "yarn":
        values = {name: fields.number(name, None, above=0) for name in YARN}
        options |= {name: value for name, value in values.items() if value is not None}
        options["truncate"] = fields.flag("truncate", True)
    trained = fields.size("original_max_position_embeddings", max_seq_len)  # written beside other scalings too
    if scaling in ("llama3", "yarn"):
        options["original_max_position"] = trained if original is None else original
    rope = Rope(theta=fields.number("rope_theta", theta, least=1), **options)
    fields.finish()
    return rope


def _read_factor(fields: Fields, scaling: str, max_seq_len: int) -> float:
    """Reads the factor that extends positions; with YaRN it may be missing, and then follows from the lengths."""
    if scaling == "yarn" and "factor" in fields.left and fields.left["factor"] is None:
        fields.take("factor")
        trained = fields.left.get("original_max_position_embeddings", max_seq_len)
        return max_seq_len / integer(f"original_max_position_embeddings in {fields.where}", trained, least=1)
    return fields.number("factor", above=0)


def render_rope(rope: Rope) -> dict[str, Any]:
    """Returns the fields of one rotary embedding, in the new form."""
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

"""Reads and writes the rotary embeddings of a config.json, as `rope_scaling` (old) or `rope_parameters` (new)."""

from typing import Any

from jaxkv._core.config.validation import integer, real
from jaxkv.models.config_fields import FULL, SLIDING, Fields, first_given
from jaxkv.models.rope import Rope

SCALINGS = ("default", "linear", "llama3", "yarn")
YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def parse_ropes(
    fields: Fields,
    max_seq_len: int,
    *,
    theta: float,
    local_theta: float | None = None,
    default: dict[str, Any] | None = None,
    interleaved: bool = False,
    partial: float | None = None,
    scalings: tuple[str, ...] = SCALINGS,
) -> dict[str, Rope]:
    """Returns the rotary embedding of each kind of layer.

    Args:
      theta: default of `rope_theta`.
      local_theta: the same for layers with a sliding window, where a family gives them a rotation of their own.
      default: the family's default parameters.
      interleaved: whether the family pairs adjacent entries.
      partial: default of `partial_rotary_factor`, in a family that honours it.
      scalings: the values of `rope_type` that the family honours.
    """
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    new = default if new is None and old is None and local_theta is not None else new
    if new is not None and old is not None:
        raise fields.refuse("rope_scaling", old, "it only where there are no rope_parameters, its new name")
    theta = fields.number("rope_theta", theta, least=1)
    # Phi 3 introduced it beside the other fields; transformers gives it priority there.
    original = fields.size("original_max_position_embeddings", None)
    partial = None if partial is None else fields.number("partial_rotary_factor", partial, least=0)

    name = "rope_scaling" if new is None and old is not None else "rope_parameters"

    def parse(parameters: Any, theta: float) -> Rope:
        given = fields.nest(first_given(parameters, {}), name)
        return _parse(given, theta, max_seq_len, original, interleaved, partial, scalings)

    if local_theta is None:
        rope = parse(first_given(new, old, default, {}), theta)
        return {FULL: rope, SLIDING: rope}
    # Gemma 3 scales only the rotation of its full-attention layers; the others have short waves of their own.
    local_theta = fields.number("rope_local_base_freq", local_theta, least=1)
    kinds = fields.nest({FULL: first_given(old, {})} if new is None else new, "rope_parameters")
    ropes = {FULL: parse(kinds.take(FULL, None), theta), SLIDING: parse(kinds.take(SLIDING, None), local_theta)}
    kinds.finish()
    return ropes


def _parse(
    fields: Fields,
    theta: float,
    max_seq_len: int,
    original: int | None,
    interleaved: bool,
    partial: float | None,
    scalings: tuple[str, ...],
) -> Rope:
    old_name = fields.take("type", "default")
    scaling = fields.take("rope_type", old_name)
    scaling = "longrope" if scaling == "su" else scaling  # its first name
    if not isinstance(scaling, str) or scaling not in scalings:
        raise fields.refuse("rope_type", scaling, ", ".join(scalings))
    partial = 1.0 if scaling == "proportional" else partial
    share = fields.number("partial_rotary_factor", 1.0 if partial is None else partial, None)
    if share is not None and (not 0 < share <= 1 or (partial is None and share != 1)):
        honoured = "1.0: all of a head's entries are rotated" if partial is None else "a share above 0, up to 1"
        raise fields.refuse("partial_rotary_factor", share, honoured)
    options: dict[str, Any] = {
        "scaling": scaling, "interleaved": interleaved, "partial_rotary_factor": first_given(share, partial, 1.0),
    }  # fmt: skip
    if scaling == "longrope":
        return _parse_longrope(fields, options, theta, max_seq_len, original)
    if scaling == "proportional":
        options["factor"] = fields.number("factor", 1.0, above=0)
    elif scaling != "default":
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


def _parse_longrope(
    fields: Fields, options: dict[str, Any], theta: float, max_seq_len: int, original: int | None
) -> Rope:
    """Reads LongRoPE. Of its two lists of divisors, the long one holds where the model reads more than it was first
    trained for: keys in a cache cannot be rotated again when a text grows beyond that."""
    trained = fields.size("original_max_position_embeddings", max_seq_len if original is None else original)
    trained = trained if original is None else original
    divisors = {name: _read_divisors(fields, name) for name in ("short_factor", "long_factor")}
    rope = Rope(
        theta=fields.number("rope_theta", theta, least=1),
        original_max_position=trained,
        divisors=divisors["long_factor" if max_seq_len > trained else "short_factor"],
        factor=fields.number("factor", max_seq_len / trained, above=0),
        attention_factor=fields.number("attention_factor", None, above=0),
        **options,
    )
    fields.finish()
    return rope


def _read_divisors(fields: Fields, name: str) -> tuple[float, ...]:
    values = fields.take(name)
    if not isinstance(values, list) or not values:
        raise fields.refuse(name, values, "a list of numbers, one for each rotated pair")
    return tuple(real(f"{name} in {fields.where}", value, above=0) for value in values)


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
    if rope.scaling == "longrope":
        fields |= {"short_factor": list(rope.divisors), "long_factor": list(rope.divisors)}
        fields |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    if rope.partial_rotary_factor != 1:
        fields["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.scaling in ("llama3", "yarn", "longrope"):
        fields["original_max_position_embeddings"] = rope.original_max_position
    return fields

"""A Hugging Face config.json to a `DecoderConfig` and back: a field is honoured, known to be harmless, or refused."""

from collections.abc import Mapping
from typing import Any

from jaxkv._core.config.validation import shown
from jaxkv.models.checkpoint_formats import take_quantization
from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families import FAMILIES, Family


def parse(config: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Reads a config.json, in the old or the new form.

    Args:
      config: its fields.
      where: its name in errors.

    Raises:
      ValueError: a family or a field that the decoder cannot honour, or a field that is missing; all by name.
    """
    family = find_family(config, where)
    fields = Fields(family.flatten(config, where), where)
    fields.family = fields.take("model_type")
    take_quantization(fields)
    decoder = family.parse(fields)
    fields.finish()
    return decoder


def find_family(config: Mapping[str, Any], where: str = "config.json") -> Family:
    """Returns the family that a config.json names by `model_type`."""
    name = Fields(config, where).take("model_type", None)
    if not isinstance(name, str) or name not in FAMILIES:
        *names, last = FAMILIES
        raise ValueError(
            f"{where} is of the family (model_type) {shown(name)}, but the decoder knows {', '.join(names)} and {last}."
        )
    return FAMILIES[name]


def render(config: DecoderConfig) -> dict[str, Any]:
    """Writes the fields of a config.json, in the new form, that `parse` reads as `config`."""
    return FAMILIES[config.family].render(config)

"""Reads a config.json field by field: a field that is never read must be known to be harmless, or is refused."""

from collections.abc import Mapping
from typing import Any

from jaxkv._core.config.validation import integer, real, show
from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_gate import check_left

# Far above any model: a larger value is a mistake, or meant to exhaust memory.
MOST_LAYERS, MOST_HEADS, MOST_DIM = 512, 2**16, 2**24
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED = "chunked_attention"


class Fields:
    """A dict that remembers which fields were read, so that the others can be refused.

    Fields:
      left: fields not read yet.
      where: name of the config in errors.
      family: the `model_type`.
      passed: names of unread fields that were accepted.
    """

    def __init__(self, fields: Any, where: str):
        if not isinstance(fields, Mapping):
            raise ValueError(f"{where} must be an object with fields, not {show(fields)}.")
        self.left, self.where, self.family = dict(fields), where, ""
        self.passed: list[str] = []

    def nest(self, fields: Any, where: str) -> "Fields":
        """Returns the fields of a nested config; fields accepted there are accepted here."""
        nested = Fields(fields, f"{where} in {self.where}")
        nested.passed = self.passed
        return nested

    def take(self, name: str, *default: Any) -> Any:
        if name not in self.left and not default:
            raise ValueError(f"{self.where} lacks the field {name}.")
        return self.left.pop(name, *default)

    # Readers of one type. With a default of None the field may be missing, or be written as null.

    def size(self, name: str, *default: int | None, least: int = 1, most: int = 2**31 - 1) -> Any:
        value = self.take(name, *default[:1])
        if value is None and None in default:
            return None
        return integer(f"{name} in {self.where}", value, least=least, most=most)

    def number(self, name: str, *default: float | None, least: float | None = None, above: float | None = None) -> Any:
        value = self.take(name, *default[:1])
        if value is None and None in default:
            return None
        return real(f"{name} in {self.where}", value, least=least, above=above, most=1e12)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, value, "true and false")
        return value

    def either(self, name: str, other: str, default: int, *, most: int) -> int:
        """Reads a size that has two names."""
        values = {key: self.size(key, None, most=most) for key in (name, other)}
        if None not in values.values() and values[name] != values[other]:
            raise self.refuse(other, values[other], f"it only where it is the same as {name}, {values[name]}")
        return first_given(*values.values(), default)

    def must_be(self, name: str, allowed: Any) -> None:
        """Refuses a field that is present with another value."""
        if (value := self.take(name, allowed)) != allowed or type(value) is not type(allowed):
            raise self.refuse(name, value, repr(allowed))

    def refuse(self, name: str, value: Any, honoured: Any) -> ValueError:
        return ValueError(
            f"{self.where} has {name} = {show(value)}, which the decoder cannot honour; it knows {honoured}."
        )

    def finish(self, decoder: DecoderConfig | None = None) -> None:
        """Refuses unread fields that would change a decoder; see `jaxkv.models.config_gate`."""
        self.passed += check_left(self.left, self.where, decoder)


def first_given(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next(value for value in values if value is not None)

"""A mistake that could be made, and the test that notices it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str  # below jaxkv
    right: str
    wrong: str
    test: str  # below tests: what fails then

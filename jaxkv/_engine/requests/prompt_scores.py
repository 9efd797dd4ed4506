"""Log-probabilities of a prompt's tokens, as steps compute them."""

import numpy as np


class PromptScores:
    """The log-probability of each of a prompt's tokens but the first, given those before it, by the model's own logits.

    Attributes:
      values: f32[P - 1]. count: how many of them are known, the first ones.
    """

    def __init__(self, length: int):
        self.values, self.count = np.full(max(length - 1, 0), np.nan, np.float32), 0

    @property
    def is_complete(self) -> bool:
        """Tells whether all are known."""
        return self.count == len(self.values)

    def note(self, first: int, values: np.ndarray) -> None:
        """Records those of the tokens behind positions `first` and on; what is known already may come again."""
        end = min(first + len(values), len(self.values))
        if first <= self.count < end:
            self.values[first:end] = values[: end - first]
            self.count = end

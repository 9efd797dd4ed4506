"""Log-probabilities of a prompt's tokens, as steps compute them."""

from collections.abc import Sequence

import numpy as np


class PromptScores:
    """The log-probability of each of a prompt's tokens but the first, given those before it, by the model's own logits,
    and those of the likeliest tokens there.

    Attributes:
      num_likeliest: how many of these are wanted. count: how many of the prompt's tokens are known, the first ones.
    """

    def __init__(self, length: int, num_likeliest: int = 0):
        self.num_likeliest, self.count = num_likeliest, 0
        shape = (max(length - 1, 0), 1 + num_likeliest)
        self._logprobs = np.full(shape, np.nan, np.float32)  # in each row the prompt's own token's is the first
        self._tokens = np.full(shape, -1, np.int32)  # negative: there is none, since the vocabulary is smaller

    @property
    def is_complete(self) -> bool:
        """Tells whether all are known."""
        return self.count == len(self._logprobs)

    @property
    def values(self) -> np.ndarray:
        """Returns f32[count]: those of the prompt's own tokens, as far as they are known."""
        return self._logprobs[: self.count, 0].copy()

    def list_likeliest(self, prompt: Sequence[int]) -> list[dict[int, float]]:
        """Returns, for each known one of a prompt's tokens but the first, a dict from token to log-probability: of the
        likeliest there, and of its own."""
        known = zip(prompt[1 : 1 + self.count], self._tokens.tolist(), self._logprobs.tolist(), strict=False)
        return [
            {token: p for token, p in zip(tokens[1:], logprobs[1:], strict=True) if token >= 0} | {own: logprobs[0]}
            for own, tokens, logprobs in known
        ]

    def restart(self) -> None:
        """Forgets them all."""
        self.count = 0

    def note(self, first: int, logprobs: np.ndarray, tokens: np.ndarray | None = None) -> None:
        """Records those of the tokens behind positions `first` and on; what is known already may come again.

        Args:
          logprobs, tokens: [n, 1 + count] as `likeliest` returns them, or f32[n], of the prompt's own tokens alone.
        """
        end = min(first + len(logprobs), len(self._logprobs))
        if first <= self.count < end:
            logprobs = logprobs.reshape(len(logprobs), -1)[: end - first, : self._logprobs.shape[1]]
            self._logprobs[first:end, : logprobs.shape[1]] = logprobs
            if tokens is not None:
                self._tokens[first:end, : logprobs.shape[1]] = tokens[: end - first, : logprobs.shape[1]]
            self.count = end

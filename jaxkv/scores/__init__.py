"""Scores for evicting tokens and selecting blocks: small pure functions, each with its paper. `import jaxkv.scores`.

Scores rate each token that a layer holds, `f32[S, K, C]`, for `jaxkv.evict(cache, scores=, budget=)`:

- `streaming_llm`: prefers the first and the last tokens.
- `knorm`, `keydiff`: rate keys alone: by a small norm, or by their difference from the other keys.
- `snapkv`, `tova`, `observed_attention`: attention of the last queries, of the last query, or of all queries of a step.
- `expected_attention`: expected attention of future queries, if they resemble past queries.

Budgets set the number of tokens to keep: `uniform` a share or a number in each row, `pyramid` more in the first layers
than in the last, `ada` lets the heads of a layer compete. Any function that returns such an array can be a score.

`quest` evicts nothing: it selects the blocks most relevant to a step's queries, for `jaxkv.attend(blocks=)`. `indexer`
chooses tokens, by index keys of their own, for `jaxkv.attend(tokens=)`.
"""

from jaxkv.scores._blocks import quest as quest
from jaxkv.scores._budgets import ada as ada, pyramid as pyramid, uniform as uniform
from jaxkv.scores._indexer import indexer as indexer
from jaxkv.scores._tokens import (
    expected_attention as expected_attention,
    keydiff as keydiff,
    knorm as knorm,
    observed_attention as observed_attention,
    snapkv as snapkv,
    streaming_llm as streaming_llm,
    tova as tova,
)

__all__ = [
    "ada", "expected_attention", "indexer", "keydiff", "knorm", "observed_attention", "pyramid", "quest", "snapkv",
    "streaming_llm", "tova", "uniform",
]  # fmt: skip

"""What is worth keeping, or reading, of a cache: small pure functions, each with its paper. `import jaxkv.scores`.

Scores say what each token that a layer holds is worth, `f32[S, K, C]`, for `jaxkv.evict(cache, scores=, budget=)`:

- `streaming_llm`: the first tokens, and the last ones.
- `knorm`, `keydiff`: what keys say of themselves: small ones, and those unlike the others.
- `snapkv`, `tova`, `observed_attention`: what the last queries looked at, the very last one, or all of a step.
- `expected_attention`: what the queries to come will look at, if they are like those before.

Budgets say how many to keep: `uniform` a share or a number of each row, `pyramid` more in the first layers than in the
last, `ada` so that the heads of a layer compete. A score of your own is any function that gives such an array.

`quest` gives nothing up: it chooses the blocks that a step's queries may care for most, for `jaxkv.attend(blocks=)`.
"""

from jaxkv.scores._blocks import quest as quest
from jaxkv.scores._budgets import ada as ada, pyramid as pyramid, uniform as uniform
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
    "ada", "expected_attention", "keydiff", "knorm", "observed_attention", "pyramid", "quest", "snapkv",
    "streaming_llm", "tova", "uniform",
]  # fmt: skip

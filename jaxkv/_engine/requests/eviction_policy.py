"""How an engine's rows give tokens up while they are served: `Eviction`."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal

import numpy as np

from jaxkv import scores
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import integer, real, shown
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv.scores._budgets import pyramid_kept, uniform_kept

Budget = Literal["uniform", "pyramid", "ada"]

ALIKE = (scores.streaming_llm, scores.tova)  # they say the same of all heads of a layer
SCORES = [name for name in scores.__all__ if name not in ("ada", "pyramid", "quest", "uniform")]


@dataclasses.dataclass(frozen=True)
class Eviction:
    """What rows keep after their prompt, or every so many tokens, in layers that see everything.

    For `generate(evict=)` and `Engine(evict=)`. The prompt itself sees all of its tokens; what comes later sees those
    that are kept, and the blocks of the others are free for other requests. Layers with a window or chunks, which give
    tokens back by themselves, are left as they are.

    Args:
      score: what a token is worth, one of `jaxkv.scores` or its name, `functools.partial` for its options; or a
        function of your own, called as `score(cache, layer=i)` with a cache of one row, that returns `f32[1, K, C]` or
        `f32[1, C]`. If it has a parameter `q`, it gets the row's last queries, `[1, T, H, D]`, with `num_tokens`,
        `i32[1]`, how many of them there are, and `scale`, if it has that; with `rotate`, queries before they are
        rotated, and what rotates them. What is NaN is worth least.
      keep: a float up to 1, a share: `int(keep * tokens)` of the tokens that a row has seen, in the mean of layers and
        heads; or an integer, that many.
      budget: how they are shared out: "uniform" the same for all, "pyramid" more to the first layers than to the last,
        "ada" so that the heads of a layer compete.
      every: keep no more than that after every so many tokens too; None: once, after the prompt.
      by: "layer": tokens go whole, by the mean of the heads; "head": each KV head chooses its own, in blocks of its
        own. Default: "head", as most scores were published, but where the score says the same of all heads, and in
        latent layers.
      queries: how many last queries of each row to remember for a score that takes them, those at most that came since
        the row was thinned before. Default: what the score looks at: `window_size` if it has that, one for `tova`, else
        all, which take about as much room as keys.

    Raises:
      ValueError: in one sentence, what cannot be.

    >>> import functools, jaxkv
    >>> eviction = jaxkv.Eviction(functools.partial(jaxkv.scores.snapkv, window_size=8), keep=0.25, every=64)
    >>> model = jaxkv.models.small()  # for `jaxkv.generate(model, prompts, evict=eviction)`
    >>> [layer.evict for layer in eviction.layer_configs(model.layer_configs)]
    ['head', 'head', 'head', 'head', 'head']
    """

    score: Callable[..., Any] | str
    keep: float = 0.5
    budget: Budget = "uniform"
    _: dataclasses.KW_ONLY
    every: int | None = None
    by: Literal["layer", "head"] | None = None
    queries: int | None = None

    def __post_init__(self):
        put = functools.partial(object.__setattr__, self)
        if isinstance(self.score, str) and self.score in SCORES:
            put("score", getattr(scores, self.score))
        if not callable(self.score) or not isinstance(self.score, Hashable):
            raise ValueError(
                f"Eviction.score must be a function, hashable as functions are, or one of {', '.join(SCORES)}, not "
                f"{shown(self.score)}."
            )
        is_share = isinstance(self.keep, float | np.floating)
        if is_share:
            put("keep", real("Eviction.keep, a share,", self.keep, above=0, most=1))
        else:
            put("keep", integer("Eviction.keep, a number of tokens or a share below 1.0,", self.keep, least=1))
        if self.budget not in ("uniform", "pyramid", "ada"):
            raise ValueError(f"Eviction.budget must be 'uniform', 'pyramid' or 'ada', not {shown(self.budget)}.")
        for field in ("every", "queries"):
            if getattr(self, field) is not None:
                put(field, integer(f"Eviction.{field}", getattr(self, field), least=1))
        if self.by not in (None, "layer", "head"):
            raise ValueError(f"Eviction.by must be 'layer', 'head' or None, not {shown(self.by)}.")
        if self.budget == "ada" and (self.by == "layer" or self._function in ALIKE):
            what = (
                "by='layer'" if self.by == "layer" else f"{self._function.__name__}, which says the same of all heads"
            )
            raise ValueError(f"Eviction.budget='ada' has heads compete, which cannot be with {what}.")

    # What the score wants.

    @functools.cached_property
    def _function(self) -> Any:
        return self.score.func if isinstance(self.score, functools.partial) else self.score

    @property
    def name(self) -> str:
        """Of the score."""
        return getattr(self._function, "__name__", type(self._function).__name__)

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the score, and what they are if nobody says."""
        return {name: one.default for name, one in inspect.signature(self.score).parameters.items()}  # type: ignore[arg-type]

    def num_queries(self, max_seq_len: int) -> int:
        """How many last queries of each row are to be remembered."""
        if "q" not in self.parameters:
            return 0
        window = self.parameters.get("window_size")
        most = 1 if self._function is scores.tova else window if isinstance(window, int | np.integer) else max_seq_len
        return min(int(most) if self.queries is None else self.queries, max_seq_len)

    # What layers keep.

    def layer_configs(self, layers: Iterable[LayerConfig]) -> tuple[LayerConfig, ...]:
        """Layers that see everything, made so that they evict."""
        layers = tuple(layers)
        is_free = [one.reach is None and one.shares_with is None for one in layers]
        readers = [one.shares_with for one in layers if one.shares_with is not None and one.reach is not None]
        if not any(is_free):
            raise ValueError("evict= is for layers that see everything, but all of this model's give tokens back.")
        return tuple(
            dataclasses.replace(one, evict=self._kind(one)) if free and i not in readers else one
            for i, (one, free) in enumerate(zip(layers, is_free, strict=True))
        )

    def model_of(self, model: Any) -> Any:
        """What `CacheConfig.from_model` asks of a model, for a cache that can be thinned."""
        dtype = getattr(model, "dtype", None)
        return types.SimpleNamespace(layer_configs=self.layer_configs(model.layer_configs), dtype=dtype, scan=False)

    def _kind(self, layer: LayerConfig) -> str:
        if layer.rank is not None:
            return "layer"
        return self.by or ("layer" if self._function in ALIKE else "head")

    def kept(self, config: CacheConfig, layer: int) -> np.ndarray:
        """`i32[max_seq_len + 1]`: how many tokens of so many a layer keeps, of each head in the mean."""
        if self.budget != "pyramid":
            return uniform_kept(config, self.keep)
        window = self.parameters.get("window_size", 64)
        return pyramid_kept(config, self.keep, layer, window)

    # When.

    def point_before(self, prompt: int, cached: int) -> int:
        """After how many tokens a row was last thinned that has `cached` tokens now; 0: never."""
        if cached < prompt or self.every is None:
            return prompt if cached >= prompt else 0
        return prompt + (cached - prompt) // self.every * self.every

    def point_after(self, prompt: int, cached: int) -> float:
        """After how many tokens such a row is thinned next; infinity: never."""
        if cached < prompt:
            return prompt
        return float("inf") if self.every is None else self.point_before(prompt, cached) + self.every

    def is_due(self, sequence: Sequence) -> bool:
        """Whether a sequence's row is to be thinned now, and goes on after that."""
        point = self.point_before(sequence.prompt, sequence.cached)
        return 0 < point == sequence.cached and sequence.length < sequence.limit


def read_eviction(evict: Any, **others: Any) -> Eviction | None:
    """An `Eviction`, or None. Raises ValueError for anything else, and for options that do not go with it."""
    if evict is None:
        return None
    if not isinstance(evict, Eviction):
        raise ValueError(f"evict must be a jaxkv.Eviction, such as Eviction('snapkv', keep=0.25), not {shown(evict)}.")
    reasons = {
        "prefix_cache": "what a thinned row holds is no prefix of another",
        "draft": "tokens that were guessed wrong cannot be taken back from behind what is given up",
    }
    for name, given in others.items():
        if given:
            raise ValueError(f"{name}= does not go with evict=, for {reasons[name]}: leave one out.")
    return evict

"""The eviction policy of an engine's rows: `Eviction`."""

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
from jaxkv._core.config.validation import integer, real, show
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv.scores._budgets import pyramid_kept, uniform_kept

Budget = Literal["uniform", "pyramid", "ada"]

ALIKE = (scores.streaming_llm, scores.tova)  # they score all heads of a layer alike
SCORES = [name for name in scores.__all__ if name not in ("ada", "indexer", "pyramid", "quest", "uniform")]


@dataclasses.dataclass(frozen=True)
class Eviction:
    """An eviction policy: which tokens rows keep after their prompt, or periodically, in full-attention layers.

    For `generate(evict=)` and `Engine(evict=)`. The prompt itself sees all of its tokens. Later tokens see those that
    are kept; the blocks of the others are freed for other requests. Layers with a sliding window or chunks, which free
    blocks by themselves, are left as they are.

    Args:
      score: rates each token: one of `jaxkv.scores` or its name, `functools.partial` for its options; or a
        function of your own, called as `score(cache, layer=i)` with a cache of one row, that returns `f32[1, K, C]` or
        `f32[1, C]`. If it has a parameter `q`, it gets the row's last queries, `[1, T, H, D]`, with `num_tokens`,
        `i32[1]`, how many of them there are, and `scale`, if it has that; with `rotate`, queries before they are
        rotated, and the function that rotates them. NaN ranks lowest.
      keep: a float up to 1, a share: `int(keep * tokens)` of a row's tokens so far, averaged over layers and
        heads; or an integer, a number of tokens.
      budget: how tokens are divided: "uniform" the same for all, "pyramid" more to the first layers than to the last,
        "ada" so that the heads of a layer compete.
      every: evict again after every `every` tokens; None: once, after the prompt.
      by: "layer": evicts whole tokens, by the mean of the heads; "head": each KV head evicts its own, in blocks of its
        own. Default: "head", as most scores were published; "layer" where the score rates all heads alike, and in
        latent layers.
      queries: how many last queries of each row to remember for a score that takes them, at most those since its last
        eviction. Default: those that the score reads: `window_size` if it has that, one for `tova`, else all, which
        take about as much room as keys.

    Raises:
      ValueError: an argument is invalid.

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
    _is_share: bool = dataclasses.field(init=False, repr=False)  # to Python keep=1 and keep=1.0 are equal

    def __post_init__(self):
        put = functools.partial(object.__setattr__, self)
        if isinstance(self.score, str) and self.score in SCORES:
            put("score", getattr(scores, self.score))
        if not callable(self.score) or not isinstance(self.score, Hashable):
            is_h2o = isinstance(self.score, str) and self.score.lower() == "h2o"
            hint = ": H2O's score is observed_attention" if is_h2o else ""
            raise ValueError(
                f"Eviction.score must be a function, hashable as functions are, or one of {', '.join(SCORES)}, not "
                f"{show(self.score)}{hint}."
            )
        self._check_score()
        put("_is_share", isinstance(self.keep, float | np.floating))
        if self._is_share:
            put("keep", real("Eviction.keep, a share,", self.keep, above=0, most=1))
        else:
            put("keep", integer("Eviction.keep, a number of tokens or a share below 1.0,", self.keep, least=1))
        if not isinstance(self.budget, str) or self.budget not in ("uniform", "pyramid", "ada"):
            raise ValueError(f"Eviction.budget must be 'uniform', 'pyramid' or 'ada', not {show(self.budget)}.")
        for field in ("every", "queries"):
            if getattr(self, field) is not None:
                put(field, integer(f"Eviction.{field}", getattr(self, field), least=1))
        if not isinstance(self.by, str | None) or self.by not in (None, "layer", "head"):
            raise ValueError(f"Eviction.by must be 'layer', 'head' or None, not {show(self.by)}.")
        if self.budget == "ada" and (self.by == "layer" or self._function in ALIKE):
            what = (
                "by='layer'" if self.by == "layer" else f"{self._function.__name__}, which says the same of all heads"
            )
            raise ValueError(f"Eviction.budget='ada' has heads compete, which cannot be with {what}.")
        if self.by == "head" and self._function is scores.tova:
            raise ValueError("Eviction.by='head' cannot be with tova, which is a mean over heads: by='layer'.")

    def _check_score(self) -> None:
        """Raises ValueError if a score cannot be called as an engine does it, or reads none of the queries it takes."""
        given = {name: None for name in ("q", "num_tokens", "scale", "rotate") if name in self.parameters}
        try:
            inspect.signature(self.score).bind(None, layer=0, **given)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(
                f"Eviction.score is called as score(cache, layer=i), with q=, num_tokens=, scale= and rotate= if it "
                f"has them, and {self.name} cannot be: {error}."
            ) from None
        window = self.parameters.get("window_size")
        if "q" in self.parameters and isinstance(window, int | np.integer):
            integer(f"window_size of {self.name}", window, least=1)

    # What the score wants.

    @functools.cached_property
    def _function(self) -> Any:
        return self.score.func if isinstance(self.score, functools.partial) else self.score

    @property
    def name(self) -> str:
        """The name of the score."""
        return getattr(self._function, "__name__", type(self._function).__name__)

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """Returns the parameters of the score and their defaults."""
        return {name: parameter.default for name, parameter in inspect.signature(self.score).parameters.items()}  # type: ignore[arg-type]

    @property
    def plain_fields(self) -> tuple[Any, ...]:
        """What processes of one engine must agree on, as far as it is plain: fields, and options of the score."""
        plain = {name: x for name, x in self.parameters.items() if x is None or isinstance(x, int | float | str)}
        return (self.name, plain, self.keep, self.budget, self.every, self.by, self.queries)

    def num_queries(self, max_seq_len: int) -> int:
        """Returns the number of last queries to remember for each row."""
        if "q" not in self.parameters:
            return 0
        window = self.parameters.get("window_size")
        most = 1 if self._function is scores.tova else window if isinstance(window, int | np.integer) else max_seq_len
        return min(int(most) if self.queries is None else self.queries, max_seq_len)

    # What layers keep.

    def layer_configs(self, layers: Iterable[LayerConfig]) -> tuple[LayerConfig, ...]:
        """Returns the layer configs, with eviction in layers of full attention."""
        layers = tuple(layers)
        sees_all = [layer.retention.visible_tokens is None and not layer.is_recurrent for layer in layers]
        is_free = [every and layer.shares_with is None for every, layer in zip(sees_all, layers, strict=True)]
        readers = [layer.shares_with for every, layer in zip(sees_all, layers, strict=True) if not every]
        if not any(is_free):
            raise ValueError(
                "evict= is for full-attention layers, and this model has none: all of its layers have windows, "
                "chunks or a state."
            )
        return tuple(
            dataclasses.replace(layer, evict=self._kind(layer)) if free and i not in readers else layer
            for i, (layer, free) in enumerate(zip(layers, is_free, strict=True))
        )

    def model_of(self, model: Any) -> Any:
        """Returns a stand-in for the model in `CacheConfig.from_model`, for a cache that can evict."""
        dtype = getattr(model, "dtype", None)
        return types.SimpleNamespace(layer_configs=self.layer_configs(model.layer_configs), dtype=dtype, scan=False)

    def _kind(self, layer: LayerConfig) -> str:
        if layer.rank is not None:
            return "layer"
        return self.by or ("layer" if self._function in ALIKE else "head")

    def kept(self, config: CacheConfig, layer: int) -> np.ndarray:
        """Returns `i32[max_seq_len + 1]`: tokens a layer keeps at each row length, averaged over heads."""
        if self.budget != "pyramid":
            return uniform_kept(config, self.keep)
        window = self.parameters.get("window_size", 64)
        return pyramid_kept(config, self.keep, layer, window)

    # When.

    def point_before(self, prompt: int, cached: int) -> int:
        """Returns the row length at the last eviction of a row with `cached` tokens; 0: never."""
        if cached < prompt or self.every is None:
            return prompt if cached >= prompt else 0
        return prompt + (cached - prompt) // self.every * self.every

    def point_after(self, prompt: int, cached: int) -> float:
        """Returns the row length at the next eviction; infinity: never."""
        if cached < prompt:
            return prompt
        return float("inf") if self.every is None else self.point_before(prompt, cached) + self.every

    def is_due(self, sequence: Sequence) -> bool:
        """Tells whether a sequence's row must evict now and goes on afterwards."""
        point = self.point_before(sequence.prompt, sequence.cached)
        return 0 < point == sequence.cached and sequence.length < sequence.limit


def read_eviction(evict: Any, **others: Any) -> Eviction | None:
    """Returns an `Eviction` or None. Raises ValueError for anything else, and for incompatible options."""
    if evict is None:
        return None
    if not isinstance(evict, Eviction):
        raise ValueError(f"evict must be a jaxkv.Eviction, such as Eviction('snapkv', keep=0.25), not {show(evict)}.")
    reasons = {
        "prefix_cache": "a row with evicted tokens is no prefix of another",
        "draft": "draft tokens cannot be rolled back after an eviction",
    }
    for name, given in others.items():
        if given:
            raise ValueError(f"{name}= does not go with evict=, for {reasons[name]}: leave one out.")
    return evict

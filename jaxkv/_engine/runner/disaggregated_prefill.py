"""Disaggregated prefill: computes prompts on separate devices, and sends their rows to the decode cache.

So a long prompt delays no decoding row. The idea is DistServe's and Splitwise's (https://arxiv.org/abs/2401.09670,
https://arxiv.org/abs/2311.18677). As in the former, a computed prompt stays in its row until the decode cache has room,
so that neither side needs memory for rows in transit.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import show
from jaxkv._engine.requests.queue import Queue
from jaxkv._engine.requests.request import Request, RequestParams
from jaxkv._engine.requests.sampling import SamplingParams
from jaxkv._engine.requests.scheduler import Scheduler, Sequence, Unsure
from jaxkv._engine.runner.cache_manager import CacheManager
from jaxkv._engine.runner.model_runner import ModelRunner
from jaxkv._tiers.host_blocks import HostBlocks
from jaxkv._tiers.send import lift_row

MOST_FLIGHTS = 2  # in-flight steps: one that runs, and one that waits for it

# No token is chosen here, so this is the cheapest choice.
_NOBODY = Request(RequestParams(choice=SamplingParams()), number=0, prompt=[0], limit=1, news={})


class PromptComputer(Protocol):
    """What an engine asks of whatever computes its prompts apart."""

    sent: int  # rows that came from it

    @property
    def tokens(self) -> int:
        """Tokens computed so far."""

    def list_cache_managers(self) -> list[CacheManager]:
        """Returns its cache manager, if it has one in this process."""

    def list_runners(self) -> list[ModelRunner]:
        """Returns its model runner, if it has one in this process."""

    def warm(self) -> list[Callable[[], Any]]:
        """Returns functions that compile all programs when called in order."""

    def exchange(self, waiting: Queue, *, wait: bool) -> None:
        """Takes sequences with prompts to compute from a queue, and puts computed ones back.

        Args:
          wait: wait for some, if any are computed and the queue is empty.
        """

    def has(self, sequence: Sequence) -> bool:
        """Tells whether it has a sequence that it has not put back."""

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence in any state."""

    def rest(self) -> None:
        """Forgets in-flight steps: no work is left."""

    def restart(self) -> None:
        """Forgets all sequences."""

    def release(self) -> None:
        """Frees its memory until `restore`."""

    def restore(self) -> None:
        """Takes its memory again."""

    def close(self) -> None:
        """Frees its memory for good."""


class Elsewhere(NamedTuple):
    """Fetches a sequence's blocks at hand-over. Holds weak references only, since both sides refer to it."""

    prefill: "weakref.ref[Prefill]"
    sequence: "weakref.ref[Sequence]"

    def __call__(self) -> HostBlocks:
        prefill, sequence = self.prefill(), self.sequence()
        assert prefill is not None and sequence is not None
        return prefill._hand_over(sequence)


class Prefill:
    """Computes all tokens of a sequence but its last, which is the first one that the decode engine computes.

    Each sequence is represented here by one of its own, which ends before that token.
    """

    def __init__(
        self,
        model: Any,
        config: CacheConfig,
        step_tokens: int,
        long_prefill_tokens: int | None,
        target: CacheManager,
        deterministic: bool = False,
    ):
        self.step_tokens, self.long_prefill_tokens, self.target = step_tokens, long_prefill_tokens, target
        bandwidth = target.swapping.host_bandwidth
        self.cache_manager = CacheManager(config, model, prefix=None, swap="never", host_bandwidth=bandwidth)
        self.runner = ModelRunner(model, self.cache_manager, None, step_tokens, 0, deterministic=deterministic)
        self.sent = 0  # rows
        self.restart()

    def restart(self) -> None:
        """Forgets in-flight work; all rows are empty."""
        self.runner.clear()
        self.scheduler = Scheduler(
            self.cache_manager, step_tokens=self.step_tokens, long_prefill_tokens=self.long_prefill_tokens
        )
        self._own: dict[Sequence, Sequence] = {}  # the local stand-in of each sequence

    @property
    def tokens(self) -> int:
        """Tokens computed so far."""
        return self.runner.tokens

    def list_cache_managers(self) -> list[CacheManager]:
        """Returns its cache manager, alone."""
        return [self.cache_manager]

    def list_runners(self) -> list[ModelRunner]:
        """Returns its model runner, alone."""
        return [self.runner]

    def rest(self) -> None:
        """Forgets in-flight steps: no work is left."""
        self.runner.flights.clear()

    def has(self, sequence: Sequence) -> bool:
        """Tells whether a sequence is being computed here, or waits here for its hand-over."""
        return sequence in self._own

    def release(self) -> None:
        """Frees the memory of its cache until `restore`; what was computed is dropped."""
        self.restart()
        self.runner.release()
        self.cache_manager.recover()
        self.cache_manager.release(keep=False)

    def restore(self) -> None:
        """Allocates an empty cache again."""
        self.cache_manager.restore()
        self.restart()

    def close(self) -> None:
        """Frees the memory on its devices."""
        self.runner.close()
        self.cache_manager.close()
        self._own = {}

    def warm(self) -> list[Callable[[], Any]]:
        """Returns functions that compile all programs here when called in order."""
        return [*self.runner.warm(("greedy",), (0,), (1,)), *self.cache_manager.warm()]

    def exchange(self, waiting: Queue, *, wait: bool) -> None:
        """Takes sequences with prompts to compute from a queue, puts computed ones back, and computes meanwhile.

        Args:
          wait: wait for the running steps, if any; else unfinished ones are left for the next call.
        """
        for sequence in [s for s in waiting if s.host is None and s.pending > 1]:
            self._begin(sequence)
            waiting.remove(sequence)
        wait, flights = wait and not waiting, self.runner.flights
        while flights and (wait or flights[0].result.numbers.is_ready()):
            for sequence in self._read():
                waiting.add(sequence)
            wait = False
        self._send()

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence in any state."""
        for other in self._own:
            if sequence in other.followers:
                other.followers.remove(sequence)
        own = self._own.pop(sequence, None)
        if own is None:
            return
        self.scheduler.finish(own)
        if own.row is not None:
            self.cache_manager.retire(own)

    def _begin(self, sequence: Sequence) -> None:
        tokens = sequence.tokens[:-1]
        own = Sequence(
            tokens,
            len(tokens),
            sequence.salt,
            _NOBODY,
            len(tokens),
            priority=sequence.priority,
            arrival=sequence.arrival,
            adapter=sequence.adapter,
        )
        self._own[sequence] = own
        self.scheduler.waiting.add(own)

    def _send(self) -> None:
        scheduler, flights = self.scheduler, self.runner.flights
        if len(flights) == MOST_FLIGHTS:
            return
        try:
            step = scheduler.plan(certain=not flights)
        except Unsure:  # the next call knows more
            return
        if not (step.counts or flights) and scheduler.waiting:  # there may be more room than known
            self.cache_manager.settle()
            step = scheduler.plan()
        if step.counts:
            self.cache_manager.free_rows(are_wanted=bool(scheduler.waiting))
            self.runner.send(step, 1)
            for own in scheduler.commit(step):
                scheduler.running.remove(own)  # it keeps its row until hand-over

    def _read(self) -> list[Sequence]:
        """Waits for the oldest in-flight step; returns the sequences that it completed."""
        ended = {own for own, _ in self.runner.read()}
        ready = [sequence for sequence, own in self._own.items() if own in ended]
        for sequence in ready:
            sequence.host = Elsewhere(weakref.ref(self), weakref.ref(sequence))
        return ready

    def _hand_over(self, sequence: Sequence) -> HostBlocks:
        """Sends a sequence's blocks to the decode devices and frees its row."""
        own = self._own.pop(sequence)
        assert own.row is not None
        blocks = lift_row(self.cache_manager.cache, own.row, own.cached, to=self.target.cache)
        self.cache_manager.retire(own)
        self.sent += 1
        return blocks


def check_prefill(prefill: Any, model: Any, **others: Any) -> None:
    """Raises ValueError unless `prefill` can compute prompts for that model."""
    if prefill is None:
        return
    is_address = isinstance(prefill, str) and ":" in prefill
    if not is_address:
        _check_model(prefill, model)
    reasons = {
        "prefix_cache": "the prefix cache would have to be where prompts are computed",
        "evict": "the queries that scores ask for would have to be sent, too",
        "sink_tokens": "rows with sink tokens cannot be sent, since their blocks are not contiguous",
    }
    others["sink_tokens"] = any(layer.sink_tokens for layer in model.layer_configs)
    others["evict"] = others["evict"] or any(layer.evict for layer in model.layer_configs)
    for name, given in others.items():
        if given:
            raise ValueError(f"{name}= and prefill= do not go together yet, for {reasons[name]}: leave one out.")


def _check_model(prefill: Any, model: Any) -> None:
    if not callable(prefill) or not hasattr(prefill, "layer_configs"):
        raise ValueError(
            f"prefill must be the model once more, on other devices, or None, not {show(prefill)}. For another process "
            "it is the address that its engine's serve_prefill gives."
        )
    if prefill.layer_configs != model.layer_configs or _config(prefill) != _config(model):
        raise ValueError(
            "prefill must be the same model on other devices, but its layers or its config are others: load both from "
            "one folder."
        )


def _config(model: Any) -> Any:
    return getattr(model, "config", None)

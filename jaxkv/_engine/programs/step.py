"""The programs that an engine runs on the device: one step of every row, or several decode steps at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxkv._core.attention.plan import plan_step, positions
from jaxkv._core.blocks.tables import extend, release_windows
from jaxkv._core.state.sharding import share
from jaxkv._engine.programs.cache_program import cache_program
from jaxkv._engine.programs.eviction import record_queries_of_step
from jaxkv._engine.programs.maintenance import measure_room
from jaxkv._engine.programs.model import ADAPTERS_ARGUMENT, takes
from jaxkv._engine.programs.program_cache import share_programs
from jaxkv._engine.programs.step_rows import (
    COUNT,
    DUE,
    FROM_DEVICE,
    GUESSED,
    TOKEN,
    Asked,
    Hook,
    Result,
    StepMemory,
    StepVariant,
    TokenChoice,
    row_of,
    rows_of,
)
from jaxkv._engine.programs.verify import Drafts, verify as verify_drafts, verify_trees
from jaxkv._engine.requests.sampling import likeliest


@share_programs
def step_program(
    structure: Any,
    model: Any,
    hook: Hook | None,
    leave: bool,
    deterministic: bool = False,
    place: NamedSharding | None = None,
) -> Any:
    """Compiles the step of a model and a cache given as structures of pytrees: engines with equal ones share it.

    A `cache_program` with the arguments `leaves, memory, rows, tokens, variant=`: the model's leaves, `rows`
    i32[NUM_FIELDS + n, S] with the hook's n numbers by their form, packed `tokens` i32[N], or None for one or several
    steps of one token per row. The memory is donated too, and the result is a `Result`. With `variant.verify` it is
    that of `verify + 1` steps. For trees, `tokens` is i32[2, N], with each token's parent, counted from its row's
    first, below it. With `targets` i32[N], negative for none, packed tokens are scored: the logits of all of them are
    computed then, and with `variant.prompt_count` the likeliest tokens there, too. `place` is for caches on devices of
    several processes: all that hosts read is whole there.
    """

    def program(cache, leaves, memory, rows, tokens, targets=None, *, variant: StepVariant):
        verify = variant.verify
        inner = functools.partial(verify_drafts, Drafts(verify, rows[GUESSED])) if verify else _step
        if tokens is not None and tokens.ndim == 2:
            tokens, parents = tokens
            inner = functools.partial(verify_trees, Drafts(verify, rows[GUESSED], parents))
        asked = Asked.unpack(rows, variant.form)
        answer = functools.partial(
            logits_at,
            jax.tree.unflatten(model, leaves),
            cascade=not (leave or deterministic),
            adapters=asked.adapters,
            deterministic=deterministic,
        )
        run = functools.partial(_run, answer, targets=targets, prompt_count=variant.prompt_count)
        compute = functools.partial(inner, run, TokenChoice(hook, asked, variant.kind, variant.count))

        def step(cache, memory, tokens, counts, due):
            out, last, cache, memory = compute(cache, memory, tokens, counts)
            cache = release_windows(cache) if leave else cache
            return out, cache, memory._replace(last=jnp.where(due, last, memory.last))

        counts, due, given = rows[COUNT], rows[DUE] != 0, rows[TOKEN]
        if tokens is None:
            memory = memory._replace(last=jnp.where(given == FROM_DEVICE, memory.last, given))

            def decode(carry, i):
                cache, memory = carry
                active = i < counts
                out, cache, memory = step(cache, memory, memory.last[:, None], active.astype(jnp.int32), active)
                return (cache, memory), out

            if variant.steps > 1:
                steps = jnp.arange(variant.steps, dtype=jnp.int32)
                (cache, memory), out = jax.lax.scan(decode, (cache, memory), steps)
            else:
                (cache, memory), out = decode((cache, memory), jnp.int32(0))
        else:
            row = row_of(counts, tokens.shape[0])
            tokens = jnp.where(tokens == FROM_DEVICE, memory.last[jnp.minimum(row, counts.shape[0] - 1)], tokens)
            out, cache, memory = step(cache, memory, tokens, counts, due)
        chosen, likely = out
        numbers = jnp.concatenate([*(x.ravel() for x in jax.tree.leaves(chosen)), measure_room(cache).ravel()])
        numbers, likely, scores = share((numbers, likely, memory.scores), place)
        return Result(numbers, memory._replace(scores=()), likely, scores), cache

    return cache_program(structure, program, donate=(2,), static=("variant",))


def _step(run: Any, choice: TokenChoice, cache: Any, memory: StepMemory, tokens: Any, counts: jax.Array) -> tuple:
    """Computes one step of every row. Returns `(the token after each row's last, the likeliest ones there), the former,
    cache, memory`; tokens of rows that did not fit are -1."""
    places = jnp.zeros_like(counts) if tokens.ndim == 2 else jnp.maximum(jnp.cumsum(counts) - 1, 0)
    logits, cache, memory = run(cache, memory, tokens, counts, places)
    chosen, likely = choice.choose(logits, memory, cache.lengths)
    return (jnp.where(cache.failed, -1, chosen), likely), chosen, cache, memory


def _run(answer, cache, memory, tokens, counts, places, tree=None, guesses=None, targets=None, prompt_count=0):
    """Computes and records a step of every row, some of which guess; returns the logits at some tokens."""
    asked = places if targets is None else jnp.arange(tokens.shape[0], dtype=jnp.int32)
    cache = extend(cache, counts, guesses=guesses)
    rows = rows_of(tokens, counts)
    if memory.tokens is not None:
        noted = memory.tokens.at[rows, positions(cache, tokens.shape)].set(tokens, mode="drop")
        memory = memory._replace(tokens=noted)
    (logits, cache), queries = record_queries_of_step(
        memory.queries, cache, lambda: answer(tokens, cache, asked, tree=tree), rows, tokens.shape
    )
    if targets is not None:
        memory, logits = memory._replace(scores=_score(logits, targets, prompt_count)), logits[places]
    return logits, cache, memory._replace(queries=queries)


def _score(logits, targets, count):
    """Returns `(f32[N],)`: the log-probabilities of `targets` i32[N]; of those that are negative any number. With a
    `count`, those of so many likeliest tokens too, and these, as `likeliest` does."""
    targets = jnp.maximum(targets, 0)
    if count:
        return likeliest(logits, targets, count)
    logits = logits.astype(jnp.float32)
    return (jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1),)


def logits_at(model, tokens, cache, places, cascade=False, tree=None, adapters=None, deterministic=False):
    """Returns the logits of some tokens, one of each row if padded; computes only these if the model can, since those
    of a prompt are large. `cascade`: rows of a common prefix read it once, if the model takes a planned step.
    `adapters` i32[S]: those of the rows, for a model that takes them."""
    planned: dict = {"deterministic": True} if deterministic else {}
    if takes(model, ADAPTERS_ARGUMENT):
        planned[ADAPTERS_ARGUMENT] = jnp.zeros_like(cache.lengths) if adapters is None else adapters
    if (cascade or tree is not None) and takes(model, "step"):
        planned["step"] = plan_step(cache, tokens.shape, cascade=cascade, tree=tree)
    if takes(model, "logits_at"):
        return model(tokens, cache=cache, logits_at=places, **planned)
    logits, cache = model(tokens, cache=cache, **planned)
    return (logits[:, 0] if tokens.ndim == 2 else logits[places]), cache

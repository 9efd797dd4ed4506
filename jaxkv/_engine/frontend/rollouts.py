"""Weights that change under an engine, and memory that it lends to a trainer: rollouts within a training program."""

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jaxkv._core.config.validation import PACKAGE_FOLDER, flag
from jaxkv._core.state.device_arrays import split_model, take_local_model
from jaxkv._engine.frontend.lifetime import Closable
from jaxkv._engine.hosts.lockstep import LockstepCores
from jaxkv._engine.programs.model import name_leaves
from jaxkv._engine.runner.fingerprint import fingerprint
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache


class Updatable(Closable):
    """What an engine has for a trainer in the same process: `update`, `release` and `restore`."""

    _given: Callable[[], Any]
    _given_leaves: "list[weakref.ref[jax.Array]]"

    def update(self, model: Any, *, draft: Any = None, prefill: Any = None, restart: bool = False) -> None:
        """Goes on with other weights of the same model: nothing is compiled, copied or allocated.

        The prefix cache forgets what older weights computed, on the device, in host memory and on disk. `step` and the
        like raise RuntimeError if a trainer has donated the older weights; after `update` they go on. Where an
        engine spans several processes, all call this, after a `release` in the first: see `follow(until_release=True)`.

        Args:
          model: of the same structure, shapes, dtypes and shardings as the engine's.
          draft, prefill: the same for the engine's draft model, which else keeps its weights, and for the one that
            computes prompts, which must be given if there is one.
          restart: whether requests of which something was computed begin anew from their prompts. `run` and `step`
            yield their tokens once more, and iterators in progress raise RuntimeError.

        Raises:
          ValueError: another model; the first leaf that differs is named. Nothing has changed then.
          RuntimeError: requests are running, and `restart` is False.

        >>> import jax, jaxkv
        >>> model = jaxkv.models.small()
        >>> engine = jaxkv.Engine(model, max_seqs=2, max_seq_len=64)
        >>> engine.update(jax.tree.map(lambda x: -x, model))
        >>> prompt = list(b"import ")
        >>> engine.submit(prompt, max_new_tokens=2).result() == jaxkv.generate(model, [prompt], 2)[0]
        False
        """
        restart = flag("restart", restart)
        self._refuse_apart("update")
        if isinstance(self._core, LockstepCores) and not self._core.channel.is_first:
            self._core.update(self._plan_change(model, draft, prefill))
            return
        with self._exclusive(is_brief=True):
            change = self._plan_change(model, draft, prefill)
            if isinstance(self._core, LockstepCores) and not self.is_released:
                self._core.settle()  # so that the next line sends nothing to the devices
            running = [request for core in self._cores for request in core.list_running()]
            if running and not restart:
                raise RuntimeError(
                    f"{len(running)} requests are running, and would mix tokens of older and newer weights: wait until "
                    "they have ended, or begin them anew by update(model, restart=True)."
                )
            if isinstance(self._core, LockstepCores):
                self._core.update(change)
            else:
                change()
        self._wake()

    def _plan_change(self, model: Any, draft: Any, prefill: Any) -> Callable[[], None]:
        """Reads weights, and returns what gives them to the cores. Raises ValueError if they are another model's."""
        flat = jax.tree.flatten(model)  # takes longer than all else here
        shards = self._read_weights("model", model, [core.runner for core in self._cores], flat)
        drafters = [core.drafter for core in self._cores]
        drafts = None if draft is None else self._read_weights("draft", draft, drafters)
        apart = [core.prefill and core.prefill.list_runners()[0] for core in self._cores]
        if prefill is None and apart[0] is not None:
            raise ValueError(
                "This engine computes prompts with a model of its own, which must have the same weights: give "
                "update(model, prefill=) both."
            )
        prefills = [None] * len(shards) if prefill is None else self._read_weights("prefill", prefill, apart)

        def change() -> None:
            has_disk = any(core.cache_manager.prefix and core.cache_manager.prefix.files for core in self._cores)
            for i, (core, leaves) in enumerate(zip(self._cores, shards, strict=True)):
                name = fingerprint(jax.tree.unflatten(core.runner.structure, leaves)) if has_disk else None
                core.update(leaves, prefills[i], name)
                if drafts is not None:
                    core.drafter.update(drafts[i])  # type: ignore[union-attr]
            self.__dict__.pop("_model", None)  # the fingerprint of the older weights
            self._remember_given(model, flat[0])

        return change

    def release(self, *, keep: bool = False, parameters: bool = False) -> None:
        """Gives the memory of the cache back until `restore`: requests wait, and can still be submitted and cancelled.

        Args:
          keep: move rows, and prefixes up to `spill_bytes`, to host memory. Else prefixes on the device and the host
            are dropped, and rows computed again from their tokens.
          parameters: let go of the model's parameters, too: while a trainer makes new ones, nothing keeps the older
            ones. `update` must bring them then.

        Raises:
          ValueError: `keep` with a prefix cache that has no `spill_bytes`, or has pinned blocks.

        >>> import jaxkv
        >>> engine = jaxkv.Engine(jaxkv.models.small(), max_seqs=2, max_seq_len=64)
        >>> request = engine.submit(list(b"import "), max_new_tokens=4)
        >>> pairs = engine.step()
        >>> engine.release()
        >>> engine.is_released  # a trainer has the memory now
        True
        >>> engine.restore()
        >>> len(request.result())
        4
        """
        keep, parameters = flag("keep", keep), flag("parameters", parameters)
        if parameters:
            self._refuse_apart("release(parameters=True)")
        with self._exclusive(is_brief=True):
            for prefix in [core.cache_manager.prefix for core in self._cores] if keep else []:
                if prefix is not None:
                    _refuse_kept(prefix)
            if isinstance(self._core, LockstepCores):
                self._core.release(keep=keep, parameters=parameters)
                return
            for core in self._cores:
                core.release(keep=keep, parameters=parameters)

    def _refuse_apart(self, method: str) -> None:
        """Raises ValueError if rows go to or come from an engine in another process, of the same weights."""
        if any(core.prefill and not core.prefill.list_runners() for core in self._cores):
            raise ValueError(
                f"{method} would give this engine other weights than the one in another process that computes its "
                "prompts: make both engines anew with the new ones."
            )
        if any(core.on_computed is not None for core in self._cores):
            raise ValueError(
                f"{method} would give this engine other weights than those that it computes prompts for: end "
                "serve_prefill first."
            )

    def restore(self) -> None:
        """Allocates the memory that `release` freed; requests continue. Does nothing if it was not released."""
        with self._exclusive(is_brief=True):
            if isinstance(self._core, LockstepCores):
                self._core.restore()
            else:
                for core in self._cores:
                    core.restore()
        self._wake()

    @property
    def is_released(self) -> bool:
        """Tells whether the memory of the cache is given back, by `release`."""
        return any(core.cache_manager.is_released for core in self._cores)

    @property
    def _can_step(self) -> bool:
        return all(core.can_step for core in self._cores)

    # Which parameters there are.

    def _read_weights(self, name: str, model: Any, users: list[Any], flat: Any = None) -> list[list[Any]]:
        """Returns the leaves of a model for each shard of the rows. Raises ValueError if it is another model."""
        if any(user is None or not hasattr(user, "leaves") for user in users):
            raise ValueError(f"This engine has no model for {name}=: leave it out, or make another Engine with it.")
        leaves, structure = jax.tree.flatten(model) if flat is None else flat
        if len(users) == 1 and structure == users[0].structure:
            older = users[0].leaves
            if all(map(_can_replace, leaves, older)):
                return [list(map(_place_alike, leaves, older))]
        shards = split_model(take_local_model(model))
        if len(shards) != len(users):
            raise ValueError(
                f"{name} is divided over {len(shards)} devices by rows, and the engine's over {len(users)}: load it on "
                "the same mesh."
            )
        return [_read_leaves(name, shard, user) for shard, user in zip(shards, users, strict=True)]

    def _remember_given(self, model: Any, leaves: list[Any] | None = None) -> None:
        """Remembers the model and its leaves, weakly."""
        self._given = lambda: None
        leaves = jax.tree.leaves(model) if leaves is None else leaves
        self._given_leaves = [weakref.ref(x) for x in leaves if isinstance(x, jax.Array)]
        with contextlib.suppress(TypeError):  # of a class that cannot be referred to so
            self._given = weakref.ref(model)

    def _warn_of_other_weights(self) -> None:
        """Warns if the model that was given has other parameters now, as `nnx.update` gives it."""
        model = self._given()
        if model is None or not self._cores[0].runner.has_parameters:
            return
        leaves = [x for x in jax.tree.leaves(model) if isinstance(x, jax.Array)]
        older = [ref() for ref in self._given_leaves]
        if len(leaves) != len(older) or not all(a is b for a, b in zip(leaves, older, strict=True)):
            self._given = lambda: None  # once
            warnings.warn(
                "The model that this Engine was made with has other parameters now, and the engine goes on with those "
                "that it was given: engine.update(model) takes the new ones.",
                skip_file_prefixes=(PACKAGE_FOLDER,),
            )


def _refuse_kept(prefix: PrefixCache) -> None:
    """Raises ValueError if a prefix cache cannot move all of its blocks to the host."""
    if not prefix.spill_bytes:
        raise ValueError(
            "release(keep=True) moves prefixes to host memory, but this engine may use none: make it with "
            "spill_bytes=, or leave keep out."
        )
    if any(prefix.pinned(group) for group in range(len(prefix.config.groups))):
        raise ValueError("Pinned blocks stay on the device, so keep=True cannot move them: unpin them before.")


def _read_leaves(name: str, model: Any, user: Any) -> list[Any]:
    """Returns the leaves of a model if they can stand for a user's. Raises ValueError naming the first that cannot."""
    leaves, structure = jax.tree.flatten(model)
    if structure != user.structure and (difference := _compare_names(name, model, user)):
        raise ValueError(
            f"update takes the same model with other numbers, but it {difference}: make another Engine for another "
            "model."
        )
    pairs = list(zip(leaves, user.leaves, strict=False))
    wrong = next((i for i, (leaf, older) in enumerate(pairs) if not _can_replace(leaf, older)), None)
    if wrong is not None:
        (where, leaf), older = list(name_leaves(name, model).items())[wrong], user.leaves[wrong]
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(f"{where} was donated to another program: give a living one.")
        raise ValueError(
            f"update takes the same model with other numbers, but {where} is {_describe(leaf)}, and was "
            f"{_describe(older)}: make another Engine for another model."
        )
    if structure != user.structure:
        raise ValueError(
            f"update takes the same model with other numbers, but {name} has {len(leaves)} leaves in another "
            f"structure or config than the engine's {len(user.leaves)}: make another Engine for another model."
        )
    return [_place_alike(leaf, older) for leaf, older in pairs]


def _compare_names(name: str, model: Any, user: Any) -> str:
    """Returns the first leaf that only a user's model has, and the first that only another has, as a sentence goes on;
    nothing if all have the same names."""
    given, own = name_leaves(name, model), name_leaves(name, jax.tree.unflatten(user.structure, user.leaves))
    missing = next((f"has no {x}" for x in own if x not in given), None)
    extra = next((f"has {x}" for x in given if x not in own), None)
    return ", and ".join(filter(None, (missing, extra)))


def _can_replace(leaf: Any, older: Any) -> bool:
    """Tells whether programs that were compiled for one leaf take another, which may say the same sharding in other
    words."""
    if not hasattr(older, "shape"):
        return leaf is older or bool(leaf == older)
    if not hasattr(leaf, "shape") or leaf.shape != older.shape or leaf.dtype != older.dtype:
        return False
    if not isinstance(leaf, jax.Array):
        return not isinstance(older, jax.Array | jax.ShapeDtypeStruct)
    is_there = hasattr(older, "sharding") and not leaf.is_deleted()
    return is_there and (leaf.sharding == older.sharding or leaf.sharding.is_equivalent_to(older.sharding, leaf.ndim))


def _place_alike(leaf: Any, older: Any) -> Any:
    """Returns an array that lies as another one with its very sharding, for which programs are compiled."""
    is_said_otherwise = isinstance(leaf, jax.Array) and leaf.sharding != older.sharding
    return jax.device_put(leaf, older.sharding) if is_said_otherwise else leaf


def _describe(leaf: Any) -> str:
    """Returns what programs are compiled for, in words."""
    if not hasattr(leaf, "shape"):
        return repr(leaf)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        place = f" by {sharding.spec} over {dict(sharding.mesh.shape)}"
    else:
        place = "" if sharding is None else f" on {sorted(sharding.device_set, key=lambda d: d.id)}"
    return f"{leaf.dtype}{list(leaf.shape)}{place}"

"""Rollouts for tunix: `Rollout` runs its models in an `Engine`. Import it by name: `import jaxkv.tunix` (extra: tunix).

`ClusterConfig(rollout_engine=jaxkv.tunix.Rollout)` is all that a script changes. Attention of a tunix model goes to a
paged cache; everything else that it computes stays tunix's own code on the trainer's own parameters, so nothing is
converted or copied.
"""

import dataclasses
import importlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv._core.attention.attention import attention
from jaxkv._core.attention.plan import Step, plan_step, positions
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.state.device_arrays import abstract_array
from jaxkv._core.state.state import Layer
from jaxkv._engine.frontend.engine import Engine

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl import common
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "tunix":  # it is there, and lacks something itself
        raise
    raise ModuleNotFoundError("jaxkv.tunix needs tunix: pip install 'jaxkv[tunix]'.", name="tunix") from error

__all__ = ["PagedModel", "Rollout"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedModel:
    """A tunix model over a paged cache, a `jaxkv.Model`: Qwen 2 and 3, Llama 3 and Gemma 3.

    Attributes:
      state: its parameters. graphdef: the rest of it, as `nnx.split` gives both.
      temperature: what its logits are divided by, so that log-probabilities are those of the distribution drawn from.
    """

    state: Any
    temperature: Any  # f32[]
    graphdef: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def make(cls, model: nnx.Module) -> "PagedModel":
        """Makes it from a model. Raises ValueError for a model whose attention is not known."""
        _read_family(model)
        graphdef, state = nnx.split(model)
        return cls(state, jnp.float32(1), graphdef)

    @property
    def module(self) -> Any:
        """The model, with the parameters as they are here."""
        return nnx.merge(self.graphdef, self.state)

    @property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """A `LayerConfig` for each layer."""
        return tuple(
            LayerConfig(num_kv_heads=x.attn.num_kv_heads, head_dim=x.attn.head_dim, window=_read_window(x.attn))
            for x in self.module.layers
        )

    @property
    def dtype(self) -> Any:
        """The dtype of keys and values, that of activations."""
        return jax.eval_shape(lambda: self.module.embedder.encode(jnp.zeros((1, 1), jnp.int32))).dtype

    def __call__(
        self,
        tokens: jax.Array,
        *,
        cache: Cache,
        logits_at: jax.Array | None = None,
        step: Step | None = None,
        deterministic: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """Computes logits, `f32[n, V]` of the tokens that `logits_at` names, else of all; see `jaxkv.Model`."""
        model, is_packed = self.module, tokens.ndim == 1
        place = positions(cache, tokens.shape)
        step = plan_step(cache, tokens.shape) if step is None else step
        family = _read_family(model)
        for layer in model.layers:
            own = vars(layer)  # `layer` is a copy, of this call alone
            own["attn"] = _PagedAttention(layer.attn, family, step, is_packed, deterministic)
            own["config"] = _without_remat(layer.config)
        if logits_at is not None:
            vars(model)["final_norm"] = _At(model.final_norm, logits_at, is_packed)
        handles = {f"layer_{i}": layer for i, layer in enumerate(cache.layers)}
        rows = (tokens[None], place[None]) if is_packed else (tokens, place)
        logits, handles = model(*rows, handles, None)
        cache = cache.with_layers([handles[f"layer_{i}"] for i in range(len(handles))])
        logits = logits if logits_at is None and not is_packed else logits[0]
        return logits.astype(jnp.float32) / self.temperature, cache


@dataclasses.dataclass
class _PagedAttention:
    """Stands for the attention of a layer: its projections, norms and rotation, and the paged cache between them."""

    attn: Any
    family: str
    step: Step
    is_packed: bool
    deterministic: bool

    def __call__(self, x: jax.Array, *arguments: Any, **options: Any) -> tuple[Layer, jax.Array]:
        # Families differ in the order of these, and in how they say where a token stands.
        cache = next(a for a in (*arguments, *options.values()) if isinstance(a, Layer))
        q, k, v = _PROJECT[self.family](self.attn, x, arguments, options)
        if self.is_packed:
            q, k, v = q[0], k[0], v[0]
        y, cache = attention(
            q,
            k,
            v,
            cache,
            scale=_read_scale(self.attn),
            window=_read_window(self.attn),
            step=self.step,
            deterministic=self.deterministic,
        )
        out = self.attn.attn_vec_einsum if self.family == "gemma3" else self.attn.o_proj
        return cache, out(y[None] if self.is_packed else y)


@dataclasses.dataclass
class _At:
    """Stands for the last norm: of the tokens whose logits are asked for alone."""

    norm: Any
    logits_at: jax.Array
    is_packed: bool

    def __call__(self, x: jax.Array) -> jax.Array:
        chosen = x[0, self.logits_at] if self.is_packed else x[jnp.arange(x.shape[0]), self.logits_at]
        return self.norm(chosen[None])


def _read_family(model: Any) -> str:
    """Returns the name of a model's package in tunix. Raises ValueError if its attention is not known."""
    path = type(model).__module__.split(".")
    family = path[2] if path[:2] == ["tunix", "models"] and len(path) > 2 else None
    if family not in _PROJECT:
        raise ValueError(
            f"jaxkv.tunix knows the models {', '.join(_PROJECT)} of tunix.models, and {type(model).__name__} is of "
            f"{type(model).__module__}: write its call over a cache as a jaxkv.Model, and give that to an Engine."
        )
    return family


def _project_qwen2(attn: Any, x: jax.Array, arguments: Any, options: Any) -> Any:
    dtype = attn.config.dtype

    def project(layer: Any, bias: Any) -> jax.Array:
        y = layer(x)
        return (y.reshape(*y.shape[:2], -1) + bias.astype(dtype)).reshape(y.shape)

    rotate = importlib.import_module(type(attn).__module__).apply_rotary_embedding
    q, k, v = (project(getattr(attn, f"{n}_proj"), getattr(attn, f"{n}_bias")) for n in "qkv")
    return *(rotate(y, options["sin"], options["cos"]) for y in (q, k)), v


def _project_llama3(attn: Any, x: jax.Array, arguments: Any, options: Any) -> Any:
    rotate = importlib.import_module(type(attn).__module__).apply_rope
    q, k, v = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    return *(rotate(y, arguments[0], head_dim=attn.head_dim) for y in (q, k)), v


def _project_gemma3(attn: Any, x: jax.Array, arguments: Any, options: Any) -> Any:
    rotate = importlib.import_module(type(attn).__module__).apply_rope
    q, k, v = attn.qkv_einsum(x) if attn.use_qkv_einsum else (attn.q_einsum(x), *attn.kv_einsum(x))
    base = {"base_frequency": attn.rope_base_frequency, "scale_factor": attn.rope_scale_factor}
    q, k = (
        rotate(norm(y), arguments[0], head_dim=attn.head_dim, **base)
        for norm, y in ((attn._query_norm, q), (attn._key_norm, k))
    )
    return q, k, v


_PROJECT = {"qwen2": _project_qwen2, "qwen3": _project_llama3, "llama3": _project_llama3, "gemma3": _project_gemma3}


def _read_scale(attn: Any) -> float:
    return attn.query_pre_attn_scalar if hasattr(attn, "query_pre_attn_norm") else attn.scale


def _read_window(attn: Any) -> int | None:
    kind = getattr(attn, "attn_type", None)
    return attn.sliding_window_size if kind is not None and kind.name == "LOCAL_SLIDING" else None


def _without_remat(config: Any) -> Any:
    """Returns a layer's config by which it stores nothing for gradients: a step has none."""
    return dataclasses.replace(config, remat_config=type(config.remat_config).NONE)


def _find_devices(state: Any) -> set[Any]:
    return {device for x in jax.tree.leaves(state) for device in x.sharding.device_set}


def _fit(x: jax.Array, older: jax.Array) -> jax.Array:
    """Returns an array in the dtype and the place of the one that it replaces."""
    x = x if x.dtype == older.dtype else x.astype(older.dtype)
    return x if x.sharding.is_equivalent_to(older.sharding, x.ndim) else jax.device_put(x, older.sharding)


class Rollout(BaseRollout):
    """tunix's rollout worker over an `Engine`: give the class, or a `functools.partial` of it, as `rollout_engine`.

    Equal prompts of a batch share their blocks, and no row waits for the longest. Outside of `generate` the cache's
    memory is the trainer's. Where the trainer's model is on the same device its parameters are used as they are at each
    `generate`; else `update_params` brings them.

    Args:
      rollout_actor: a model that `PagedModel` knows. tokenizer, rollout_config: tunix's.
      mesh: tunix's mesh for rollouts, of one device.
      max_seqs: rows that are computed at once.
      **options: of `jaxkv.Engine`.

    Raises:
      ValueError: a model whose attention is not known; a mesh of several devices.
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any,
        rollout_config: RolloutConfig,
        max_seqs: int = 64,
        **options: Any,
    ):
        if mesh is not None and mesh.size > 1:
            raise ValueError(
                f"jaxkv.tunix.Rollout runs on one device, and the mesh for rollouts has {mesh.size}: give "
                "role_to_mesh a mesh of one device for Role.ROLLOUT."
            )
        is_adapter = isinstance(tokenizer, TokenizerAdapter)
        self._tokenizer = tokenizer if is_adapter else TokenizerAdapter(tokenizer)
        self._model = PagedModel.make(rollout_actor)
        self._actor: nnx.Module | None = rollout_actor  # None: parameters are brought by update_params
        if mesh is not None and mesh.devices.item() not in _find_devices(self._model.state):
            place = jax.sharding.NamedSharding(mesh, jax.P())
            self._model = dataclasses.replace(self._model, state=jax.device_put(self._model.state, place))
            self._actor = None
        options = {"max_seq_len": rollout_config.kv_cache_size, "prefix_cache": True} | options
        self._engine = Engine(self._model, max_seqs=max_seqs, **options)
        self._engine.release(parameters=True)
        if self._actor is not None:  # what the trainer replaces is kept by nobody
            self._model = dataclasses.replace(self._model, state=jax.tree.map(abstract_array, self._model.state))
        self._lock = threading.Lock()

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """Generates a completion of each prompt; see tunix. Without `top_p`, or at temperature 0, it is greedy."""
        is_greedy = rollout_config.top_p is None or not rollout_config.temperature
        encoded = [self._encode(prompt) for prompt in prompts]
        longest = max(map(len, encoded))
        width = rollout_config.max_prompt_length
        if width is None or width < longest:
            width = 1 << (longest - 1).bit_length()
        eos = rollout_config.eos_tokens or [self.eos_id()]
        seed = rollout_config.seed
        if seed is not None and not isinstance(seed, int):
            seed = int(jax.random.bits(seed) >> 1)
        options = {} if is_greedy else {
            "temperature": 1.0, "top_p": min(rollout_config.top_p, 1.0), "top_k": max(rollout_config.top_k or 0, 0)
        }  # fmt: skip
        with self._lock:
            engine, requests = self._refresh(1.0 if is_greedy else rollout_config.temperature), []
            try:
                for i, prompt in enumerate(encoded):
                    own = None if seed is None else (seed + i) % 2**31
                    count = rollout_config.max_tokens_to_generate
                    requests.append(engine.submit(prompt, count, eos=eos, logprobs=0, seed=own, **options))
                for _pair in engine.run():
                    pass
            finally:  # an interrupt leaves nothing that would run later
                for request in requests:
                    request.cancel()
                engine.release(parameters=True)
        failed = next((request.error for request in requests if request.error), None)
        if failed is not None:
            raise RuntimeError(f"A rollout cannot go on: {failed}.")
        pad = self.pad_id()
        has_logprobs = rollout_config.return_logprobs
        return RolloutOutput(
            text=[self._tokenizer.decode(request.tokens) for request in requests],
            logits=[],
            tokens=[np.array(request.tokens, np.int32) for request in requests],
            left_padded_prompt_tokens=np.array([[pad] * (width - len(x)) + x for x in encoded], np.int32),
            logprobs=[request.token_logprobs.tolist() for request in requests] if has_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Returns the log-probability of each token of completions, by tunix's own pass without a cache."""
        state = self._model.state if self._actor is None else nnx.state(self._actor)
        return common.compute_per_token_logps(
            self._model.graphdef,
            state,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            stop_gradient=True,
            return_logits=False,
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes other parameters, all or those of `filter_types`; the next `generate` is computed by them.

        They are cast and moved only where dtype or placement differ from the older ones.
        """
        state = self._model.state
        fitted = jax.tree.map(_fit, nnx.merge_state(state, params), state)
        with self._lock:  # the engine takes them later: here, tunix allows no transfers
            self._model, self._actor = dataclasses.replace(self._model, state=fitted), None

    def pad_id(self) -> int:
        """Returns the tokenizer's padding token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the tokenizer's end token."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Returns the model: the trainer's own, or one with the parameters of the last `update_params`."""
        return self._model.module if self._actor is None else self._actor

    def _encode(self, prompt: str) -> list[int]:
        bos = self._tokenizer.bos_id()
        tokens = ([bos] if bos else []) + list(self._tokenizer.encode(prompt))
        return [int(token) for token in self._tokenizer.dedup_bos_ids(tokens)]

    def _refresh(self, temperature: float) -> Engine:
        """Returns the engine with the present parameters, and its memory."""
        state = self._model.state
        if self._actor is not None:
            state = jax.tree.map(_fit, nnx.state(self._actor), state)
        self._engine.update(dataclasses.replace(self._model, state=state, temperature=jnp.float32(temperature)))
        self._engine.restore()
        return self._engine

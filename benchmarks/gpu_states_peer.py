"""Delta rules by flash-linear-attention's Triton kernels, of which vLLM has its own copy: `pip install fla-core`.

Its kernels write states into a new array, not where they lie, and rows of one token go to another kernel than prompts,
so that a mixed step is two calls. What it computes is compared with this library's reference before it is timed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_contenders import make_graph_contender
from gpu_timing import Contender

from pallas_kernels import reference_mixers
from pallas_kernels.common.state_batch import StateBatch

NAME = "flash-linear-attention"


def prepare_steps(
    arrays: dict[str, jax.Array], held: Sequence[jax.Array], batch: StateBatch, new: Sequence[int], expected: float
) -> Contender:
    """Returns steps of rows of so many tokens, over one pool of states after another.

    Args:
      arrays: of `pallas_kernels.gated_delta_rule`, padded, or packed where rows differ.
      held: pools, whose slot 0 is nobody's and whose row `i` lies in slot `i + 1`.
    """
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    def give(x: jax.Array) -> Any:
        on_device = torch.from_numpy(np.array(x, np.float32)).cuda()
        return on_device.bfloat16() if x.dtype == jnp.bfloat16 else on_device

    channels = arrays["g"].ndim == arrays["v"].ndim
    one, many = (
        (fused_recurrent_kda, chunk_kda) if channels else (fused_recurrent_gated_delta_rule, chunk_gated_delta_rule)
    )
    packed = arrays["v"].ndim == 3
    tokens = {name: give(arrays[name]) for name in ("q", "k", "v", "g", "beta")}
    tokens = {name: x if packed else x.flatten(0, 1) for name, x in tokens.items()}
    pools = [give(states[1:]) for states in held]
    singles = sum(n == 1 for n in new)
    options = {"scale": float(arrays["scale"]), "output_final_state": True}
    if list(new[:singles]) != [1] * singles or len(set(new[singles:])) > 1:
        raise ValueError(f"Give rows of one token first, and others of as many tokens each; got {new}.")

    @torch.no_grad()
    def step(states: Any) -> list[tuple[Any, Any]]:
        calls: list[tuple[Callable[..., Any], slice, int]] = []
        if singles:
            calls.append((one, slice(singles), 1))
        if len(new) > singles:
            calls.append((many, slice(singles, None), new[-1]))
        return [
            rule(
                **{name: x[of].unflatten(0, (-1, n)) for name, x in tokens.items()}, initial_state=states[of], **options
            )
            for rule, of, n in calls
        ]

    found = torch.cat([y.flatten(0, 1) for y, _ in step(pools[0])]).float().cpu().numpy()
    right, _ = reference_mixers.gated_delta_rule(**arrays, states=held[0], batch=batch)
    right = np.asarray(right, np.float32).reshape(found.shape)
    off = float(np.linalg.norm(found - right) / np.linalg.norm(right))
    if not off < 0.02:
        raise ValueError(f"{NAME} differs from the reference by {off:.3g} of its norm: it is asked something else.")
    return make_graph_contender([lambda states=states: step(states) for states in pools], expected)

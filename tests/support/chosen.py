"""Steps whose queries choose tokens, for the kernels of every platform: against the reference with a mask of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.testing import Case

B16 = {"dtype": "bfloat16"}
LATENT_ROWS = {"num_kv_heads": 1, "head_dim": 576, "rank": 512, "scale": 0.1}


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A step whose queries choose tokens: some twice, some that are ahead of them, some that are none."""

    case: Case
    kind: str | None = None  # how the pool is stored
    top_k: int = 70

    def check(self, run: Callable[..., Any], seed: int = 0) -> None:
        """Raises AssertionError unless `run(attend, pool and rows, tokens)` is the reference's, attend being the
        function that it runs, `attend(pool and rows, tokens, backend)`, by a backend's `paged_attention`."""
        case = self.case
        inputs, options = testing.make_inputs(case, seed), testing.make_options(case)
        draw, axes = np.random.default_rng(seed), inputs.q.shape[:-2]
        token = locate(axes, inputs.lengths, inputs.new, None)
        row, position, valid = (np.asarray(x) for x in token)
        longest = max(case.lengths)
        tokens = draw.integers(-3, longest + 3, (*axes, self.top_k))
        tokens = np.where(draw.random((*axes, 1)) < 0.2, -1, tokens)  # some choose nothing
        tokens[..., : self.top_k // 3] = draw.integers(
            0, np.maximum(position, 0)[..., None] + 1, (*axes, self.top_k // 3)
        )
        mask = (tokens[..., None] == np.arange(longest)).any(axis=-2)
        # What no query of a row sees is NaN, keys and values, for the kernels.
        reach = np.arange(longest) <= position[..., None]
        if case.window is not None:
            reach &= np.arange(longest) > position[..., None] - case.window
        kv, tables = np.array(inputs.kv), np.asarray(inputs.tables)
        for at, length in enumerate(case.lengths):
            seen = (mask & reach)[valid & (row == at)].any(axis=0)
            for place in np.flatnonzero(~seen[:length]):
                kv[tables[at, place // case.block_size], :, :, place % case.block_size] = np.nan
        held, whole, quantised = inputs._replace(kv=jnp.asarray(kv)), inputs, {}
        if self.kind is not None:
            held, quantised["kv_scale"], whole = testing.quantise(case, inputs, self.kind)
            quantised["kind"] = self.kind
        expected, logs = pallas_kernels.paged_attention(
            *whole, **options, mask=jnp.asarray(mask), return_lse=True, implementation="reference"
        )

        def attend(held: Any, tokens: jax.Array, backend: Callable[..., Any]) -> Any:
            call = bundle_call(**held._asdict(), tokens=tokens, return_lse=True, **options, **quantised)
            return backend(call.q, *call[:4])

        out, lse = run(attend, held, jnp.asarray(tokens, jnp.int32))
        testing.assert_close(out, expected)
        testing.assert_close(lse, logs, dtype=case.dtype)

"""Small steps over quantised pools, as those of `trials`."""

from gpu_trial import B16, F16, ONE, SMALL, Trial

from pallas_kernels.testing import Case

BLOCKS_OF_32 = {**ONE, "block_size": 32}
# Every kind in both kernels: more tiles than slots, cut rows, a window's edges, tails, an odd group, a padded head_dim.
QUANTISED_DECODE = {
    "int8, lengths": Trial(Case((5, 0, 150, 64), (1, 0, 1, 1), block_size=32, **B16), kind="int8", **SMALL),
    "int8, ring": Trial(Case((500,), (1,), **BLOCKS_OF_32), kind="int8"),
    "int8, window, group of 5": Trial(
        Case((237,), (1,), num_heads=5, num_kv_heads=1, head_dim=128, window=100, block_size=64, sinks=True, **F16),
        poison_before_window=True, kind="int8",
    ),
    "int8, first tokens": Trial(
        Case((300,), (1,), window=60, sink_tokens=5, max_blocks=12, **BLOCKS_OF_32), kind="int8",
        poison_before_window=True,
    ),
    "e4m3": Trial(
        Case((130, 63), (1, 1), head_dim=80, stored_head_dim=128, block_size=32, **B16), kind="float8_e4m3fn",
    ),
    "int8, 48 heads of two": Trial(
        Case((150, 40), (1, 1), num_heads=96, num_kv_heads=2, block_size=32, **B16), kind="int8", **SMALL,
    ),
    "e5m2, few tokens": Trial(Case((200, 5), (3, 5), **BLOCKS_OF_32), kind="float8_e5m2", **SMALL),
    "int4, one tile": Trial(Case((33,), (1,), num_heads=2, **BLOCKS_OF_32), kind="int4"),
    "int4, lengths": Trial(Case((5, 0, 150, 64), (1, 0, 1, 1), block_size=32, **B16), kind="int4", **SMALL),
    "int4, edges of blocks": Trial(
        Case((31, 32, 33, 0, 63, 64, 65), (1, 1, 1, 0, 1, 1, 1), num_heads=5, **BLOCKS_OF_32), kind="int4", **SMALL,
    ),
    "int4, ring": Trial(Case((500,), (1,), head_dim=128, **BLOCKS_OF_32), kind="int4"),
    "int4, odd groups": Trial(
        Case((130, 63), (1, 1), head_dim=80, stored_head_dim=128, block_size=32, **B16), kind="int4",
    ),
    "int4, groups across halves": Trial(
        Case((33, 129, 191), (1, 1, 1), head_dim=96, stored_head_dim=128, block_size=96, **F16), kind="int4", **SMALL,
    ),
    "int4, one group": Trial(
        Case((31, 65), (1, 1), head_dim=32, stored_head_dim=64, block_size=64, **F16), kind="int4",
    ),
    "int4, window, head_dim 256": Trial(
        Case((237,), (1,), num_heads=5, num_kv_heads=1, head_dim=256, window=100, block_size=128, sinks=True, **B16),
        poison_before_window=True, kind="int4",
    ),
    "int4, first tokens": Trial(
        Case((300,), (1,), head_dim=192, window=60, sink_tokens=5, max_blocks=12, **BLOCKS_OF_32), kind="int4",
        poison_before_window=True,
    ),
    "int4, few tokens": Trial(Case((200, 5), (3, 5), **BLOCKS_OF_32), kind="int4", **SMALL),
    "k5v3, one group": Trial(Case((5, 0, 150, 64), (1, 0, 1, 1), block_size=32, **B16), kind="k5v3", **SMALL),
    "k5v3, ring": Trial(Case((500,), (1,), head_dim=128, **BLOCKS_OF_32), kind="k5v3"),
    "k5v3, groups across halves": Trial(
        Case((33, 130), (1, 1), head_dim=192, block_size=96, **F16), kind="k5v3", **SMALL,
    ),
    "k5v3, half a group": Trial(
        Case((33, 129), (1, 1), head_dim=96, stored_head_dim=128, block_size=32, **B16), kind="k5v3", **SMALL,
    ),
    "k5v3, head_dim 256": Trial(
        Case((237,), (1,), num_heads=5, num_kv_heads=1, head_dim=256, window=100, block_size=128, sinks=True, **B16),
        poison_before_window=True, kind="k5v3",
    ),
}  # fmt: skip
QUANTISED_PREFILL = {
    "int8, mixed": Trial(Case((5, 0, 150, 64), (3, 0, 70, 1), block_size=32, **B16), kind="int8", **SMALL),
    "int8, 48 heads of two": Trial(
        Case((150, 40), (9, 3), num_heads=96, num_kv_heads=2, block_size=32, **B16), kind="int8", **SMALL,
    ),
    "int8, ring": Trial(Case((440,), (9,), **BLOCKS_OF_32), kind="int8"),
    "int8, wide tiles": Trial(
        Case((390,), (40,), num_heads=2, head_dim=128, window=200, **BLOCKS_OF_32), prefill_tokens=128, kind="int8",
        poison_before_window=True,
    ),
    "int8, first tokens": Trial(
        Case((300,), (9,), window=60, sink_tokens=5, max_blocks=12, **BLOCKS_OF_32), kind="int8",
        poison_before_window=True,
    ),
    "e4m3": Trial(Case((191,), (20,), soft_cap=9.0, **BLOCKS_OF_32), kind="float8_e4m3fn"),
    "e5m2": Trial(Case((100,), (9,), **BLOCKS_OF_32), kind="float8_e5m2"),
    "int8, head_dim 512": Trial(
        Case((300, 9), (20, 3), num_heads=5, num_kv_heads=1, head_dim=512, window=150, packed=True, padding=2,
             max_blocks=12, block_size=32, **B16),
        poison_before_window=True, kind="int8", **SMALL,
    ),
    "e4m3, head_dim 320": Trial(Case((191,), (20,), head_dim=320, **BLOCKS_OF_32), kind="float8_e4m3fn"),
    "int4, mixed": Trial(Case((5, 0, 150, 64), (3, 0, 70, 1), block_size=32, **B16), kind="int4", **SMALL),
    "int4, ring": Trial(Case((440,), (9,), head_dim=128, **BLOCKS_OF_32), kind="int4"),
    "int4, wide tiles": Trial(
        Case((390,), (40,), num_heads=2, head_dim=96, stored_head_dim=128, window=200, **BLOCKS_OF_32), kind="int4",
        poison_before_window=True, prefill_tokens=128,
    ),
    "int4, head_dim 256": Trial(Case((191,), (20,), head_dim=256, block_size=64, **F16), kind="int4"),
    "k5v3, mixed": Trial(
        Case((5, 0, 150, 64), (3, 0, 70, 1), head_dim=128, block_size=32, **B16), kind="k5v3", **SMALL
    ),
    "k5v3, half a group": Trial(
        Case((390,), (40,), num_heads=2, head_dim=96, stored_head_dim=128, window=200, **BLOCKS_OF_32), kind="k5v3",
        poison_before_window=True, prefill_tokens=128,
    ),
}  # fmt: skip

"""Small steps that together take every branch of the kernels: what the tests pass and each mutant must fail."""

from gpu_trial import B16, F16, ONE, SMALL, Trial

from pallas_kernels.testing import Case

DECODE = {
    "lengths": Trial(Case((5, 0, 150, 64), (1, 0, 1, 1), **B16), **SMALL),
    # Eight tiles in a ring of two: every slot is filled four times.
    "ring": Trial(Case((500,), (1,), **ONE)),
    # One place of the last tile, or of the last but one, is not seen.
    "tails": Trial(Case((63, 127, 191, 64), (1, 1, 1, 1), **ONE)),
    # The window begins inside a block, a piece and a tile; before it there is NaN.
    "window": Trial(Case((300, 70, 237), (1, 1, 1), window=60, max_blocks=25, **ONE), poison_before_window=True),
    "window, cut": Trial(
        Case((500, 200, 350), (1, 1, 1), window=330, block_size=32, sinks=True, max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "the window's first token": Trial(Case((190,), (1,), window=60, **ONE), loud=((0, 129), (0, 130))),
    # First tokens that end inside a block, over two tiles, at a tile's edge, and in the window's first tile; a row that
    # is shorter than they and the window. Between there is NaN, and there are no blocks.
    "first tokens": Trial(
        Case((300, 237, 70, 0, 20), (1, 1, 1, 0, 1), window=60, sink_tokens=20, max_blocks=25, **ONE),
        poison_before_window=True,
    ),
    "first tokens, cut": Trial(
        Case((500, 350, 270), (1, 1, 1), window=200, block_size=32, sink_tokens=70, sinks=True, max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "first tokens of a tile": Trial(
        Case((330, 200), (1, 1), window=100, sink_tokens=64, num_heads=7, num_kv_heads=1, head_dim=80,
             stored_head_dim=128, block_size=8, max_blocks=60, **F16),
        poison_before_window=True, loud=((0, 63), (0, 64)),
    ),
    # Query heads of a KV head in two parts, and in three that 71 do not fill.
    "48 heads of two": Trial(Case((150, 5), (1, 1), num_heads=96, num_kv_heads=2, sinks=True, **B16), **SMALL),
    "71 heads, window": Trial(
        Case((300, 70), (1, 1), num_heads=71, window=60, soft_cap=5.0, sinks=True, max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "head_dim 512": Trial(
        Case((150, 70), (1, 1), num_heads=10, head_dim=512, window=100, sinks=True, max_blocks=15, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "64 heads": Trial(Case((130, 0, 64), (1, 0, 1), num_heads=64, head_dim=128, **ONE)),
    "wild ids": Trial(
        Case((150, 30), (1, 1), **B16), poison=0.5, tables=((0, 1, 10**6), (0, 2, -7), (0, 3, 2**31 - 1)),
    ),
    "beyond the table": Trial(Case((64, 40, 96), (1, 1, 1), **ONE), poison=0.5, lengths=(200, 40, 97)),
    "far beyond the table": Trial(Case((64, 40, 96), (1, 1, 1), **ONE), poison=0.5, lengths=(10**6, 40, 2**31 - 1)),
    "extreme logits": Trial(Case((200, 20), (1, 1), scale=40.0, **ONE), **SMALL),
    "extreme logits, capped": Trial(Case((200, 20), (1, 1), scale=1e4, soft_cap=20.0, **ONE)),
    "sinks": Trial(Case((300, 1, 0), (1, 1, 0), window=60, sinks=True, block_size=256, **B16), **SMALL),
    "group of 5": Trial(
        Case((200, 100), (1, 1), num_heads=5, num_kv_heads=1, window=64, soft_cap=5.0, block_size=24, **F16), **SMALL,
    ),
    "head_dim 80": Trial(
        Case((130, 0), (1, 0), num_heads=1, num_kv_heads=1, head_dim=80, stored_head_dim=128, sinks=True, **F16),
    ),
    "head_dim 256": Trial(
        Case((70,), (1,), num_heads=20, num_kv_heads=1, head_dim=256, block_size=8, scale=0.1, **B16),
    ),
    "group of 7": Trial(Case((40, 90), (1, 1), num_heads=14, stored_head_dim=128, max_blocks=9, **B16)),
    "explicit offsets": Trial(Case((90, 0, 40), (1, 0, 1), packed=True, **B16), gaps=2),
    "more rows than a chunk": Trial(Case((9,) * 64 + (150, 3), (0,) * 63 + (1, 1, 1), **ONE), **SMALL),
    # A few new tokens a row, as when a draft is checked: each sees one more than the last, or has a window of its own.
    "few tokens": Trial(Case((200, 5, 0, 64, 130), (3, 5, 0, 1, 2), **B16), **SMALL),
    "few tokens, window": Trial(
        Case((318, 70, 64), (5, 3, 5), window=61, block_size=32, sinks=True, max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "few tokens, the window's first token": Trial(
        Case((200,), (4,), num_heads=3, window=60, **ONE), loud=((0, 137), (0, 138), (0, 196)), **SMALL,
    ),
    "few tokens, more new than tokens": Trial(Case((64, 40), (5, 3), **ONE), poison=0.5, lengths=(3, 40)),
    # A row's first place in a chunk, its last, and one between; blocks and tiles that lie before are NaN.
    "chunk": Trial(Case((97, 96, 300), (1, 1, 1), chunk=96, max_blocks=25, **ONE), poison_before_window=True),
    "chunk, cut": Trial(
        Case((500, 255), (1, 1), chunk=256, block_size=32, sinks=True, max_blocks=25, **ONE), poison_before_window=True,
        **SMALL,
    ),
    # Tokens on both sides of a chunk's edge.
    "few tokens, chunk": Trial(
        Case((163, 98, 40), (5, 4, 1), chunk=32, num_heads=3, max_blocks=25, **ONE), poison_before_window=True, **SMALL,
    ),
    "tree": Trial(
        Case((130, 5, 0, 64), (5, 5, 0, 2), tree=True, num_heads=3, **ONE), loud=((0, 127), (3, 63)), **SMALL,
    ),
    "tree of as many tokens as fit": Trial(Case((100,), (32,), tree=True, num_heads=1, **ONE)),
    "tree, window": Trial(
        Case((130,), (8,), tree=True, window=6, max_blocks=25, **ONE), poison_before_window=True,
    ),
    "tree, chunk": Trial(Case((130,), (8,), tree=True, chunk=64, max_blocks=25, **ONE), poison_before_window=True),
    "few tokens, first tokens": Trial(
        Case((318, 70, 64), (5, 3, 5), window=61, block_size=32, sink_tokens=33, num_heads=5, num_kv_heads=1,
             max_blocks=25, **B16),
        poison_before_window=True, **SMALL,
    ),
    "tree, first tokens": Trial(
        Case((330, 12), (8, 8), tree=True, window=6, sink_tokens=5, max_blocks=25, **ONE), poison_before_window=True,
    ),
    "few tokens, spans": Trial(Case((40, 70), (8, 3), spans=True, window=3, **ONE)),
    "one item for each of many tiles": Trial(
        Case((64 * 39 + 5,), (1,), block_size=128, sinks=True, **ONE), wave=40,
    ),
}  # fmt: skip

PREFILL = {
    "mixed": Trial(Case((5, 0, 150, 64), (3, 0, 70, 1), **B16), **SMALL),
    "packed": Trial(
        Case((5, 0, 150, 64), (3, 0, 70, 1), packed=True, padding=3, num_heads=5, num_kv_heads=1, sinks=True, **B16),
        **SMALL,
    ),
    "71 heads of two": Trial(
        Case((5, 0, 70, 64), (3, 0, 9, 1), packed=True, padding=3, num_heads=142, num_kv_heads=2, sinks=True, **B16),
        **SMALL,
    ),
    "48 heads, chunks": Trial(Case((330, 60), (9, 3), num_heads=48, sinks=True, packed=True, **ONE), chunks=3),
    "64 heads, tree": Trial(Case((100, 40), (6, 3), tree=True, num_heads=64, **ONE), **SMALL),
    "48 heads, window": Trial(
        Case((300,), (20,), num_heads=48, window=60, sink_tokens=20, max_blocks=25, **ONE), poison_before_window=True,
    ),
    # Seven tiles in a ring of two, of a long context and few queries.
    "ring": Trial(Case((440,), (9,), **ONE)),
    "tails": Trial(Case((63, 191), (20, 3), **ONE)),
    "tails of wide tiles": Trial(Case((383,), (40,), num_heads=2, head_dim=128, **ONE), prefill_tokens=128),
    "wide tiles": Trial(Case((390,), (40,), num_heads=2, head_dim=128, **ONE), prefill_tokens=128),
    "window": Trial(
        Case((300, 70, 237), (20, 5, 9), window=60, max_blocks=25, **ONE), poison_before_window=True,
    ),
    # The last token's window begins one place into a tile that causality shows wholly to all.
    "the window's first token": Trial(Case((161,), (30,), window=96, **ONE), loud=((0, 64), (0, 65))),
    "a window of less than a tile": Trial(
        Case((300, 20), (130, 2), window=50, num_heads=1, num_kv_heads=1, block_size=24, packed=True, **F16), **SMALL,
    ),
    "a window that sees some tiles wholly": Trial(
        Case(
            (90, 7), (40, 7), num_heads=20, num_kv_heads=1, head_dim=80, stored_head_dim=128, block_size=256,
            window=80, **F16,
        ),
    ),
    "head_dim 256": Trial(
        Case((200, 20), (20, 2), window=50, soft_cap=4.0, num_kv_heads=1, head_dim=256, block_size=8, **B16),
    ),
    # Consumers with columns of their own: half of them each, and of five tiles three and two.
    "head_dim 512": Trial(
        Case((200, 20), (20, 9), window=50, soft_cap=4.0, num_kv_heads=1, head_dim=512, block_size=8, sinks=True,
             packed=True, padding=2, max_blocks=40, **B16),
        poison_before_window=True, **SMALL,
    ),
    "head_dim 320": Trial(Case((70,), (5,), num_heads=5, num_kv_heads=1, head_dim=320, packed=True, **F16), gaps=1),
    "head_dim 384, chunks": Trial(
        Case((330, 60), (10, 3), num_heads=10, num_kv_heads=2, head_dim=384, sinks=True, packed=True, padding=2, **B16),
        chunks=3,
    ),
    "head_dim 512, ring": Trial(Case((440,), (9,), head_dim=512, **ONE)),
    "head_dim 512, tree": Trial(Case((100, 40), (50, 3), tree=True, num_heads=2, head_dim=512, **ONE), **SMALL),
    "head_dim 512, first tokens": Trial(
        Case((300,), (20,), num_heads=48, head_dim=512, window=60, sink_tokens=20, max_blocks=25, **ONE),
        poison_before_window=True,
    ),
    # The second row has fewer tiles than there are chunks; the first one's queries do not see all of the last.
    "chunks": Trial(Case((330, 60), (40, 3), sinks=True, packed=True, padding=2, **ONE), chunks=3),
    # Items of both consumers' tokens, of one's, and of some of it; nothing lies at a multiple of anything.
    "odd places": Trial(
        Case((52, 11), (25, 11), packed=True, num_heads=7, num_kv_heads=1, head_dim=96, stored_head_dim=128, **F16),
        gaps=3,
    ),
    "padding": Trial(Case((70, 9), (66, 5), num_heads=1, num_kv_heads=1, **B16)),  # more than 32 places without a token
    "sinks": Trial(Case((20, 3), (17, 3), num_heads=6, num_kv_heads=2, sinks=True, packed=True, **B16)),
    "chunks, window": Trial(
        Case((430,), (30,), window=200, max_blocks=30, **ONE), chunks=2, poison_before_window=True,
    ),
    "first tokens": Trial(
        Case((300, 70, 237), (20, 5, 9), window=60, sink_tokens=20, max_blocks=25, **ONE), poison_before_window=True,
    ),
    "first tokens, wide tiles": Trial(
        Case((430, 20), (40, 9), num_heads=5, num_kv_heads=1, head_dim=128, window=150, sink_tokens=130, max_blocks=30,
             packed=True, **B16),
        prefill_tokens=128, poison_before_window=True,
    ),
    "first tokens, chunks": Trial(
        Case((430, 60), (30, 3), window=150, sink_tokens=70, max_blocks=30, sinks=True, packed=True, **ONE), chunks=3,
        poison_before_window=True,
    ),
    "first tokens, tree": Trial(
        Case((300, 20), (50, 18), tree=True, window=5, sink_tokens=9, num_heads=2, packed=True, padding=2,
             max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "first tokens, spans": Trial(
        Case((300,), (70,), spans=True, window=4, sink_tokens=9, num_heads=2, max_blocks=25, **ONE),
        poison_before_window=True,
    ),
    # As many items as there is room for: each row's last has one token.
    "chunk": Trial(
        Case((230, 110), (60, 9), chunk=80, num_heads=2, max_blocks=25, **ONE), poison_before_window=True,
    ),
    # The first query sees all of one tile, and the others none of it.
    "the chunk's first token": Trial(Case((200,), (9,), chunk=64, **ONE), loud=((0, 128), (0, 190), (0, 192))),
    "tree": Trial(Case((150, 5, 64), (50, 3, 1), tree=True, num_heads=2, packed=True, padding=2, **ONE), **SMALL),
    "tree, window": Trial(Case((200,), (64,), tree=True, window=5, sinks=True, **ONE)),
    "tree, chunks": Trial(Case((330,), (40,), tree=True, chunk=128, max_blocks=25, **ONE), chunks=2),
    "spans": Trial(Case((60, 200), (3, 70), spans=True, packed=True, padding=3, num_heads=2, **ONE), **SMALL),
    "spans, window": Trial(Case((200,), (70,), spans=True, window=4, num_heads=2, **ONE)),
    "tight items": Trial(Case((40, 33, 33), (33, 33, 33), packed=True, **ONE)),
    "explicit offsets": Trial(Case((90, 3, 40), (30, 1, 17), packed=True, **B16), gaps=2),
    "wild ids": Trial(
        Case((150, 30), (9, 4), packed=True, **B16), poison=0.5, tables=((0, 1, 10**6), (0, 2, -7), (0, 3, 2**31 - 1)),
    ),
    "beyond the table": Trial(Case((64, 40), (9, 3), **ONE), poison=0.5, lengths=(10**6, 40)),
    "more new tokens than tokens": Trial(Case((64, 40, 9), (9, 3, 2), **ONE), poison=0.5, lengths=(4, 40, 0)),
    "more new tokens than tokens, chunk": Trial(
        Case((0, 2), (9, 9), chunk=64, max_blocks=9, **ONE), poison_before_window=True,
    ),
    "extreme logits": Trial(Case((100, 20), (9, 2), scale=40.0, **ONE)),
    "4, 3, 2, 1 and 0 tiles": Trial(
        Case((256, 192, 128, 64, 9), (9,) * 5, **ONE), poison=0.5, lengths=(256, 192, 128, 64, 0)
    ),
    "nothing to prefill": Trial(Case((9, 3), (1, 0), packed=True, **B16)),
}  # fmt: skip

# Rows of 136 stored as 192, of which 128 are values.
LATENT_ROWS = dict(num_kv_heads=1, head_dim=136, stored_head_dim=192, rank=128, scale=0.1)
ROWS_16 = dict(num_heads=16, **LATENT_ROWS, **B16)
LATENT = {
    "lengths": Trial(Case((5, 0, 150, 64), (1, 0, 1, 1), num_heads=5, **LATENT_ROWS, **B16), **SMALL),
    # Eight tiles in a ring of two: every slot is filled four times.
    "ring": Trial(Case((500,), (1,), **ROWS_16)),
    "tails": Trial(Case((63, 127, 191, 1), (1, 1, 1, 1), num_heads=1, block_size=8, **LATENT_ROWS, **F16)),
    "two tiles of heads, cut": Trial(
        Case((150, 70), (1, 1), num_heads=128, sinks=True, **LATENT_ROWS, **B16), **SMALL,
    ),
    "a loud token behind the last": Trial(Case((129, 3), (1, 1), **ROWS_16), loud=((0, 129), (1, 3)), poison=0.5),
    "window": Trial(Case((300, 70, 237), (1, 1, 1), window=60, max_blocks=25, **ROWS_16), poison_before_window=True),
    "the window's first token": Trial(Case((190,), (1,), window=60, **ROWS_16), loud=((0, 129), (0, 130))),
    "window, cut": Trial(
        Case((500, 350), (1, 1), window=330, block_size=32, sinks=True, soft_cap=5.0, max_blocks=25, **ROWS_16),
        poison_before_window=True, **SMALL,
    ),
    "first tokens, cut": Trial(
        Case((500, 270, 20), (1, 1, 1), window=200, block_size=32, sink_tokens=70, max_blocks=25, **ROWS_16),
        poison_before_window=True, **SMALL,
    ),
    "chunk": Trial(Case((97, 96, 300), (1, 1, 1), chunk=96, max_blocks=25, **ROWS_16), poison_before_window=True),
    "wild ids": Trial(
        Case((150, 30), (1, 1), **ROWS_16), poison=0.5, tables=((0, 1, 10**6), (0, 2, -7), (0, 3, 2**31 - 1)),
    ),
    "beyond the table": Trial(Case((64, 40, 96), (1, 1, 1), **ROWS_16), poison=0.5, lengths=(200, 40, 97)),
    "extreme logits": Trial(Case((200, 20), (1, 1), **ROWS_16 | dict(scale=20.0)), **SMALL),
    "as published": Trial(
        Case((130,), (1,), num_kv_heads=1, num_heads=16, head_dim=576, rank=512, scale=0.1, block_size=64, **B16),
    ),
    "rank 384, all of it keys": Trial(
        Case((130,), (1,), num_kv_heads=1, num_heads=7, head_dim=384, rank=384, scale=0.05, **F16), **SMALL,
    ),
    "few tokens": Trial(
        Case((200, 5, 0, 64, 130), (3, 5, 0, 1, 2), num_heads=7, sinks=True, **LATENT_ROWS, **B16), **SMALL,
    ),
    "few tokens, window": Trial(
        Case((318, 70, 64), (4, 3, 4), window=61, block_size=32, max_blocks=25, **ROWS_16), poison_before_window=True,
        **SMALL,
    ),
    "few tokens, more new than tokens": Trial(Case((64, 40), (4, 3), **ROWS_16), poison=0.5, lengths=(3, 40)),
    "few tokens, tree": Trial(
        Case((130, 5, 0, 64), (5, 5, 0, 2), tree=True, num_heads=3, **LATENT_ROWS, **B16), loud=((0, 127), (3, 63)),
        **SMALL,
    ),
    "packed": Trial(
        Case((5, 0, 150, 64), (3, 0, 20, 1), packed=True, padding=3, sinks=True, **ROWS_16), **SMALL,
    ),
    "packed, two tiles of heads": Trial(
        Case((70, 3), (3, 1), packed=True, num_heads=128, **LATENT_ROWS, **B16), **SMALL,
    ),
    "prefill": Trial(Case((191, 64, 40), (9, 1, 0), num_heads=5, padding=2, **LATENT_ROWS, **B16), **SMALL),
    "prefill, ring": Trial(Case((440,), (9,), **ROWS_16)),
    "prefill, window": Trial(
        Case((300, 70), (20, 5), window=60, max_blocks=25, **ROWS_16), poison_before_window=True,
    ),
    "prefill, the window's first token": Trial(
        Case((161,), (17,), window=96, **ROWS_16), loud=((0, 64), (0, 65), (0, 160)),
    ),
    "prefill, first tokens": Trial(
        Case((300, 70), (6, 5), window=60, sink_tokens=20, max_blocks=25, **ROWS_16), poison_before_window=True,
    ),
    "prefill, chunks": Trial(Case((330, 60), (10, 3), sinks=True, packed=True, **ROWS_16), chunks=3),
    "prefill, chunks, tree": Trial(Case((200,), (10,), tree=True, num_heads=8, **LATENT_ROWS, **B16), chunks=2),
    "prefill, tree": Trial(
        Case((150, 5, 64), (20, 3, 1), tree=True, packed=True, padding=2, **ROWS_16), **SMALL,
    ),
    "prefill, spans": Trial(Case((60, 80), (3, 17), spans=True, packed=True, padding=3, **ROWS_16), **SMALL),
    "prefill, a chunk's edge": Trial(Case((110,), (20,), chunk=96, max_blocks=25, **ROWS_16)),
    "prefill, explicit offsets": Trial(Case((90, 3, 40), (10, 1, 7), packed=True, **ROWS_16), gaps=2),
    "prefill, more new than tokens": Trial(Case((64, 40), (9, 3), **ROWS_16), poison=0.5, lengths=(4, 40)),
}  # fmt: skip

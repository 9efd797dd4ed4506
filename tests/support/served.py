"""The prompt that tests of serving submit, the sizes of their engines, and the ways in which those work."""

PROMPT, COUNT = [3, 1, 4, 1, 5], 20
SIZES = dict(max_seqs=4, max_seq_len=48, block_size=4)
WAYS = {
    "plain": {}, "several steps": {"steps_per_dispatch": 3}, "guesses": {"draft": "ngram"},
    "prefix cache": {"prefix_cache": True, "num_blocks": 30},
}  # fmt: skip

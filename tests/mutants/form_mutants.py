"""Mistakes about which rows of a pool a head's numbers stand in, and the test that notices each."""

from mutant import Mutant

FORMS, MEMORY = "_core/config/kv_packing.py", "_core/config/byte_sizes.py"
SAME = "core/test_joined.py::test_everything_is_the_same_as_apart"
OVER_DEVICES = "core/test_joined_shards.py::"

MUTANTS = {
    "queries in the other head's half": Mutant(
        FORMS, "in_second == self._is_second(q", "in_second != self._is_second(q", SAME
    ),
    "the other head's half of the output": Mutant(FORMS, "second, first)", "first, second)", SAME),
    "heads of a pair by turns": Mutant(
        FORMS, "(heads // (q.shape[-2] // (2 * num_pairs)) % 2 == 1)", "(heads % 2 == 1)", SAME
    ),
    "a token stored in its pair's first half": Mutant(
        FORMS, "return head // 2, head % 2 * self.head_dim", "return head // 2, 0",
        OVER_DEVICES + "test_pairs_are_divided_as_heads_are",
    ),
    "halves counted from the padding's end": Mutant(
        FORMS, "kv[..., : 2 * self.head_dim].reshape", "kv[..., -2 * self.head_dim :].reshape", SAME
    ),
    "fewer heads than devices are no pairs": Mutant(
        MEMORY, "heads < count or heads // 2 % count == 0", "heads // 2 % count == 0",
        OVER_DEVICES + "test_a_config_for_a_model_follows_where_it_lies",
    ),
    "as many heads as devices are pairs": Mutant(
        MEMORY, "heads < count or heads // 2 % count == 0", "heads <= count or heads // 2 % count == 0",
        OVER_DEVICES + "test_heads_that_are_one_to_a_device_are_no_pairs",
    ),
    "the scale of the row's width": Mutant(
        "_core/attention/attention.py", "form(one.number).joins and options.get",
        "form(one.number).rank and options.get", SAME
    ),
    "an engine's config does not know its mesh": Mutant(
        "_engine/frontend/engine.py", "mesh=mesh_of(model), ", "",
        OVER_DEVICES + "test_a_config_for_a_model_follows_where_it_lies",
    ),
    "half of what a test spoils is left": Mutant(
        "testing.py", "cache.config.form(stack[0]).block(2, 2)", "(cache.layer_config(stack[0]).head_dim,)",
        "core/test_joined.py::test_a_head_dim_that_leaves_padding_behind_the_row",
    ),
    "pairs sent as a head's keys and values": Mutant(
        "_tiers/send.py", "if type(form) is type(other):", "if form.joins == other.joins:",
        "tiers/test_send.py::test_the_next_token_sees_the_same",
    ),
}  # fmt: skip

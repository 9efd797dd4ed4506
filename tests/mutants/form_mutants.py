"""Mistakes about which rows of a pool a head's numbers stand in, and the test that notices each."""

from planting import Plant

MUTANTS = {
    "queries in the other head's half": (
        "test_everything_is_the_same_as_apart",
        Plant(
            "Pairs.pack_queries",
            "in_second == self._is_second(q, num_kv_heads)",
            "in_second != self._is_second(q, num_kv_heads)",
        ),
    ),
    "the other head's half of the output": (
        "test_everything_is_the_same_as_apart",
        Plant(
            "Pairs.unpack_outputs",
            "jnp.where(self._is_second(out, num_kv_heads), second, first)",
            "jnp.where(self._is_second(out, num_kv_heads), first, second)",
        ),
    ),
    "heads of a pair by turns": (
        "test_everything_is_the_same_as_apart",
        Plant("Pairs._is_second", "heads // (q.shape[-2] // (2 * num_pairs))", "heads"),
    ),
    "a token stored in its pair's first half": (
        "test_pairs_are_divided_as_heads_are",
        Plant("Pairs.locate_head", "head % 2 * self.head_dim", "0"),
    ),
    "halves counted from the padding's end": (
        "test_everything_is_the_same_as_apart",
        Plant("Pairs.unpack", "kv[..., :2 * self.head_dim]", "kv[..., -2 * self.head_dim:]"),
    ),
    "fewer heads than devices are no pairs": (
        "test_a_config_for_a_model_follows_where_it_lies",
        Plant(
            "ByteSizes.pairs_divide",
            "not isinstance(self.form(layer), Pairs) or heads < count or heads // 2 % count == 0",
            "not isinstance(self.form(layer), Pairs) or heads // 2 % count == 0",
        ),
    ),
    "as many heads as devices are pairs": (
        "test_heads_that_are_one_to_a_device_are_no_pairs",
        Plant("ByteSizes.pairs_divide", "heads < count", "heads <= count"),
    ),
    "the scale of the row's width": (
        "test_everything_is_the_same_as_apart",
        Plant("_kernel_options", "layer.config.form(layer.number).joins", "layer.config.form(layer.number).rank"),
    ),
    "an engine's config does not know its mesh": (
        "test_a_config_for_a_model_follows_where_it_lies",
        Plant("Engine.__init__", "find_mesh(model)", "None"),
    ),
    "half of what a test spoils is left": (
        "test_a_head_dim_that_leaves_padding_behind_the_row",
        Plant("_poison", "cache.config.form(stack[0]).row_shape(2, 2)", "(cache.layer_config(stack[0]).head_dim,)"),
    ),
    "pairs sent as a head's keys and values": (
        "test_the_next_token_sees_the_same",
        Plant("_convert_layout", "type(form) is type(other)", "form.joins == other.joins"),
    ),
}

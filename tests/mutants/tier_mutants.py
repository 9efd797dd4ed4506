"""Mistakes that could be made in tables, files and what is kept of prompts; for each the test that notices it."""

from planting import Plant

MUTANTS = {
    # The index.
    "a hash is taken for the tokens": (
        "test_a_hash_collision_costs_a_comparison_and_nothing_else",
        Plant("PrefixIndex._child", "node.parent is parent and node.tokens == tokens", "node.parent is parent"),
    ),
    "a hash is taken for the chain": (
        "test_a_hash_collision_costs_a_comparison_and_nothing_else",
        Plant("PrefixIndex._child", "node.parent is parent and node.tokens == tokens", "node.tokens == tokens"),
    ),
    "the beginning of a chain goes before its end": (
        "test_the_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning",
        Plant(
            "Ends.least_needed",
            "self._list_freed(end, g, passed[g])",
            "reversed([*self._list_freed(end, g, passed[g])])",
        ),
    ),
    "labels of another line of caches are believed": (
        "test_the_same_block_of_an_older_cache_is_not_taken_for_a_newer_one",
        Plant(
            "PrefixIndex.follow",
            "[np.where(np.isin(labels, np.fromiter(self.nodes, np.int64)), labels, 0) for labels in kept]",
            "[np.where(labels > 0, own, 0) for labels, own in zip(kept, self.kept)]",
        ),
    ),
    "what is cut off is not mended": (
        "test_a_call_is_cut_off_at_every_line",
        Plant("PrefixIndex.mend", "if self.soundness.is_kept:\n    return", "return"),
    ),
    "the host's memory has no bound": (
        "test_the_host_memory_is_bounded",
        Plant("PrefixIndex._spare_host", "self.host_bytes - self.spill_bytes", "0"),
    ),
    "what is pinned is let go on the host": (
        "test_pins_hold_on_the_host_too_and_while_the_index_grows",
        Plant("PrefixIndex._spare_host", "pinned.union(own)", "set(own)"),
    ),
    "what holds nothing stays": (
        "test_salts_that_are_gone_leave_nothing_behind",
        Plant("PrefixIndex.hold", "(*left, *reversed(chain), *reversed(pruned))", "()"),
    ),
    "the last token is matched too": (
        "test_a_match_is_whole_blocks_and_leaves_a_token_to_compute",
        Plant("PrefixCache.match", "tokens[:max(len(tokens) - 1, 0)]", "tokens"),
    ),
    "a salt is no matter": (
        "test_salts_and_adapters_share_nothing",
        Plant("read_identity", "(type(salt), salt, adapter)", "(type(None), None, adapter)"),
    ),
    "an adapter is no matter": (
        "test_salts_and_adapters_share_nothing",
        Plant("read_identity", "(type(salt), salt, adapter)", "(type(salt), salt, None)"),
    ),
    "tokens are indexed that the row does not hold": (
        "test_only_what_the_row_holds_is_indexed",
        Plant("PrefixCache.insert_more", "min(count, int(length))", "count"),
    ),
    "what made room is believed to be there": (
        "test_a_call_is_cut_off_at_every_line",
        Plant("Landing.whole", "np.where(gone, 0, np.asarray(t.kept))", "np.asarray(t.kept)"),
    ),
    "an old match is believed": (
        "test_an_older_cache_gets_what_it_has_and_nothing_else",
        Plant("PrefixCache.adopt_blocks", "not is_known or self._index.usable(chain) < len(chain)", "False"),
    ),
    "one block too many can be pinned": (
        "test_bad_input_is_refused_and_nothing_is_lost",
        Plant(
            "PrefixCache.pin",
            "(limit := int(self.max_pinned * num_blocks))",
            "1 + (limit := int(self.max_pinned * num_blocks))",
        ),
    ),
    "a pool that was used up is not followed": (
        "test_a_call_is_cut_off_at_every_line",
        Plant("Landing.whole", "pools[layer] = structure.unflatten(landed)", ""),
    ),
    "the index changes before the cache": (
        "test_a_call_is_cut_off_at_every_line",
        Plant(
            "PrefixCache.insert_more",
            "change.offer(chain, [blocks[first:] for blocks in row_blocks])",
            "change.offer(chain, [blocks[first:] for blocks in row_blocks])\nself._index.hold(change.kept)\n"
            "change = Change(self._index, cache)",
        ),
    ),
    "a block gets a second salt": (
        "test_a_block_has_one_salt",
        Plant(
            "Change.offer",
            "node.blocks[group] == NULL_BLOCK and block != NULL_BLOCK and (not kept[block])",
            "node.blocks[group] == NULL_BLOCK and block != NULL_BLOCK",
        ),
    ),
    "what comes back makes room for itself": (
        "test_what_is_adopted_makes_no_room_for_itself",
        Plant("Change.restore", "set(chain)", "()"),
    ),
    "what a row uses is evicted": (
        "test_what_a_row_uses_or_what_is_pinned_stays",
        Plant(
            "Change.evict",
            "block != NULL_BLOCK and refcounts[block] == 1 and (node not in pinned) and (node not in spared)",
            "block != NULL_BLOCK and node not in pinned and (node not in spared)",
        ),
    ),
    "what is pinned is evicted": (
        "test_what_a_row_uses_or_what_is_pinned_stays",
        Plant(
            "Change.evict",
            "block != NULL_BLOCK and refcounts[block] == 1 and (node not in pinned) and (node not in spared)",
            "block != NULL_BLOCK and refcounts[block] == 1 and (node not in spared)",
        ),
    ),
    # What is worth keeping.
    "a window's middle is worth as much as its end": (
        "test_nine_tenths_are_found_at_one_and_a_half_of_the_windows_blocks",
        Plant("Ends.least_needed", "((node, g) for node in self.spare[g].values())", "()"),
    ),
    "where a chat went on stays an end": (
        "test_nine_tenths_are_found_at_one_and_a_half_of_the_windows_blocks",
        Plant("Ends.use", "self._remove(end)", ""),
    ),
    "where prompts part is no end": (
        "test_nine_tenths_are_found_at_one_and_a_half_of_the_windows_blocks",
        Plant("Ends.use", "node.is_fork and can[number]", "False"),
    ),
    "what was found before is worth no more": (
        "test_nine_tenths_are_found_at_one_and_a_half_of_the_windows_blocks",
        Plant("Ends._sort_by_worth", "len(ends)", "0"),
    ),
    "a row's end is worth as much as another": (
        "test_where_a_row_goes_on_is_worth_less_than_where_none_does",
        Plant(
            "Change.evict", "self.index.ends.least_needed([group], is_running)", "self.index.ends.least_needed([group])"
        ),
    ),
    "an end that lacks something is one all the same": (
        "test_what_one_group_cannot_serve_any_more_no_other_one_keeps",
        Plant("Ends.settle", "self._move_back(end)", ""),
    ),
    "an end that lacks something is none": (
        "test_a_window_that_is_gone_leaves_what_can_be_served_without_it",
        Plant("Ends._move_back", "self._find_needed(chain) if chain else {}", "{}"),
    ),
    "a pin is of whole chains": (
        "test_a_pin_is_of_what_a_match_needs",
        Plant(
            "PrefixIndex.find_needed",
            "[[chain[i] for i in columns.tolist()] for columns in find_needed(self.config, len(chain))]",
            "[list(chain) for columns in find_needed(self.config, len(chain))]",
        ),
    ),
    "files of windows that are left behind stay": (
        "test_so_it_is_in_host_memory_and_on_disk",
        Plant("BlockFiles.spare", "name in self.files", "False"),
    ),
    "an end on disk is no end": (
        "test_so_it_is_in_host_memory_and_on_disk",
        Plant("is_on_disk", "disk.has_seen(node.block(group))", "False"),
    ),
    "windows get no blocks for what is kept": (
        "test_a_prefix_cache_costs_less_than_a_third_of_the_tokens",
        Plant("CacheConfig._with_blocks", "int(own * RETAINED_SHARE * whole / taken) if prefix_cache else 0", "0"),
    ),
    "blocks come back in another order": (
        "test_what_is_evicted_comes_back_from_the_host",
        Plant(
            "Change.restore",
            "(node.host[group][index] for node in nodes)",
            "(node.host[group][index] for node in reversed(nodes))",
        ),
    ),
    # Rows in host memory.
    "a row is swapped into one that is not empty": (
        "test_in_jit_a_row_that_holds_anything_is_left_alone",
        Plant("are_empty", "inside & (cache.lengths[at] == 0)", "enclosing_mesh"),
    ),
    "a row is swapped into one with reserved blocks": (
        "test_in_jit_a_row_that_holds_anything_is_left_alone",
        Plant("are_empty", "inside & (cache.lengths[at] == 0)", "enclosing_mesh"),
        Plant("are_empty", "~has_blocks", "cache.lengths[at] == 0"),
    ),
    "a row too long for the cache is swapped in": (
        "test_too_long_for_the_other_cache",
        Plant("make_room", "sensible & ~too_long", "sensible"),
    ),
    # What rows share on their way.
    "what a step is still to write is shared": (
        "test_what_can_still_be_written_is_not_shared",
        Plant("match_group_blocks", "t.lengths - t.new", "t.lengths"),
    ),
    "blocks are shared that differ in another layer": (
        "test_others_with_the_same_beginning_in_the_deepest_layer_only",
        Plant("match_group_blocks.verify", "jnp.where(equal, found, NULL_BLOCK)", "found"),
    ),
    "a row that is refused keeps its share": (
        "test_a_row_that_is_refused_leaves_its_share_to_the_next",
        Plant("grant_shared_rows.serve", "already | new & granted", "already | new"),
    ),
    "a block that was free counts an owner too many": (
        "test_siblings_travel_together",
        Plant("put_entries", "counts.at[jnp.where(taken, block, counts.shape[0])].add(-1, mode='drop')", "counts"),
    ),
    # Tables.
    "the last free block is not served": (
        "test_robust.py",
        Plant("grant_rows", "need <= num_free", "need < num_free"),
    ),
    "the last block that is left is not served": (
        "test_failures.py",
        Plant("grant_rows", "need <= left", "need < left"),
    ),
    "one block more is served than there is": (
        "test_failures.py",
        Plant(
            "grant_rows",
            "jnp.cumsum(jnp.where(served[None], need, 0), axis=1) > num_free",
            "jnp.cumsum(jnp.where(served[None], need, 0), axis=1) > num_free + 1",
        ),
    ),
    "a failed row is served": (
        "test_robust.py",
        Plant(
            "_extend", "(requested > 0) & (requested <= room) & ~cache.failed", "(requested > 0) & (requested <= room)"
        ),
    ),
    # Files.
    "a failed row is empty": (
        "test_a_failed_row_is_no_place_to_load_into",
        Plant("empty_rows", "~failed & (lengths == 0)", "lengths == 0"),
    ),
    "a row with reserved blocks is empty": (
        "test_what_does_not_fit_into_a_cache",
        Plant("empty_rows", "empty &= ~any_head(t.tables.any(axis=1), config)", ""),
    ),
    "a header is not verified": (
        "test_damaged_files.py",
        Plant("open_saved", "expected[0] != zlib.crc32(header)", "False"),
    ),
    "a tensor is not verified": (
        "test_every_flipped_byte_is_noticed",
        Plant("open_saved", "_checksum(tensor) != checksum", "False"),
    ),
    "negative lengths are taken": (
        "test_crafted_files.py",
        Plant(
            "_check_tensors",
            "(lengths < 0).any() or (lengths > most).any() or len(lengths) > config.max_seqs",
            "(lengths > most).any() or len(lengths) > config.max_seqs",
        ),
    ),
    "empty rows without end are made": (
        "test_crafted_files.py",
        Plant("_check_tensors", "config.max_seqs > max(len(lengths), config.num_blocks, MOST_EMPTY_ROWS)", "False"),
    ),
    "a file is replaced before it is written": (
        "test_a_failing_save_leaves_the_old_file_and_nothing_else",
        Plant(
            "replacing",
            "with unfinished.open('xb') as file:\n"
            "    yield file\n"
            "    file.flush()\n"
            "    if durable:\n"
            "        os.fsync(file.fileno())",
            "unfinished = path\n"
            "with unfinished.open('wb') as file:\n"
            "    yield file\n"
            "    file.flush()\n"
            "    if durable:\n"
            "        os.fsync(file.fileno())",
        ),
    ),
    "blocks are shared that are not full": (
        "test_a_larger_block_that_can_still_be_written_is_not_shared",
        Plant("reblock", "share and block_places.min() >= 0", "share"),
    ),
    "what is not a row's is saved": (
        "test_a_shared_block_is_stored_once_and_nothing_but_tokens_is",
        Plant("clear_unused", "slots < 0", "slots < -1"),
    ),
    # The tier on disk.
    "a file is taken for what its name says": (
        "test_300_damaged_files_are_300_misses",
        Plant(
            "BlockFiles.read",
            "not data.startswith(header) or zlib.crc32(data[:-CHECKSUM]) != int.from_bytes(data[-CHECKSUM:], 'little')",
            "zlib.crc32(data[:-CHECKSUM]) != int.from_bytes(data[-CHECKSUM:], 'little')",
        ),
    ),
    "a file of the right length and header is taken": (
        "test_300_damaged_files_are_300_misses",
        Plant("BlockFiles.read", "zlib.crc32(data[:-CHECKSUM])", "len(data)"),
        Plant("BlockFiles.read", "int.from_bytes(data[-CHECKSUM:], 'little')", "size"),
    ),
    "another model's files are found": (
        "test_what_is_of_another_salt_adapter_model_or_config_is_not_found",
        Plant(
            "fingerprint",
            "[FORMAT, VERSION, config.block_size, config.groups, layers, stored, model]",
            "[FORMAT, VERSION, config.block_size, config.groups, layers, stored]",
        ),
    ),
    "names do not depend on the salt": (
        "test_what_is_of_another_salt_adapter_model_or_config_is_not_found",
        Plant("PrefixIndex.root", "digest_of(self.owner, identity)", "digest_of(self.owner, None)"),
    ),
    "blocks on disk come back where there is no room": (
        "test_blocks_that_leave_the_host_go_to_files_and_no_others",
        Plant(
            "_can_recall",
            "found & ((taken <= room) | (taken == 0))",
            "found",
        ),
    ),
    "the folder has no bound": (
        "test_the_least_recently_used_goes_and_the_next_process_knows_which",
        Plant("BlockFiles._make_room", "taken > most_bytes", "False"),
    ),
    "what a process of our number left is kept": (
        "test_what_is_left_of_a_process_with_our_number_is_removed",
        Plant("_is_running", "_FIRST <= number < _FIRST + 2 ** 32", "True"),
    ),
    "what left the folder is not told": (
        "test_whoever_follows_the_events_knows_what_is_held",
        Plant("BlockFiles._forget", "self.known.pop(name, None)", ""),
    ),
    # What attackers and a new user met.
    "a file is believed to be there": (
        "test_files_that_others_removed_are_written_again",
        Plant("BlockFiles.write", "self.keep(block)", "self.has(block)"),
    ),
    "a flush believes that files are there": (
        "test_files_that_others_removed_are_written_again",
        Plant("flush", "disk.keep(node.block(group))", "disk.has(node.block(group))"),
    ),
    "what others wrote stays": (
        "test_what_another_index_wrote_goes_with_reset",
        Plant(
            "BlockFiles.clear",
            "{*_list_blocks(self.folder, self.owner.hex()), *(name for name in self.files if name.startswith(own))}",
            "{*(name for name in self.files if name.startswith(own))}",
        ),
    ),
    "a salt is what it prints": (
        "test_salts_that_hide_themselves_are_told_apart",
        Plant("read_identity", "(salt, adapter)", "salt"),
        Plant("read_identity", "(_plain(salt), _plain(adapter))", "salt"),
    ),
    "each index has a folder's bytes for itself": (
        "test_indexes_of_one_process_mind_the_bytes_together",
        Plant("open_disk", "return folder", "return BlockFiles(folder.folder, folder.most_bytes, config, model)"),
    ),
    "a row comes back to the device that it left": (
        "test_a_row_swaps_into_a_cache_on_another_device",
        Plant("place_like", "x.sharding.device_set == own.sharding.device_set", "True"),
    ),
    "a sibling is taken to hold what has left its window": (
        "test_beside_a_sibling_that_has_gone_on",
        Plant("HostBlocks.drop_shared", "block >= retained_from", "block >= 0"),
    ),
    "rows that are sent one by one share nothing": (
        "test_sent_one_by_one",
        Plant("_tiers.send:send", "may_share(to)", "False"),
    ),
    "blocks of a window are counted from the first token on": (
        "test_rows_of_windows_that_go_on",
        Plant(
            "number_blocks", "jnp.maximum(tables.skipped, end - blocks_of_bounds(cache, layer))", "tables.skipped * 0"
        ),
    ),
}

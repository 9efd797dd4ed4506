"""Mistakes that could be made in tables, files and what is kept of prompts; for each the test that notices it."""

from mutant import Mutant

INDEX = "_tiers/prefix_cache/index.py"
CHANGE = "_tiers/prefix_cache/transaction.py"
PREFIX = "_tiers/prefix_cache/prefix_cache.py"
READ = "_tiers/prefix_cache/arguments.py"
ALLOCATOR = "_core/blocks/allocator.py"
FORMAT = "_files/format.py"
RESTORE = "_core/blocks/restore.py"
IN_PREFIX = "tiers/test_prefix.py::"
IN_CUTS = "tiers/test_prefix_interrupts.py::test_a_call_is_cut_off_at_every_line"
BLOCKS = "_files/blocks.py"
DISK = "_tiers/prefix_cache/disk.py"
IN_DISK = "tiers/test_prefix_disk.py::"
IN_FILES = "files/test_files.py::"
IN_FOLDER = "tiers/test_prefix_folder.py::"

MUTANTS = {
    # The index.
    "a hash is taken for the tokens": Mutant(
        INDEX,
        "if node.parent is parent and node.tokens == tokens:",
        "if node.parent is parent:",
        IN_PREFIX + "test_a_hash_collision_costs_a_comparison_and_nothing_else",
    ),
    "a hash is taken for the chain": Mutant(
        INDEX,
        "if node.parent is parent and node.tokens == tokens:",
        "if node.tokens == tokens:",
        IN_PREFIX + "test_a_hash_collision_costs_a_comparison_and_nothing_else",
    ),
    "the beginning of a chain goes before its end": Mutant(
        INDEX,
        "for node in reversed(list(chain)):",
        "for node in list(chain):",
        IN_PREFIX + "test_the_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning",
    ),
    "labels of another line of caches are believed": Mutant(
        INDEX,
        "known = [np.where(np.isin(labels, np.fromiter(self.nodes, np.int64)), labels, 0) for labels in kept]",
        "known = [np.where(labels > 0, own, 0) for labels, own in zip(kept, self.kept)]",
        IN_PREFIX + "test_the_same_block_of_an_older_cache_is_not_taken_for_a_newer_one",
    ),
    "what is cut off is not mended": Mutant(
        INDEX, "        if self.settled:\n            return\n", "        return\n", IN_CUTS
    ),
    "the host's memory has no bound": Mutant(
        INDEX,
        "for node in list(self.nodes.values()) if self.host_bytes > self.spill_bytes else ():",
        "for node in ():",
        IN_PREFIX + "test_the_host_memory_is_bounded",
    ),
    "what is pinned is let go on the host": Mutant(
        INDEX,
        "            if node not in self.pins:\n",
        "            if True:\n",
        IN_PREFIX + "test_pins_hold_on_the_host_too_and_while_the_index_grows",
    ),
    "what holds nothing stays": Mutant(
        INDEX,
        "        for node in (*left, *reversed(chain)):\n",
        "        for node in ():\n",
        IN_PREFIX + "test_salts_that_are_gone_leave_nothing_behind",
    ),
    "the last token is matched too": Mutant(
        PREFIX,
        "tokens[: max(len(tokens) - 1, 0)]",
        "tokens",
        IN_PREFIX + "test_a_match_is_whole_blocks_and_leaves_a_token_to_compute",
    ),
    "a salt is no matter": Mutant(
        READ,
        "return type(salt), salt, adapter",
        "return type(None), None, adapter",
        IN_PREFIX + "test_salts_and_adapters_share_nothing",
    ),
    "an adapter is no matter": Mutant(
        READ,
        "return type(salt), salt, adapter",
        "return type(salt), salt, None",
        IN_PREFIX + "test_salts_and_adapters_share_nothing",
    ),
    "tokens are indexed that the row does not hold": Mutant(
        PREFIX,
        "chain = self._index.extend(root, tokens[:length])",
        "chain = self._index.extend(root, tokens)",
        IN_PREFIX + "test_only_what_the_row_holds_is_indexed",
    ),
    "what made room is believed to be there": Mutant(
        "_tiers/prefix_cache/donation_guard.py", "np.where(gone, 0, np.asarray(t.kept))", "np.asarray(t.kept)", IN_CUTS
    ),
    "an old match is believed": Mutant(
        PREFIX,
        "if not is_known or self._index.usable(chain, self._needed) < len(chain):",
        "if False:",
        IN_PREFIX + "test_an_older_cache_gets_what_it_has_and_nothing_else",
    ),
    "one block too many can be pinned": Mutant(
        PREFIX,
        "if pinned > (limit :=",
        "if pinned > 1 + (limit :=",
        IN_PREFIX + "test_bad_input_is_refused_and_nothing_is_lost",
    ),
    "a pool that was used up is not followed": Mutant(
        "_tiers/prefix_cache/donation_guard.py",
        "                    pools[layer] = structure.unflatten(landed)\n",
        "                    pass\n",
        IN_CUTS,
    ),
    "the index changes before the cache": Mutant(
        PREFIX,
        "        change.offer(chain, columns)\n",
        "        change.offer(chain, columns)\n        self._index.hold(change.kept)\n        "
        "change = Change(self._index, cache)\n",
        IN_CUTS,
    ),
    "a block gets a second salt": Mutant(
        CHANGE,
        "block != NULL_BLOCK and not kept[block]:",
        "block != NULL_BLOCK:",
        IN_PREFIX + "test_a_block_has_one_salt",
    ),
    "what comes back makes room for itself": Mutant(
        CHANGE,
        "spared=set(chain))",
        "spared=())",
        IN_PREFIX + "test_what_is_adopted_makes_no_room_for_itself",
    ),
    "what a row uses is evicted": Mutant(
        CHANGE,
        "refcounts[block] == 1 and node not in pins",
        "node not in pins",
        IN_PREFIX + "test_what_a_row_uses_or_what_is_pinned_stays",
    ),
    "what is pinned is evicted": Mutant(
        CHANGE,
        "refcounts[block] == 1 and node not in pins",
        "refcounts[block] == 1",
        IN_PREFIX + "test_what_a_row_uses_or_what_is_pinned_stays",
    ),
    "blocks come back in another order": Mutant(
        CHANGE,
        "for node in nodes))\n",
        "for node in reversed(nodes)))\n",
        IN_PREFIX + "test_what_is_evicted_comes_back_from_the_host",
    ),
    # Rows in host memory.
    "a row is swapped into one that is not empty": Mutant(
        "_tiers/host_tier.py",
        "inside & (cache.lengths[at] == 0) & ~held",
        "inside & ~held",
        "tiers/test_swap.py::test_in_jit_a_row_that_holds_anything_is_left_alone",
    ),
    "a row is swapped into one with reserved blocks": Mutant(
        "_tiers/host_tier.py",
        "inside & (cache.lengths[at] == 0) & ~held",
        "inside & (cache.lengths[at] == 0)",
        "tiers/test_swap.py::test_in_jit_a_row_that_holds_anything_is_left_alone",
    ),
    "a row too long for the cache is swapped in": Mutant(
        "_tiers/host_tier.py",
        "    granted = sensible & ~too_long\n",
        "    granted = sensible\n",
        "tiers/test_swap.py::test_too_long_for_the_other_cache",
    ),
    # Tables.
    "the last free block is not served": Mutant(
        ALLOCATOR, "drop, (need <= num_free)", "drop, (need < num_free)", "core/test_robust.py"
    ),
    "the last block that is left is not served": Mutant(
        ALLOCATOR, "(before | (need <= left)", "(before | (need < left)", "core/test_failures.py"
    ),
    "one block more is served than there is": Mutant(
        ALLOCATOR, "axis=1) > num_free)", "axis=1) > num_free + 1)", "core/test_failures.py"
    ),
    "a failed row is served": Mutant(
        "_core/blocks/tables.py",
        "(requested > 0) & (requested <= room) & ~cache.failed",
        "(requested > 0) & (requested <= room)",
        "core/test_robust.py",
    ),
    # Files.
    "a failed row is empty": Mutant(
        RESTORE, "~failed & (", "(", "core/test_robust.py::test_a_failed_row_is_no_place_to_load_into"
    ),
    "a row with reserved blocks is empty": Mutant(
        RESTORE,
        "        empty &= ~any_of_row(t.tables.any(axis=1), config)",
        "        pass",
        "files/test_refused_files.py::test_what_does_not_fit_into_a_cache",
    ),
    "a header is not verified": Mutant(
        FORMAT, "    if expected[0] != zlib.crc32(header):\n", "    if False:\n", "files/test_damaged_files.py"
    ),
    "a tensor is not verified": Mutant(
        FORMAT,
        "        if _checksum(tensor) != checksum:\n",
        "        if False:\n",
        "files/test_damaged_files.py::test_every_flipped_byte_is_noticed",
    ),
    "negative lengths are taken": Mutant(
        FORMAT, "if (lengths < 0).any() or (lengths", "if (lengths", "files/test_crafted_files.py"
    ),
    "empty rows without end are made": Mutant(
        FORMAT,
        "    if config.max_seqs > max(len(lengths), config.num_blocks, MOST_EMPTY_ROWS):\n",
        "    if False:\n",
        "files/test_crafted_files.py",
    ),
    "a file is replaced before it is written": Mutant(
        "_files/atomic.py",
        '        with unfinished.open("xb") as file:\n',
        '        unfinished = path\n        with unfinished.open("wb") as file:\n',
        "files/test_damaged_files.py::test_a_failing_save_leaves_the_old_file_and_nothing_else",
    ),
    "blocks are shared that are not full": Mutant(
        "_core/blocks/reblock.py",
        "if share and block_places.min() >= 0:",
        "if share:",
        IN_FILES + "test_a_larger_block_that_can_still_be_written_is_not_shared",
    ),
    "what is not a row's is saved": Mutant(
        "_core/blocks/reblock.py",
        "[slots < 0] = 0\n",
        "[slots < -1] = 0\n",
        IN_FILES + "test_a_shared_block_is_stored_once_and_nothing_but_tokens_is",
    ),
    # The tier on disk.
    "a file is taken for what its name says": Mutant(
        BLOCKS, "if not data.startswith(header) or zlib", "if zlib", IN_DISK + "test_300_damaged_files_are_300_misses"
    ),
    "a file of the right length and header is taken": Mutant(
        BLOCKS,
        'zlib.crc32(data[:-CHECKSUM]) != int.from_bytes(data[-CHECKSUM:], "little"):',
        "len(data) != size:",
        IN_DISK + "test_300_damaged_files_are_300_misses",
    ),
    "another model's files are found": Mutant(
        BLOCKS,
        "config.groups, layers, stored, model]",
        "config.groups, layers, stored]",
        IN_DISK + "test_what_is_of_another_salt_adapter_model_or_config_is_not_found",
    ),
    "names do not depend on the salt": Mutant(
        INDEX,
        "digest = digest_of(self.owner, identity)",
        "digest = digest_of(self.owner, None)",
        IN_DISK + "test_what_is_of_another_salt_adapter_model_or_config_is_not_found",
    ),
    "blocks on disk come back where there is no room": Mutant(
        DISK,
        "if sum(sizes) > room or not",
        "if not",
        IN_DISK + "test_blocks_that_leave_the_host_go_to_files_and_no_others",
    ),
    "the folder has no bound": Mutant(
        BLOCKS,
        "while taken > most_bytes:",
        "while False:",
        IN_DISK + "test_the_least_recently_used_goes_and_the_next_process_knows_which",
    ),
    "what a process of our number left is kept": Mutant(
        "_files/atomic.py",
        "return _FIRST <= number < _FIRST + 2**32",
        "return True",
        IN_DISK + "test_what_is_left_of_a_process_with_our_number_is_removed",
    ),
    "what left the folder is not told": Mutant(
        BLOCKS,
        "        self.known.pop(name, None)\n",
        "",
        IN_DISK + "test_whoever_follows_the_events_knows_what_is_held",
    ),
    # What attackers and a new user met.
    "a file is believed to be there": Mutant(
        BLOCKS,
        "        if self.keep(block):\n            return False\n",
        "        if self.has(block):\n            return False\n",
        IN_FOLDER + "test_files_that_others_removed_are_written_again",
    ),
    "a flush believes that files are there": Mutant(
        DISK,
        "not disk.keep(node.block(group))",
        "not disk.has(node.block(group))",
        IN_FOLDER + "test_files_that_others_removed_are_written_again",
    ),
    "what others wrote stays": Mutant(
        BLOCKS,
        "{*_found(self.folder, self.owner.hex()), *(",
        "{*(",
        IN_FOLDER + "test_what_another_index_wrote_goes_with_reset",
    ),
    "a salt is what it prints": Mutant(
        READ,
        "salt, adapter = _plain(salt), _plain(adapter)",
        "salt = salt",
        IN_FOLDER + "test_salts_that_hide_themselves_are_told_apart",
    ),
    "each index has a folder's bytes for itself": Mutant(
        DISK,
        "        return folder\n",
        "        return BlockFiles(folder.folder, folder.most_bytes, config, model)\n",
        IN_FOLDER + "test_indexes_of_one_process_mind_the_bytes_together",
    ),
    "a row comes back to the device that it left": Mutant(
        "_tiers/host_tier.py",
        "x.sharding.device_set == own.sharding.device_set",
        "True",
        "core/test_edges.py::test_a_row_swaps_into_a_cache_on_another_device",
    ),
}

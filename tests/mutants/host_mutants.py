"""Mistakes that could be made in what runs on the host, and in the tables; for each the test that notices it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str  # below jaxkv
    right: str
    wrong: str
    test: str  # below tests: what fails then


INDEX, CHANGE, PREFIX = "_tiers/prefix_index.py", "_tiers/prefix_change.py", "_tiers/prefix.py"
READ = "_tiers/read.py"
ENGINE, LOOP, RESIDENT, REQUEST = "_engine/engine.py", "_engine/loop.py", "_engine/resident.py", "_engine/request.py"
SCHEDULER, PIPELINE, TURN = "_engine/scheduler.py", "_engine/pipeline.py", "_engine/turn.py"
ALLOCATOR, FORMAT, RESTORE = "_core/allocator.py", "_files/format.py", "_core/restore.py"
IN_PREFIX, IN_CUTS = "tiers/test_prefix.py::", "tiers/test_prefix_interrupts.py::test_a_call_is_cut_off_at_every_line"
IN_REQUESTS, IN_GENERATE = "engine/test_requests.py::", "engine/test_generate.py::"
BLOCKS, DISK, IN_DISK = "_files/blocks.py", "_tiers/disk.py", "tiers/test_prefix_disk.py::"
PREFILL, CHECKPOINT, PARTS = "_engine/prefill.py", "_engine/checkpoint.py", "_files/parts.py"
IN_PREFILL, IN_CHECKPOINT = "engine/test_prefill.py::", "engine/test_checkpoint.py::"
IN_PROCESSES = "processes/test_processes.py::"
SHARDS, IN_SHARDS = "_engine/shards.py", "engine/test_row_shards.py::"
IN_SPECULATION = "engine/test_speculation.py::"
IN_INTERRUPTS, IN_FILES = "engine/test_interrupts.py::", "files/test_files.py::"
IN_EDGES, IN_FOLDER = "engine/test_edges_of_engines.py::", "tiers/test_prefix_folder.py::"

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
        "_tiers/landing.py", "np.where(gone, 0, np.asarray(t.kept))", "np.asarray(t.kept)", IN_CUTS
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
        "_tiers/landing.py",
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
        "_tiers/host.py",
        "inside & (cache.lengths[at] == 0) & ~held",
        "inside & ~held",
        "tiers/test_swap.py::test_in_jit_a_row_that_holds_anything_is_left_alone",
    ),
    "a row is swapped into one with reserved blocks": Mutant(
        "_tiers/host.py",
        "inside & (cache.lengths[at] == 0) & ~held",
        "inside & (cache.lengths[at] == 0)",
        "tiers/test_swap.py::test_in_jit_a_row_that_holds_anything_is_left_alone",
    ),
    "a row too long for the cache is swapped in": Mutant(
        "_tiers/host.py",
        "    granted = sensible & ~too_long\n",
        "    granted = sensible\n",
        "tiers/test_swap.py::test_too_long_for_the_other_cache",
    ),
    # The engine.
    "a row is not given back at the end of a stream": Mutant(
        ENGINE,
        "            finally:\n                self._withdraw(requests)\n",
        "            finally:\n                pass\n",
        IN_GENERATE + "test_leaving_a_stream_early_frees_its_rows",
    ),
    "a second thread is let in": Mutant(
        TURN,
        "                raise RuntimeError(",
        "                return mine\n                RuntimeError(",
        IN_INTERRUPTS + "test_one_thread_at_a_time",
    ),
    "whoever works is refused because of a cancel": Mutant(
        TURN,
        "held is not None and held.is_brief and",
        "False and",
        IN_INTERRUPTS + "test_whoever_works_waits_for_a_cancel_of_another_thread",
    ),
    "what was cut off is gone on with": Mutant(
        LOOP,
        "        if not self._is_sound:\n",
        "        if False:\n",
        IN_INTERRUPTS + "test_every_line_of_one_step_and_of_leaving_a_stream",
    ),
    "requests are lost with a call": Mutant(
        LOOP,
        "self.open = {request: sequence_of(request) for request in self.open if not request.done}",
        "self.open = {}",
        IN_INTERRUPTS + "test_every_line_of_one_step_and_of_leaving_a_stream",
    ),
    "a request is taken in twice": Mutant(
        LOOP,
        "for s in request.samples if not (s.done or s in self.open)]",
        "for s in request.samples]",
        IN_INTERRUPTS + "test_a_request_that_is_taken_in_is_not_taken_in_again",
    ),
    "a cancelled request keeps its row": Mutant(
        LOOP,
        "                self.scheduler.finish(sequence)\n                if self.prefill",
        "                if self.prefill",
        IN_REQUESTS + "test_a_cancelled_request_leaves_its_row_at_once",
    ),
    "a lost cache is gone on with": Mutant(
        RESIDENT,
        "        if self.is_lost:\n            raise CacheError(",
        "        if False:\n            raise CacheError(",
        IN_INTERRUPTS + "test_a_lost_cache_is_said_and_reset_loses_no_request",
    ),
    "what blocks came back into is lost": Mutant(
        RESIDENT,
        "                self.cache = self.prefix.recover(self.cache)\n",
        "                pass\n",
        IN_INTERRUPTS + "test_a_cache_used_up_while_blocks_come_back_from_the_host_is_not_lost",
    ),
    "sharing is counted across salts": Mutant(
        RESIDENT,
        "other.salt == sequence.salt and most",
        "most",
        IN_REQUESTS + "test_sharing_is_not_counted_across_salts",
    ),
    "a row is taken before it is free": Mutant(
        RESIDENT,
        "        if must_be_empty and row in self._to_free:\n            self.flush()\n",
        "",
        IN_REQUESTS + "test_requests_come_and_go_at_random",
    ),
    "an old room is taken for the new one": Mutant(
        RESIDENT,
        "if self._to_free or self._room is None or self._measured_at < self.clock:",
        "if self._room is None:",
        "engine",
    ),
    "swapping is thought to cost nothing": Mutant(
        RESIDENT,
        "return moved / self.host_bandwidth <",
        "return 0 * moved <",
        IN_GENERATE + "test_the_cheaper_of_swapping_and_recomputing_is_chosen",
    ),
    "a stop token is part of the output": Mutant(
        REQUEST,
        '            self.stopped = "eos"\n            return\n',
        '            self.stopped = "eos"\n',
        IN_GENERATE + "test_a_stop_token_ends_a_sequence_and_is_not_part_of_it",
    ),
    "words are taken for stop tokens": Mutant(
        REQUEST, "    if isinstance(eos, str | bytes):\n", "    if False:\n", "test_bad_calls.py"
    ),
    "the oldest is set back": Mutant(
        SCHEDULER, "newest = self.running[-1]", "newest = self.running[0]", "engine/test_scheduler.py"
    ),
    "who is set back waits behind the others": Mutant(
        SCHEDULER,
        "            self.waiting.appendleft(newest)\n",
        "            self.waiting.append(newest)\n",
        "engine/test_scheduler.py",
    ),
    "a step has one token too many": Mutant(
        SCHEDULER,
        "wanted = min(sequence.pending + len(sequence.guesses), self.step_tokens - step.num_tokens)",
        "wanted = min(sequence.pending, 1 + self.step_tokens - step.num_tokens)",
        "engine/test_scheduler.py",
    ),
    "prompts come before who is decoding": Mutant(
        SCHEDULER, "key=lambda s: s.pending > 1)", "key=lambda s: s.pending <= 1)", "engine/test_scheduler.py"
    ),
    "log-probabilities are another row's": Mutant(
        PIPELINE,
        "(x[step, row, : 1 + count].tolist()",
        "(x[step, 0, : 1 + count].tolist()",
        IN_REQUESTS + "test_log_probabilities_are_the_models_own",
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
        "_core/tables.py",
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
        "_core/reblock.py",
        "if share and block_places.min() >= 0:",
        "if share:",
        IN_FILES + "test_a_larger_block_that_can_still_be_written_is_not_shared",
    ),
    "what is not a row's is saved": Mutant(
        "_core/reblock.py",
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
    # Prefill apart, checkpoints and processes.
    "a cancelled request keeps its row where prompts are computed": Mutant(
        PREFILL,
        "        if own.row is not None:\n            self.residents.retire(own)\n",
        "",
        IN_PREFILL + "test_requests_come_and_go",
    ),
    "decoding rows wait for prompts": Mutant(
        PREFILL,
        "while flights and (wait or flights",
        "while flights and (True or flights",
        IN_PREFILL + "test_a_prompt_that_is_not_ready_delays_no_decoding_row",
    ),
    "samples go on from a token that they choose themselves": Mutant(
        SCHEDULER,
        "            self._split(sequence, certain)  # it may have come with all that they share\n",
        "",
        "engine/test_scheduler.py::test_samples_go_on_from_a_prompt_that_was_there_already",
    ),
    "what rows held is computed again": Mutant(
        CHECKPOINT,
        "sequence.host = file.row(place, self._loops[0].residents.config)",
        "sequence.host = None",
        IN_CHECKPOINT + "test_tokens_that_were_not_handed_out_are_handed_out_later",
    ),
    "numbers of requests are given again": Mutant(
        CHECKPOINT,
        "self._numbers = itertools.count(max(first, upcoming(self._numbers)))",
        "self._numbers = itertools.count()",
        IN_CHECKPOINT + "test_it_goes_on_with_the_same_tokens",
    ),
    "a part of a save that failed is left": Mutant(
        PARTS,
        "        mine.unlink(missing_ok=True)\n",
        "",
        IN_PROCESSES + "test_one_cache_over_two_processes",
    ),
    "heads of parts are put together in another order": Mutant(
        PARTS,
        "for shard in range(self._count)], axis=2)",
        "for shard in reversed(range(self._count))], axis=2)",
        IN_PROCESSES + "test_one_cache_over_two_processes",
    ),
    # Trees of guesses.
    "the accepted path is not moved": Mutant(
        "_core/keeping.py",
        "moved = is_kept & (path != number) & (path < guessed[:, None])",
        "moved = path > guessed[:, None]",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "a right guess after a wrong one": Mutant(
        "_engine/step.py",
        "is_right[i] & at(on_path, parent[i][None])[0]",
        "is_right[i]",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "a tree is computed as a chain": Mutant(
        "_engine/step.py",
        "places.ravel(), tree=parents)",
        "places.ravel())",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "the token chosen after the wrong branch": Mutant(
        "_engine/step.py",
        "chosen = at(chosen, path)",
        "chosen = chosen + 0 * path",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "a guess hangs from the token before its parent": Mutant(
        "_engine/pipeline.py",
        "[len(given) + parent for parent",
        "[len(given) - 1 + parent for parent",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "a path longer than there is room for": Mutant(
        "_engine/drafts.py",
        "len(guesses.tokens) < count",
        "len(guesses.tokens) <= count",
        IN_SPECULATION + "test_a_tree_of_guesses_has_what_is_likeliest_to_come",
    ),
    "what follows a guess is as likely as the guess": Mutant(
        "_engine/drafts.py",
        "- 1, -less, tail)",
        "- 1, 1.0, tail)",
        IN_SPECULATION + "test_a_tree_of_guesses_has_what_is_likeliest_to_come",
    ),
    "the first of equally frequent followers": Mutant(
        "_engine/drafts.py",
        "Counter(reversed(followed))",
        "Counter(followed)",
        IN_SPECULATION + "test_a_run_of_tokens_is_followed_by_what_followed_it_before",
    ),
    # Rows over devices.
    "requests go where least room is": Mutant(
        SHARDS,
        "key=lambda both: both[0], reverse=True)",
        "key=lambda both: both[0])",
        IN_SHARDS + "test_requests_go_where_most_room_is",
    ),
    "who is known matters not": Mutant(
        LOOP,
        "spare >= 0, known, spare",
        "spare >= 0, 0, spare",
        IN_SHARDS + "test_requests_go_where_their_prompt_is_known",
    ),
    "all are placed at once": Mutant(
        SHARDS,
        "if rating[0] or must or loop.may_have_more:",
        "if True:",
        IN_SHARDS + "test_requests_go_where_most_room_is",
    ),
    "a request may be placed twice": Mutant(
        SHARDS,
        "if not (request.done or any(loop.has(request) for loop in self.loops)):",
        "if not request.done:",
        IN_SHARDS + "test_requests_go_where_most_room_is",
    ),
    "blocks of the second cache are those of the first": Mutant(
        "_files/written.py",
        "first += len(plan.slots)",
        "first += 0",
        "core/test_by_rows.py::test_each_device_computes_as_if_it_were_alone",
    ),
    "rows of a file stand in the order of devices": Mutant(
        "_files/written.py",
        "np.concatenate(split, axis=1)[:, order]",
        "np.concatenate(split, axis=1)",
        "core/test_by_rows.py::test_each_device_computes_as_if_it_were_alone",
    ),
    "rows of the second device are saved as those of the first": Mutant(
        CHECKPOINT,
        "i * number + s.row",
        "s.row",
        IN_SHARDS + "test_it_goes_on_on_another_number_of_devices",
    ),
    # What attackers and a new user met.
    "logits of NaN are token 0": Mutant(
        "_engine/sampling.py",
        "is_possible = jnp.max(logits, axis=-1) > -jnp.inf",
        "is_possible = jnp.ones(logits.shape[:-1], bool)",
        IN_EDGES + "test_logits_that_leave_no_choice_end_a_request",
    ),
    "a draw is taken where there is no choice": Mutant(
        "_engine/sampling.py",
        "(sampling.temperature > 0) & is_possible",
        "sampling.temperature > 0",
        IN_EDGES + "test_logits_that_leave_no_choice_end_a_request",
    ),
    "a seed's draws go by the request's number": Mutant(
        "_engine/sampling.py",
        "draws = number if self.draws is None else self.draws",
        "draws = number",
        IN_EDGES + "test_a_request_with_a_seed_of_its_own_draws_the_same_whatever_came_before",
    ),
    "whose draws they are is not saved": Mutant(
        CHECKPOINT,
        'choice.get("draws")',
        "None",
        IN_EDGES + "test_a_request_with_a_seed_of_its_own_draws_the_same_whatever_came_before",
    ),
    "what is spilled lies on the axis for contexts": Mutant(
        CHANGE,
        "heads=None, context=None, parts=1",
        "heads=None",
        IN_EDGES + "test_a_mesh_with_an_axis_for_contexts_alone",
    ),
    "a mesh without heads is none": Mutant(
        "_core/shards.py",
        "mesh_of(model) or mesh_of(model, CONTEXT)",
        "mesh_of(model)",
        IN_EDGES + "test_a_mesh_with_an_axis_for_contexts_alone",
    ),
    "static fields are not the model": Mutant(
        "_engine/reuse.py",
        " {others!r} {structure}",
        " {others!r}",
        IN_EDGES + "test_models_of_equal_arrays_are_told_apart",
    ),
    "numbers are not the model": Mutant(
        "_engine/reuse.py", "{others!r} ", "", IN_EDGES + "test_models_of_equal_arrays_are_told_apart"
    ),
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
        "_tiers/host.py",
        "x.sharding.device_set == own.sharding.device_set",
        "True",
        "core/test_edges.py::test_a_row_swaps_into_a_cache_on_another_device",
    ),
}

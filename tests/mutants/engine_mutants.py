"""Mistakes that could be made in what an engine does on the host; for each the test that notices it."""

from mutant import Mutant

CHANGE = "_tiers/prefix_cache/transaction.py"
ENGINE = "_engine/frontend/engine.py"
LOOP = "_engine/runner/engine_core.py"
RESIDENT = "_engine/runner/cache_manager.py"
REQUEST = "_engine/requests/request.py"
SCHEDULER = "_engine/requests/scheduler.py"
PIPELINE = "_engine/runner/model_runner.py"
TURN = "_engine/frontend/engine_lock.py"
IN_REQUESTS = "engine/test_requests.py::"
IN_GENERATE = "engine/test_generate.py::"
PREFILL = "_engine/runner/disaggregated_prefill.py"
CHECKPOINT = "_engine/frontend/checkpoint.py"
PARTS = "_files/multihost_file.py"
IN_PREFILL = "engine/test_prefill.py::"
IN_CHECKPOINT = "engine/test_checkpoint.py::"
IN_PROCESSES = "processes/test_processes.py::"
SHARDS = "_engine/frontend/data_parallel.py"
IN_SHARDS = "engine/test_row_shards.py::"
IN_SPECULATION = "engine/test_speculation.py::"
IN_INTERRUPTS = "engine/test_interrupts.py::"
IN_EDGES = "engine/test_edges_of_engines.py::"

MUTANTS = {
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
        "_core/blocks/speculative.py",
        "moved = is_kept & (path != number) & (path < guessed[:, None])",
        "moved = path > guessed[:, None]",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "a right guess after a wrong one": Mutant(
        "_engine/programs/step.py",
        "is_right[i] & at(on_path, parent[i][None])[0]",
        "is_right[i]",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "a tree is computed as a chain": Mutant(
        "_engine/programs/step.py",
        "places.ravel(), tree=parents)",
        "places.ravel())",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "the token chosen after the wrong branch": Mutant(
        "_engine/programs/step.py",
        "chosen = at(chosen, path)",
        "chosen = chosen + 0 * path",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "a guess hangs from the token before its parent": Mutant(
        "_engine/runner/model_runner.py",
        "[len(given) + parent for parent",
        "[len(given) - 1 + parent for parent",
        IN_SPECULATION + "test_a_tree_of_guesses_changes_no_token",
    ),
    "a path longer than there is room for": Mutant(
        "_engine/requests/drafters.py",
        "len(guesses.tokens) < count",
        "len(guesses.tokens) <= count",
        IN_SPECULATION + "test_a_tree_of_guesses_has_what_is_likeliest_to_come",
    ),
    "what follows a guess is as likely as the guess": Mutant(
        "_engine/requests/drafters.py",
        "- 1, -less, tail)",
        "- 1, 1.0, tail)",
        IN_SPECULATION + "test_a_tree_of_guesses_has_what_is_likeliest_to_come",
    ),
    "the first of equally frequent followers": Mutant(
        "_engine/requests/drafters.py",
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
        "_files/snapshot.py",
        "first += len(plan.slots)",
        "first += 0",
        "core/test_by_rows.py::test_each_device_computes_as_if_it_were_alone",
    ),
    "rows of a file stand in the order of devices": Mutant(
        "_files/snapshot.py",
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
        "_engine/requests/sampling.py",
        "is_possible = jnp.max(logits, axis=-1) > -jnp.inf",
        "is_possible = jnp.ones(logits.shape[:-1], bool)",
        IN_EDGES + "test_logits_that_leave_no_choice_end_a_request",
    ),
    "a draw is taken where there is no choice": Mutant(
        "_engine/requests/sampling.py",
        "(sampling.temperature > 0) & is_possible",
        "sampling.temperature > 0",
        IN_EDGES + "test_logits_that_leave_no_choice_end_a_request",
    ),
    "a seed's draws go by the request's number": Mutant(
        "_engine/requests/sampling.py",
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
        "_core/config/mesh_shape.py",
        "mesh_of(model) or mesh_of(model, CONTEXT)",
        "mesh_of(model)",
        IN_EDGES + "test_a_mesh_with_an_axis_for_contexts_alone",
    ),
    "static fields are not the model": Mutant(
        "_engine/frontend/fingerprint.py",
        " {others!r} {structure}",
        " {others!r}",
        IN_EDGES + "test_models_of_equal_arrays_are_told_apart",
    ),
    "numbers are not the model": Mutant(
        "_engine/frontend/fingerprint.py", "{others!r} ", "", IN_EDGES + "test_models_of_equal_arrays_are_told_apart"
    ),
}

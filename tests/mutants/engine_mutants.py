"""Mistakes that could be made in what an engine does on the host; for each the test that notices it."""

from planting import Plant

MUTANTS = {
    # The engine.
    "a row is not given back at the end of a stream": (
        "test_leaving_a_stream_early_frees_its_rows",
        Plant("Engine._stream", "self._withdraw(requests)", ""),
    ),
    "a second thread is let in": (
        "test_one_thread_at_a_time",
        Plant("EngineLock._take", "if has_looked: ...", "if has_looked:\n    return mine"),
    ),
    "whoever works is refused because of a cancel": (
        "test_whoever_works_waits_for_a_cancel_of_another_thread",
        Plant(
            "EngineLock._take",
            "current is not None and current.is_brief and current.thread.is_alive()",
            "False and current.thread.is_alive()",
        ),
    ),
    "what was cut off is gone on with": (
        "test_every_line_of_one_step_and_of_leaving_a_stream",
        Plant("EngineCore.make_sound", "not self._soundness.is_kept", "False"),
    ),
    "a hook goes on with the tokens that a row had before": (
        "test_a_hook_has_all_tokens_of_a_row_that_comes_back",
        Plant("CacheManager._release", "(None, 0, {}, False)", "(None, 0, {}, sequence.is_noted)"),
    ),
    "a row draws as the request that had it before": (
        "test_a_requests_draws_are_its_own",
        Plant("ModelRunner.send", "not sequence.is_noted", "not (sequence.is_noted or self._fields[PROMPT, row])"),
    ),
    "requests are lost with a call": (
        "test_every_line_of_one_step_and_of_leaving_a_stream",
        Plant(
            "EngineCore._queue_open",
            "{request: make_sequence(request) for request in self.open if not request.done}",
            "{}",
        ),
    ),
    "a request is taken in twice": (
        "test_a_request_that_is_taken_in_is_not_taken_in_again",
        Plant(
            "EngineCore._take_in",
            "[make_sequence(s) for s in request.samples if not (s.done or s in self.open)]",
            "[make_sequence(s) for s in request.samples]",
        ),
    ),
    "a cancelled request keeps its row": (
        "test_a_cancelled_request_leaves_its_row_at_once",
        Plant("EngineCore._take_in", "self.scheduler.finish(sequence)", ""),
    ),
    "a lost cache is gone on with": (
        "test_a_lost_cache_is_said_and_reset_loses_no_request",
        Plant("DeviceCache.is_lost", "any(x.is_deleted() for x in self.leaves)", "False"),
    ),
    "what blocks came back into is lost": (
        "test_a_cache_used_up_while_blocks_come_back_from_the_host_is_not_lost",
        Plant("PrefixRows.recover", "self.device.cache = self.prefix.recover(self.device.cache)", ""),
    ),
    "sharing is counted across salts": (
        "test_sharing_is_not_counted_across_salts",
        Plant("count_common_blocks", "a.salt != b.salt", "False"),
    ),
    "a row is taken before it is free": (
        "test_requests_come_and_go_at_random",
        Plant("CacheManager._take_row", "if must_be_empty and row in self._to_free:\n    self.flush()", ""),
    ),
    "a row comes back before the blocks it is to have are free": (
        "test_a_row_comes_back_into_the_blocks_of_one_that_has_ended",
        Plant("CacheManager.make_room", "self._to_free and self.eviction is not None", "False"),
    ),
    "an old room is taken for the new one": (
        "engine",
        Plant(
            "CacheManager.settle",
            "self._to_free or not self.room.is_exact",
            "not self.room.is_known",
        ),
    ),
    "swapping is thought to cost nothing": (
        "test_the_cheaper_of_swapping_and_recomputing_is_chosen",
        Plant("SwapPolicy.should_swap", "moved / self.host_bandwidth", "0 * moved"),
    ),
    "a stop token is part of the output": (
        "test_a_stop_token_ends_a_sequence_and_is_not_part_of_it",
        Plant("Request.receive", "self._end('eos')\nreturn", "self._end('eos')"),
    ),
    "words are taken for stop tokens": (
        "test_bad_calls.py",
        Plant("read_eos", "isinstance(eos, str | bytes)", "False"),
    ),
    "the oldest is set back": (
        "test_scheduler.py",
        Plant("Scheduler._schedule", "max(self.running, key=_order)", "min(self.running, key=_order)"),
    ),
    "who is set back waits behind the others": (
        "test_scheduler.py",
        Plant("Scheduler._schedule", "self.waiting.add(last)", "last.arrival = None\nself.waiting.add(last)"),
    ),
    "a step has one token too many": (
        "test_scheduler.py",
        Plant("Scheduler._affordable", "sequence.pending + len(sequence.guesses)", "sequence.pending"),
        Plant("Scheduler._affordable", "most - step.num_tokens", "1 + most - step.num_tokens"),
    ),
    "prompts come before who is decoding": (
        "test_scheduler.py",
        Plant("Scheduler.plan", "s.pending <= 1", "s.pending > 1"),
    ),
    "short prompts wait for long ones": (
        "test_a_short_prompt_does_not_wait_for_long_ones",
        Plant("Scheduler.plan", "step.num_tokens + share", "self.step_tokens"),
    ),
    "long prompts wait for short ones": (
        "test_all_of_every_step_is_used_and_long_prompts_have_their_share_of_it",
        Plant("Scheduler.plan", "step.num_tokens + share", "step.num_tokens"),
    ),
    "prompts of a kind are computed side by side": (
        "test_prompts_of_a_kind_come_one_after_the_other",
        Plant("_order_by_size", "(((left - 1) // share).bit_length() + 1) // 2", "left"),
    ),
    "who has no room is overtaken for ever": (
        "test_who_has_room_goes_ahead_a_bounded_number_of_times",
        Plant("Queue.take", "not is_idle(other)", "0"),
    ),
    "the last to come is served first": (
        "test_a_lower_priority_is_served_earlier",
        Plant("Sequence.order", "self.arrival or 0", "-(self.arrival or 0)"),
    ),
    "who cannot begin stays": (
        "test_a_request_that_cannot_begin_ends_a_stream_with_its_name",
        Plant("EngineCore._refuse", "self.scheduler.finish(sequence)", ""),
    ),
    "log-probabilities are another row's": (
        "test_log_probabilities_are_the_models_own",
        Plant("_logprobs", "x[step, row, :1 + params.num_logprobs]", "x[step, 0, :1 + params.num_logprobs]"),
    ),
    "log-probabilities of a prompt are another's": (
        "test_the_likeliest_tokens_of_a_prompt",
        Plant("ModelRunner.read", "x[begin:begin + count]", "x[:count]"),
    ),
    # Prefill apart, checkpoints and processes.
    "a cancelled request keeps its row where prompts are computed": (
        "test_prefill.py::test_requests_come_and_go",
        Plant("Prefill.drop", "if own.row is not None:\n    self.cache_manager.retire(own)", ""),
    ),
    "decoding rows wait for prompts": (
        "test_a_prompt_that_is_not_ready_delays_no_decoding_row",
        Plant(
            "Prefill.exchange",
            "wait or flights[0].result.numbers.is_ready()",
            "True or flights[0].result.numbers.is_ready()",
        ),
    ),
    "samples go on from a token that they choose themselves": (
        "test_samples_go_on_from_a_prompt_that_was_there_already",
        Plant(
            "Scheduler._admit",
            "self._split(sequence, certain)\nreturn True",
            "return True",
        ),
    ),
    "what rows held is computed again": (
        "test_tokens_that_were_not_handed_out_are_handed_out_later",
        Plant("Resumable._read", "file.row(place, self._cores[0].cache_manager.config)", "None"),
    ),
    "numbers of requests are given again": (
        "test_it_goes_on_with_the_same_tokens",
        Plant("Resumable.load", "Numbers(max(first, self._reader.numbers.next))", "Numbers()"),
    ),
    "a part of a save that failed is left": (
        "test_one_cache_over_two_processes",
        Plant("write_shards", "mine.unlink(missing_ok=True)", ""),
    ),
    "heads of parts are put together in another order": (
        "test_one_cache_over_two_processes",
        Plant("JoinedTensors.__getitem__", "range(self._count)", "reversed(range(self._count))"),
    ),
    # Trees of guesses.
    "the accepted path is not moved": (
        "test_a_tree_of_guesses_changes_no_token",
        Plant("keep_guesses", "is_kept & (path != number) & (path < guessed[:, None])", "path > guessed[:, None]"),
    ),
    "a right guess after a wrong one": (
        "test_a_tree_of_guesses_changes_no_token",
        Plant("verify_trees", "is_right[i] & at(on_path, parent[i][None])[0]", "is_right[i]"),
    ),
    "a tree is computed as a chain": (
        "test_a_tree_of_guesses_changes_no_token",
        Plant(
            "verify_trees",
            "run(cache, memory, tokens, counts, places.ravel(), tree=parents)",
            "run(cache, memory, tokens, counts, places.ravel())",
        ),
    ),
    "the token chosen after the wrong branch": (
        "test_a_tree_of_guesses_changes_no_token",
        Plant("verify_trees", "at(chosen, path)", "chosen + 0 * path"),
    ),
    "a guess hangs from the token before its parent": (
        "test_a_tree_of_guesses_changes_no_token",
        Plant("ModelRunner.send", "len(given) + parent", "len(given) - 1 + parent"),
    ),
    "a path longer than there is room for": (
        "test_a_tree_of_guesses_has_what_is_likeliest_to_come",
        Plant("NGrams.guess", "len(guesses.tokens) < count", "len(guesses.tokens) <= count"),
    ),
    "what follows a guess is as likely as the guess": (
        "test_a_tree_of_guesses_has_what_is_likeliest_to_come",
        Plant("NGrams.guess", "-less", "1.0"),
    ),
    "the first of equally frequent followers": (
        "test_a_run_of_tokens_is_followed_by_what_followed_it_before",
        Plant("NGrams._shares", "reversed(followed)", "followed"),
    ),
    # Rows over devices.
    "requests go where least room is": (
        "test_requests_go_where_most_room_is",
        Plant("DataParallelCores._best", "max", "min"),
    ),
    "who is known matters not": (
        "test_requests_go_where_their_prompt_is_known",
        Plant("DataParallelCores._best", "core.known(sequence)", "0"),
    ),
    "all are placed at once": (
        "test_requests_go_where_most_room_is",
        Plant("DataParallelCores._best", "is_anywhere_alike or core.may_have_room(sequence)", "True"),
    ),
    "a request may be placed twice": (
        "test_requests_go_where_most_room_is",
        Plant(
            "DataParallelCores._place_first",
            "request.done or any((core.has(request) for core in self.cores))",
            "request.done",
        ),
    ),
    "a request that fits on another device is refused": (
        "test_one_that_cannot_begin_on_one_device_waits_for_the_other",
        Plant("DataParallelCores._best", "must or not any((core.open for core in self.cores))", "True"),
    ),
    "blocks of the second cache are those of the first": (
        "test_each_device_computes_as_if_it_were_alone",
        Plant("_behind", "len(plan.slots)", "0"),
    ),
    "rows of a file stand in the order of devices": (
        "test_each_device_computes_as_if_it_were_alone",
        Plant("_side_by_side", "np.concatenate(split, axis=1)[:, order]", "np.concatenate(split, axis=1)"),
    ),
    "rows of the second device are saved as those of the first": (
        "test_it_goes_on_on_another_number_of_devices",
        Plant("Resumable.save", "i * number + s.row", "s.row"),
    ),
    # What attackers and a new user met.
    "logits of NaN are token 0": (
        "test_logits_that_leave_no_choice_end_a_request",
        Plant("choose", "jnp.max(logits, axis=-1) > -jnp.inf", "jnp.ones(logits.shape[:-1], bool)"),
    ),
    "a draw is taken where there is no choice": (
        "test_logits_that_leave_no_choice_end_a_request",
        Plant("choose", "(sampling.temperature > 0) & is_possible", "sampling.temperature > 0"),
    ),
    "a seed's draws go by the request's number": (
        "test_a_request_with_a_seed_of_its_own_draws_the_same_whatever_came_before",
        Plant("SamplingParams.column", "number if self.draws is None else self.draws", "number"),
    ),
    "whose draws they are is not saved": (
        "test_a_request_with_a_seed_of_its_own_draws_the_same_whatever_came_before",
        Plant("read_request", "choice.get('draws')", "None"),
    ),
    "what is spilled lies on the axis for contexts": (
        "test_a_mesh_with_an_axis_for_contexts_alone",
        Plant(
            "read_contents",
            "dataclasses.replace(found[layer], heads=None, context=None, num_shards=1)",
            "dataclasses.replace(found[layer], heads=None)",
        ),
    ),
    "a mesh without heads is none": (
        "test_a_mesh_with_an_axis_for_contexts_alone",
        Plant("model_mesh", "find_mesh(model) or find_mesh(model, CONTEXT)", "find_mesh(model)"),
    ),
    "static fields are not the model": (
        "test_models_of_equal_arrays_are_told_apart",
        Plant(
            "fingerprint",
            "f'{type(model).__name__} {getattr(model, 'config', None)!r} {others!r} {structure}'",
            "f'{type(model).__name__} {getattr(model, 'config', None)!r} {others!r}'",
        ),
    ),
    "numbers are not the model": (
        "test_models_of_equal_arrays_are_told_apart",
        Plant(
            "fingerprint",
            "f'{type(model).__name__} {getattr(model, 'config', None)!r} {others!r} {structure}'",
            "f'{type(model).__name__} {getattr(model, 'config', None)!r} {structure}'",
        ),
    ),
    "requests of a file with one prompt are taken for samples of one": (
        "test_requests_of_one_prompt_that_wait_in_a_file_are_no_samples_of_one",
        Plant("_are_siblings", "a.salt == b.salt and a.adapter == b.adapter", "True"),
    ),
    "scores of a prompt go with the first sample": (
        "test_a_sample_that_is_cancelled_leaves_its_scores_to_the_others",
        Plant("Request._keeps_scores", "self._first is None or self._first.done", "self._first is None"),
    ),
    "siblings of windows are computed one by one": (
        "test_siblings_of_layers_that_keep_less",
        Plant("Scheduler._gather", "self.rows.must_follow(sequence, s)", "False"),
    ),
}

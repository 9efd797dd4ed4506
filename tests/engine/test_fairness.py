"""Who is served when: short prompts beside long ones, small requests past big ones, and priorities."""

import random

import pytest
from checksum_model import LONGEST, Checksum, continuation, finish
from nightly import NIGHTLY
from test_scheduler import Counted

import jaxkv
from jaxkv._engine.requests.queue import MOST_OVERTAKEN
from jaxkv._engine.requests.scheduler import Scheduler, Sequence

WINDOWS = (None, 7)[: 1 + NIGHTLY]  # by day one layer, which is half of what there is to compile


def new_scheduler(*, max_seqs=4, num_blocks=10_000, block_size=4, **options):
    return Scheduler(Counted(max_seqs, num_blocks, block_size), **{"step_tokens": 32} | options)


def submit(scheduler, prompt, new=1, **fields):
    sequence = Sequence([0] * prompt, prompt + new, **fields)
    scheduler.waiting.add(sequence)
    return sequence


def advance(scheduler):
    """Compute a step; how many tokens of each sequence were part of it."""
    step = scheduler.plan()
    for sequence, count in step.counts.items():
        scheduler.rows.held[sequence.row] += count
    for sequence in scheduler.commit(step):
        sequence.tokens += [0] * sequence.unread
        sequence.unread = 0
        if len(sequence.tokens) == sequence.limit:
            scheduler.finish(sequence)
    return step.counts


def steps_until(scheduler, is_so):
    steps = 0
    while not is_so():
        advance(scheduler)
        steps += 1
        assert steps < 1000
    return steps


def has_token(sequence):
    return len(sequence.tokens) > sequence.limit - 1 or sequence.cached >= sequence.limit - 1


@pytest.mark.parametrize("lengths", [(1500,), (1500, 1400, 2000), (100, 1500, 90)])
@pytest.mark.parametrize(("short", "steps"), [(8, 2), (20, 4)])
def test_a_short_prompt_does_not_wait_for_long_ones(lengths, short, steps):
    scheduler = new_scheduler()
    for length in lengths:
        submit(scheduler, length)
    sequence = submit(scheduler, short)
    assert steps_until(scheduler, lambda: has_token(sequence)) <= steps
    assert scheduler.waiting or len(scheduler.running) >= len(lengths) - 1


def test_all_of_every_step_is_used_and_long_prompts_have_their_share_of_it():
    scheduler = new_scheduler(max_seqs=8)
    long = submit(scheduler, 640)
    taken = []
    while not has_token(long):
        for _ in range(2):
            if len(scheduler.waiting) < 2:
                submit(scheduler, 20)
        counts = advance(scheduler)
        assert sum(counts.values()) == 32
        taken.append(counts[long])
    assert min(taken[:-1]) >= 16 and len(taken) <= 41, "short ones that keep coming do not starve it"


def test_prompts_of_a_kind_come_one_after_the_other():
    """Two that were computed side by side would both end late."""
    scheduler = new_scheduler()
    first, _ = submit(scheduler, 320), submit(scheduler, 300)
    assert steps_until(scheduler, lambda: has_token(first)) <= 12


def test_long_prefill_tokens_is_the_share():
    for share, expected in ((4, 4), (31, 31), (32, 32), (None, 16)):
        scheduler = new_scheduler(long_prefill_tokens=share)
        long = submit(scheduler, 640)
        submit(scheduler, 31)
        assert advance(scheduler)[long] == expected
    alone = new_scheduler(long_prefill_tokens=4)
    long = submit(alone, 640)
    assert advance(alone)[long] == 32


def test_who_has_room_goes_ahead_a_bounded_number_of_times():
    scheduler = new_scheduler(num_blocks=40, max_seqs=8)
    running = submit(scheduler, 60, 60)
    advance(scheduler)
    big = submit(scheduler, 100)
    smalls = [submit(scheduler, 8, 4) for _ in range(40)]
    assert steps_until(scheduler, lambda: len(smalls[0].tokens) == 12) <= 5
    steps_until(scheduler, lambda: big.row is not None)
    assert len(running.tokens) == 120, "until then it had no room"
    assert big.overtaken == MOST_OVERTAKEN
    begun = [small for small in smalls if small not in scheduler.waiting]
    assert MOST_OVERTAKEN <= len(begun) <= MOST_OVERTAKEN + scheduler.rows.num_blocks // 3


def test_a_lower_priority_is_served_earlier():
    scheduler = new_scheduler(max_seqs=1)
    sequences = [submit(scheduler, 10, 5, priority=priority) for priority in (1, 0, 5, -3, 0)]
    begun = []
    while scheduler.waiting or scheduler.running:
        begun += [sequence for sequence in advance(scheduler) if sequence not in begun]
    assert [sequences.index(sequence) for sequence in begun] == [3, 1, 4, 0, 2], "of equal ones who came first"


def test_a_lower_priority_gets_the_tokens_of_a_step():
    scheduler = new_scheduler(long_prefill_tokens=32)
    submit(scheduler, 640)
    advance(scheduler)
    urgent = submit(scheduler, 64, priority=-1)
    assert advance(scheduler) == {urgent: 32}


def test_who_is_served_last_is_set_back():
    scheduler = new_scheduler(num_blocks=4, step_tokens=16)
    later = submit(scheduler, 6, 6, priority=1)
    advance(scheduler)
    sooner = submit(scheduler, 6, 6)
    steps_until(scheduler, lambda: len(sooner.tokens) == 12)
    assert scheduler.times_set_back == 1 and len(later.tokens) < 12


@pytest.fixture(scope="module")
def engine():
    room = dict(max_seqs=4, max_seq_len=LONGEST, block_size=4, num_blocks=16)
    return jaxkv.Engine(Checksum(WINDOWS), **room, prefix_cache=True, step_tokens=16)


def pin(engine, prompt):
    engine.submit(prompt, 1)
    list(engine.run())
    return engine.prefix.pin(prompt)


@pytest.mark.parametrize("way", ["step", "run"])
def test_a_request_that_cannot_begin_ends_and_the_others_go_on(engine, way):
    pinned = [1 + len(way)] * 29
    assert pin(engine, pinned) == 28
    prompts = [[2, 3] * 3, [5] * 40, [6] * 7, [7] * 41, [8] * 9]
    requests = [engine.submit(prompt, 4) for prompt in prompts]
    several = engine.submit([9] * 40, 4, n=2)
    errors = []
    while engine._core.is_busy:
        try:
            list(engine.run()) if way == "run" else engine.step()
        except jaxkv.OutOfBlocks as error:
            errors.append(error)
    stuck = [requests[1], requests[3], *several.samples]
    assert [r.ended for r in stuck] == ["error"] * 4 and several.ended == "error"
    assert [error.request for error in errors] == (stuck if way == "step" else []), "each is named once"
    assert requests[1].error.startswith(f"There is no room for prompt {requests[1].number} with 40 tokens")
    finish(engine, [(requests[i], prompts[i], 4) for i in (0, 2, 4)], WINDOWS)
    engine.prefix.unpin(pinned)
    engine.reset()
    again = engine.submit(prompts[1], 4)
    finish(engine, [(again, prompts[1], 4)], WINDOWS)


def test_a_request_that_cannot_begin_ends_a_stream_with_its_name(engine):
    pinned = [4] * 29
    pin(engine, pinned)
    with pytest.raises(jaxkv.OutOfBlocks, match="There is no room for prompt 1 with 40 tokens"):
        list(engine.stream([[1, 2], [5] * 40], 4))
    engine.prefix.unpin(pinned)
    assert engine.step() == [] and not engine._core.is_busy
    engine.reset()


def test_requests_of_all_priorities_get_their_tokens(engine):
    draw, requests = random.Random(1), []
    for _ in range(30):
        prompt, count = [draw.randrange(90) for _ in range(draw.randint(1, 40))], draw.randint(1, 8)
        requests.append((engine.submit(prompt, count, priority=draw.randint(-2, 2)), prompt, count))
        engine.step()
    finish(engine, requests, WINDOWS)
    urgent = [engine.submit([3] * 9, 2, priority=p) for p in (3, -1, 3, 3, 3, 3)]
    assert [r.params.priority for r in urgent][:2] == [3, -1]
    finish(engine, [], ())
    assert urgent[0].tokens == continuation(WINDOWS, [3] * 9, 2, None)
    for bad in (1.5, "high", None):
        with pytest.raises(ValueError, match="priority must be an integer"):
            engine.submit([1], priority=bad)
    with pytest.raises(ValueError, match="long_prefill_tokens must be at least 1"):
        jaxkv.Engine(Checksum(WINDOWS), max_seqs=1, long_prefill_tokens=0)

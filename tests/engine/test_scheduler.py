"""The scheduler alone, against a pool that is only counted."""

import random

import pytest

from jaxkv._engine.requests.scheduler import Scheduler, Sequence


class Counted:
    """Rows of a pool that is only counted."""

    def __init__(self, max_seqs, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(max_seqs))
        self.held = {}  # tokens in each row, as the device would have them

    def blocks(self, tokens):
        return -(-tokens // self.block_size)

    @property
    def available(self):
        return [self.num_blocks - sum(map(self.blocks, self.held.values()))]

    def taken_by(self, sequence, count):
        return [self.blocks(sequence.cached + count) - self.blocks(sequence.cached)]

    def until(self, sequence):
        return float("inf")

    may_have_more = False

    def is_coming(self, running, sequence):
        return False

    def must_follow(self, leader, sequence):
        return False

    def settle(self):
        pass

    def has_room(self, running, sequence, source=None):
        return bool(self.free) and sum(self.blocks(s.length) for s in [*running, sequence]) <= self.num_blocks

    def admit(self, running, sequence):
        sequence.row = self.free.pop(0)
        self.held[sequence.row] = 0

    def retire(self, sequence):
        del self.held[sequence.row]
        self.free.insert(0, sequence.row)
        sequence.row, sequence.cached = None, 0

    set_back = retire


def simulate(requests, *, max_seqs, num_blocks, block_size, step_tokens, most=1):
    """Run (prompt length, new tokens) requests to their end; the steps, and the order in which they ended."""
    rows = Counted(max_seqs, num_blocks, block_size)
    scheduler = Scheduler(rows, step_tokens=step_tokens)
    for i, (prompt, new) in enumerate(requests):
        scheduler.waiting.add(Sequence([0] * prompt, prompt + new, request=i))
    steps, ended = [], []
    while scheduler.waiting or scheduler.running:
        step = scheduler.plan()
        assert step.counts, "every step makes progress"
        stretched = scheduler.stretch(step, most)
        assert max(step.counts.values()) <= stretched or stretched == 1
        assert len(steps) < 10_000
        for sequence, count in step.counts.items():
            assert rows.held[sequence.row] == sequence.cached, "a row holds what its sequence thinks it holds"
            rows.held[sequence.row] += count
        assert len({s.row for s in step.counts}) == len(step.counts)
        assert rows.available[0] >= 0
        assert step.num_tokens <= step_tokens * stretched
        steps.append({s.request: n for s, n in step.counts.items()})
        for sequence in scheduler.commit(step):
            sequence.tokens += [0] * sequence.unread
            sequence.unread = 0
            if len(sequence.tokens) == sequence.limit:
                scheduler.finish(sequence)
                ended.append(sequence.request)
    assert sorted(ended) == list(range(len(requests)))
    assert sorted(rows.free) == list(range(max_seqs))
    return steps, ended, scheduler


def test_prompts_are_cut_into_chunks_beside_decoding_rows():
    steps, _, _ = simulate([(3, 5), (25, 2)], max_seqs=2, num_blocks=100, block_size=4, step_tokens=10)
    assert steps[:4] == [{0: 3, 1: 7}, {0: 1, 1: 9}, {0: 1, 1: 9}, {0: 1, 1: 1}]


def test_a_row_is_taken_as_soon_as_it_is_free():
    steps, ended, _ = simulate([(1, 10), (1, 2), (1, 3)], max_seqs=2, num_blocks=100, block_size=4, step_tokens=8)
    assert [2 in step for step in steps[:4]] == [False, False, True, True]
    assert ended == [1, 2, 0] and len(steps) == 10


def test_who_is_set_back_goes_on_before_who_came_later():
    _, ended, scheduler = simulate([(6, 6), (6, 6), (6, 6)], max_seqs=2, num_blocks=4, block_size=4, step_tokens=16)
    assert ended == [0, 1, 2] and scheduler.times_set_back


def test_the_newest_is_set_back_and_resumed():
    # 4 blocks of 4: two sequences of 12 cannot both grow to their end.
    steps, ended, scheduler = simulate([(6, 6), (6, 6)], max_seqs=2, num_blocks=4, block_size=4, step_tokens=16)
    assert ended == [0, 1] and scheduler.times_set_back == 1
    resumed = next(i for i in range(1, len(steps)) if steps[i].get(1, 0) > 1)
    assert steps[resumed][1] > 6, "its prompt and what it had generated are computed again, at once"


def test_steps_in_one_go_keep_no_one_waiting():
    """Two rows and three requests: several steps at once, but not over the end of a row that the third takes."""
    steps, ended, _ = simulate(
        [(1, 30), (1, 11), (1, 3)], max_seqs=2, num_blocks=100, block_size=4, step_tokens=8, most=4
    )
    assert steps[:3] == [{0: 4, 1: 4}, {0: 4, 1: 4}, {0: 1, 1: 1}]
    begun = next(i for i, step in enumerate(steps) if 2 in step)
    assert steps[begun - 1] == {0: 1, 1: 1} and begun == 5, "at once when the second has ended"
    assert steps[begun:] == [{0: 4, 2: 3}] + [{0: 4}] * 3 + [{0: 1}] * 3 and ended == [1, 2, 0]


@pytest.mark.parametrize("seed", range(30))
def test_random_traces_come_to_their_end(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 16])
    requests = [(rng.randint(1, 60), rng.randint(1, 30)) for _ in range(rng.randint(1, 40))]
    least = max(-(-(p + n) // block_size) for p, n in requests)
    max_seqs = rng.randint(1, 6)
    simulate(requests, max_seqs=max_seqs, num_blocks=least + rng.randint(0, least), block_size=block_size,
             step_tokens=max(max_seqs, rng.choice([4, 16, 64])), most=rng.choice([1, 3]))  # fmt: skip


def test_samples_go_on_from_a_prompt_that_was_there_already():
    """All of it but its last token, as from a prefix cache: nothing more of it is computed before they share it."""

    class Known(Counted):
        def admit(self, running, sequence):
            super().admit(running, sequence)
            sequence.cached = self.held[sequence.row] = sequence.length - 1

        def fork(self, source, sequence):
            super().admit([], sequence)
            sequence.cached = self.held[sequence.row] = source.cached

    first, second = (Sequence([0] * 5, 7, request=i) for i in range(2))
    scheduler = Scheduler(Known(2, 9, 4), step_tokens=8)
    first.followers = [second]
    scheduler.waiting.add(first)
    computed = []
    for _ in range(2):
        step = scheduler.plan()
        computed += [(s.request, n) for s, n in step.counts.items()]
        scheduler.commit(step)
    assert sorted(computed) == [(0, 1), (0, 1), (1, 1)] and second.cached == 5


def test_siblings_that_wait_follow_the_first_that_begins():
    """Also within the step in which it begins: and each of them gets a row by a fork, or waits again."""

    class Siblings(Counted):
        def must_follow(self, leader, sequence):
            return True

        def fork(self, source, sequence):
            sequence.row = self.free.pop(0)
            sequence.cached = self.held[sequence.row] = source.cached

    sequences = [Sequence([0] * 7, 9, request=i, prompt=6) for i in range(4)]
    scheduler = Scheduler(Siblings(3, 99, 4), step_tokens=8, long_prefill_tokens=8)
    for sequence in sequences:
        scheduler.waiting.add(sequence)
    step = scheduler.plan()
    assert [s.request for s in step.counts] == [0] and step.num_tokens == 5 and len(sequences[0].followers) == 3
    scheduler.commit(step)
    scheduler.plan()
    assert [s.request for s in scheduler.running] == [0, 1, 2] and [s.request for s in scheduler.waiting] == [3]
    assert all(s.cached == 5 for s in sequences[:3]) and not sequences[0].followers

"""Chooses which tests run by night alone, from the times of a run by day.

    : > tests/by_night.txt
    PYTEST_ADDOPTS=--durations=0 make test | tee log
    python tests/support/choose_by_night.py log > tests/by_night.txt

Of each test the cheapest cases run by day, until they have taken SECONDS; at least one of them, if it takes no more
than LONGEST. What the other cases try is tried by night.

Some cases were added by hand, because other tests enter each branch that they enter: `git diff` shows which of them a
new list leaves out.
"""

import collections
import re
import sys
from collections.abc import Iterable

SECONDS = 0.4  # of a test's cases by day
LONGEST = 6.0  # seconds of a test's only case by day
CHEAP = 0.3  # a case that takes less stays: there is nothing to gain
READ = ("tests/test_api.py", "tests/test_docs.py", "tests/test_readme.py")  # examples that users read all run by day
ALWAYS = (  # long, and nothing shorter tries what they try
    "tests/cli/test_chat.py::test_a_chat_is_computed_once_turn_by_turn",
    "tests/cli/serve/test_serve_command.py::test_the_command",
    "tests/compile/test_gpu_compile.py::",
    "tests/core/test_by_hand.py::",
    "tests/core/test_evict_machine.py::",
    "tests/core/test_quantised.py::test_attention_of_a_step",
    "tests/core/test_shards.py::test_every_function_gives_what_it_gives_on_one_device",
    "tests/core/test_state_machine.py::",
    "tests/core/test_states.py::test_random_operations_keep_each_row_s_states",
    "tests/engine/serving/test_serving.py::test_others_may_use_the_engine_meanwhile",
    "tests/engine/test_interrupts.py::",
    "tests/engine/test_prefill.py::test_requests_come_and_go",
    "tests/engine/test_prompt_scores.py::test_scoring_alone_gives_no_tokens",
    "tests/engine/test_random_runs.py::",
    "tests/engine/test_requests.py::test_several_steps_in_one_dispatch",
    "tests/engine/test_speculation.py::",
    "tests/kernels/tpu/test_interpret.py::test_write_and_attend_of_a_mixed_step",
    "tests/kernels/tpu/test_interpret.py::test_what_is_wrong_with_a_row_stays_in_it",
    "tests/models/test_smollm.py::test_chats_are_those_of_transformers",
    "tests/processes/",
    "tests/test_adoption.py::",
    "tests/tiers/test_swap_shared.py::test_siblings_travel_together",
)
LINE = re.compile(r"^(\d+\.\d+)s (?:call|setup|teardown) +(tests/\S+\.py::.+?)\s*$")


def read_seconds(lines: Iterable[str]) -> dict[str, float]:
    """Returns what each case took, of lines that pytest wrote."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for line in lines:
        if found := LINE.match(line):
            seconds[found[2]] += float(found[1])
    return seconds


def choose(seconds: dict[str, float], most: float = SECONDS) -> list[str]:
    """Returns the cases that run by night alone."""
    tests: dict[str, list[str]] = collections.defaultdict(list)
    for case in seconds:
        tests[case.partition("[")[0]].append(case)
    chosen = []
    for cases in tests.values():
        cases.sort(key=lambda case: (seconds[case], case))
        spent = 0.0
        for i, case in enumerate(cases):
            spent += seconds[case]
            is_long = spent > most and seconds[case] > CHEAP if i else spent > LONGEST and not case.startswith(ALWAYS)
            if is_long and not case.startswith(READ):
                chosen.append(case)
    return sorted(chosen)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", errors="replace") as log:
        print("\n".join(choose(read_seconds(log))))

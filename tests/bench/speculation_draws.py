"""G-tests of tests/runtime/speculation/test_speculation_distribution.py with any number of samples.

python -m tests.bench.speculation_draws 50000             # every stage of sampling, and a biased rule
python -m tests.bench.speculation_draws 50000 all top-p   # some of them
"""

import sys

from headrace.runtime.speculation.proposer import num_accepted
from tests.runtime.speculation.test_speculation_distribution import (
    STAGES,
    answers,
    joint,
    lenient,
    of_a_draft,
    of_the_prompt,
    passes,
)

BIASED = "a biased rule"


def main() -> None:
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    chosen = sys.argv[2:] or [*STAGES, BIASED]
    for stage, params in STAGES.items():
        if stage not in chosen:
            continue
        for draft in (of_the_prompt, of_a_draft):
            print(stage, draft.__name__, passes(answers(params, draws, draft, num_accepted), joint(params)), flush=True)
    if BIASED in chosen:
        found = answers(STAGES["temperature"], draws, of_the_prompt, lenient)
        print(BIASED, passes(found, joint(STAGES["temperature"])))


if __name__ == "__main__":
    main()

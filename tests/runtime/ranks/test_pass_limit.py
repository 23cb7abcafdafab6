"""Time limit of passes: it follows earlier passes of decoding and of prompts."""

from typing import Any

from headrace.runtime.kv.cache import PassRow
from headrace.runtime.ranks.pass_limit import FIRST_S, LEAST_S, PassLimit

CACHE: Any = None


class Passes:
    """Passes on a clock of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limit = PassLimit(lambda: self.now)

    def run(self, tokens: int, seconds: float) -> float | None:
        """Run a pass; return the limit if it was exceeded just before the end."""
        self.limit.made([PassRow(CACHE, tokens, "prefill" if tokens > 1 else "decode", True, 1)])
        with self.limit.waiting():
            self.now += seconds
            found = self.limit.exceeded()
        self.now += 1000.0  # the engine does something else, which is no pass
        assert self.limit.exceeded() is None
        return found


def test_the_first_pass_of_a_kind_has_the_long_time_limit() -> None:
    passes = Passes()
    assert passes.run(512, FIRST_S - 1) is None
    assert Passes().run(512, FIRST_S + 1) == FIRST_S
    assert Passes().run(1, FIRST_S + 1) == FIRST_S


def test_the_time_limit_of_a_pass_follows_earlier_passes() -> None:
    # Decoding: eight times the slowest pass would be 0.8 s, and no limit is below LEAST_S. The pass after a prompt's is
    # timed as one, since a pass is built ahead.
    passes = Passes()
    passes.run(512, 5.12)
    passes.run(1, 0.1)
    passes.run(1, 0.1)
    assert passes.run(1, LEAST_S - 0.1) is None
    passes = Passes()
    passes.run(512, 5.12)
    for _ in range(3):
        passes.run(1, 0.1)
    assert passes.run(1, LEAST_S + 0.1) == LEAST_S
    # Prompts: eight times the slowest, by tokens
    passes = Passes()
    passes.run(512, 5.12)
    passes.run(1, 0.1)
    assert passes.run(1024, 70) is None  # the limit is 0.08 s a token, 82 s
    assert passes.run(1024, 83 * 8) is not None  # now 0.55 s a token, 560 s


def test_a_pass_with_prompt_tokens_has_the_time_limit_of_prefill() -> None:
    passes = Passes()
    for tokens, seconds in ((512, 51.2), (1, 0.1), (1, 0.1)):
        passes.run(tokens, seconds)
    passes.limit.made([PassRow(CACHE, 100, "prefill", True, 1)])  # built ahead
    assert passes.run(1, 70) is None


def test_short_waits_do_not_shorten_the_limit_of_the_first_decode_pass() -> None:
    passes = Passes()
    with passes.limit.waiting():  # a new K/V backend, a prefix of the next prompt, or a request that was cancelled
        passes.now += 0.001
    with passes.limit.waiting():  # a prompt of one token: the step starts its pass, and waits for none
        passes.limit.made([PassRow(CACHE, 1, "decode", True, 1)])
        passes.now += 0.001
    assert passes.run(1, FIRST_S - 1) is None
    assert passes.run(1, LEAST_S + 1) is None  # eight times that


def test_nested_waits_for_ranks_count_the_outer_time() -> None:
    passes = Passes()
    with passes.limit.waiting():
        with passes.limit.waiting():
            passes.now += FIRST_S
        assert passes.limit.exceeded() is None
        passes.now += 1
        assert passes.limit.exceeded() == FIRST_S
    assert passes.limit.exceeded() is None

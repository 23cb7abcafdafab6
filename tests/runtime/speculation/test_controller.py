"""The number of draft tokens on simulated machines."""

import pytest

from headrace.runtime.speculation.controller import GPU_ROWS, MAX_DRAFT_PER_PASS, Controller

_WAIT_S = 0.0004  # of a pass that could not be queued ahead


def seconds(rows: int, row: float) -> float:
    """Return the time of a pass of so many rows: 10 ms for the first, the part `row` of it for each other."""
    return 0.01 * (1 + row * (rows - 1))


def gain(row: float, chance: float, *, sequences: int = 1, passes: int = 600) -> float:
    """Return tokens per second relative to no speculation, on a simulated machine.

    row: cost of each further row, in steps.
    chance: that a draft token is accepted, if all before it were.
    """
    controller = Controller()
    chances = [[chance**place for place in range(1, 16)]] * sequences  # that a draft token is accepted at all
    tokens = 0.0
    spent_s = 0.0
    ahead = True  # the pass was queued while the one before it ran
    for _ in range(passes):
        counts = [0] * sequences
        if tokens and controller.pays(sequences, chance):
            counts = controller.choose(chances)
        took_s = seconds(sequences + sum(counts), row)
        if any(counts) or not ahead:
            took_s += _WAIT_S
        controller.record(sequences, sum(counts), took_s, ahead=ahead)
        ahead = not any(counts)
        spent_s += took_s
        for accepted, count in zip(chances, counts, strict=True):
            tokens += sum(accepted[:count]) + 1  # expected, and the one that follows them
    return tokens / spent_s * seconds(sequences, row) / sequences


@pytest.mark.parametrize("row", [0.01, 0.25, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_speculation_never_costs_much(row: float, chance: float, sequences: int) -> None:
    assert gain(row, chance, sequences=sequences) > 0.98


def test_speculation_gains_with_cheap_rows_and_good_drafts() -> None:
    assert gain(0.25, 0.97) > 2
    assert gain(0.05, 0.97) > 4
    assert gain(0.05, 0.6) > 1.4
    assert gain(0.05, 0.9, sequences=4) > 1.5


def test_no_draft_before_a_plain_pass_was_measured() -> None:
    controller = Controller()
    assert controller.choose([[1.0] * 15]) == [0]
    controller.record(1, 0, 0.01, ahead=True)
    assert controller.choose([[1.0] * 15]) != [0]
    assert controller.choose([[1.0] * 15], [0.02]) == [0]  # draft tokens that cost two steps each


def test_the_cost_of_drafts_includes_the_delay_after_a_pass() -> None:
    """The next plain pass cannot be queued ahead and takes longer."""
    ratios = []
    for next_s in (0.010, 0.014):
        controller = Controller()
        controller.record(1, 0, 0.010, ahead=True)
        controller.record(1, 1, 0.012, ahead=False)
        controller.record(1, 0, next_s, ahead=False)
        ratios.append(controller.measured[1, 1, 0][0])
    assert ratios[1] == pytest.approx(ratios[0] + 0.2)  # half of it: there was one such pass, and what was expected


@pytest.mark.parametrize("slow", [[0.5], [0.030] * 6])
def test_slow_outlier_passes_do_not_change_the_measured_cost(slow: list[float]) -> None:
    """Other programs slow some passes down, often several in a row."""
    controller = Controller()
    for took in [0.010] * 8 + slow:
        controller.record(1, 0, took, ahead=True)
    controller.record(1, 1, 0.012, ahead=False)
    controller.record(1, 0, 0.010, ahead=False)
    assert controller.measured[1, 1, 0][0] == pytest.approx((1.3 + 1.2) / 2)


@pytest.mark.parametrize("chance", [0.97, 0.7])
def test_one_slow_first_pass_does_not_end_drafting(chance: float) -> None:
    """Else a copied text is decoded token by token, until the costs are measured anew."""
    controller = Controller()
    controller.record(1, 0, 0.010, ahead=True)
    controller.record(1, 2, 0.100, ahead=False)
    controller.record(1, 0, 0.010, ahead=False)
    assert controller.choose([[chance**count for count in range(1, 16)]]) != [0]


def test_proposers_are_rarely_asked_where_none_can_pay() -> None:
    controller = Controller()
    controller.record(4, 0, 0.01, ahead=True)
    assert controller.pays(4, 0.99)
    assert not controller.pays(4, 0.3)
    for count in range(1, MAX_DRAFT_PER_PASS + 1):
        controller.record(4, count, 10.0, ahead=False)
        controller.record(4, count, 10.0, ahead=False)
    controller.record(4, 0, 0.01, ahead=True)
    asked = [controller.pays(4, 1.0) for _ in range(300)]
    assert not any(asked[:200])
    assert asked[-1]


def test_the_best_drafts_of_all_sequences_are_verified() -> None:
    controller = Controller()
    controller.record(3, 0, 0.01, ahead=True)
    counts = controller.choose([[0.95] * 15, [], [0.1] * 15])
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
    assert sum(controller.choose([[1.0] * 15] * 3)) <= MAX_DRAFT_PER_PASS


def test_rejected_proposers_are_probed_again() -> None:
    controller = Controller()
    controller.record(1, 0, 0.01, ahead=True)
    for count in range(1, MAX_DRAFT_PER_PASS + 1):
        controller.record(1, count, 10.0, ahead=False)
        controller.record(1, count, 10.0, ahead=False)
    tried = 0
    for _ in range(600):
        if any(controller.choose([[0.99] * 15])):
            tried += 1
            controller.record(1, 1, 0.011, ahead=False)
        else:
            controller.record(1, 0, 0.01, ahead=True)
    assert tried > 100


def test_pass_costs_are_learned_by_context_length() -> None:
    """Rows that are free beside the weights cost half a pass each beside 8,192 entries."""
    controller = Controller()
    chances = [[0.7**place for place in range(1, 16)]]
    chosen = {}
    for context, row in ((200, 0.01), (8192, 0.5), (200, 0.01)):
        for _ in range(60):
            controller.record(1, 0, 0.01, ahead=True, context=context)
            (count,) = controller.choose(chances, context=context)
            if count:
                controller.record(1, count, seconds(1 + count, row), ahead=False, context=context)
        chosen[context] = controller.choose(chances, context=context)[0]
    assert chosen[200] > 5
    assert chosen[8192] < 4


def test_a_longer_context_starts_from_the_costs_of_the_nearest() -> None:
    controller = Controller({(1, 7, 0): (1.5, 9), (1, 7, 3): (3.0, 9)})
    assert controller.excess(1, 7, context=100) == pytest.approx(0.5)
    assert controller.excess(1, 7, context=1500) == pytest.approx(0.5)
    assert controller.excess(1, 7, context=100_000) == pytest.approx(2.0)
    assert not controller.pays(1, 1.0, context=100_000)  # a plain pass comes first
    for context in (100, 1023, 1024, 2047, 2048):
        controller.record(1, 0, 0.01, ahead=True, context=context)
        controller.record(1, 7, 0.02, ahead=False, context=context)
        controller.record(1, 0, 0.01, ahead=True, context=context)
    assert {key: passes for key, (_, passes) in controller.measured.items()} == {
        (1, 7, 0): 2,
        (1, 7, 1): 2,
        (1, 7, 2): 1,
    }


def test_pass_times_of_zero_cause_no_division_by_zero() -> None:
    controller = Controller()
    for count in (0, 3, 0):
        controller.record(1, count, 0.0, ahead=True)
    assert not controller.pays(1, 1.0, cost_s=0.01)
    assert controller.choose([[1.0] * 3], [0.01]) == [0]
    assert all(ratio >= 1 for ratio, _ in controller.measured.values())


def test_draft_counts_fill_the_row_counts_of_gpu_kernels() -> None:
    controller = Controller(rows=GPU_ROWS)
    for _ in range(3):
        controller.record(1, 0, 0.01, ahead=True)
    counts = set()
    for chance in (0.5, 0.8, 0.9, 0.99):
        [count] = controller.choose([[chance**place for place in range(1, 31)]])
        counts.add(count)
        controller.record(1, count, 0.01, ahead=True)
        controller.record(1, 0, 0.01, ahead=True)
    assert max(counts) > 3
    assert counts <= {0, *(rows - 1 for rows in GPU_ROWS)}

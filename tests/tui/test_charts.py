"""The charts of the decode view as plain functions: ticks, what is cut, dotted lines, colours. No widget, no clock."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from textual.content import Content

from headrace.app.engine.events import Done, Prefill
from headrace.app.tui.decode.context import ContextSection, origins, seconds_until_full
from headrace.app.tui.decode.context_speed import ContextSpeedSection, context_chart, expected_rate, span_of
from headrace.app.tui.decode.drawing import bars, dotted, even_ticks, labels, layered, log_ticks, marked, ticks
from headrace.app.tui.decode.latency import HEADROOM, LatencySection, _cause_line, colour, latency_chart
from headrace.app.tui.decode.meters import MeterLines
from headrace.app.tui.decode.roofline import RooflineSection, flops_text, plot
from headrace.app.tui.decode.step import StepSection
from headrace.app.tui.decode.tables import TurnsSection
from headrace.app.tui.metrics.facts import MachineFacts, facts
from headrace.app.tui.metrics.figures import LatencyWindow, RooflinePoint, Roofs, decode_point, histogram, roofs
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.rates import DecodeHistory
from headrace.app.tui.widgets.lines import Section, legend
from headrace.runtime.engine.request import Finished
from headrace.runtime.metrics.telemetry import Percentiles, StepParts
from headrace.runtime.metrics.units import format_milliseconds
from tests.support.deltas import delta_of
from tests.support.scripted_engine import CARD, COST, record, summary

SPANS = st.tuples(st.floats(0, 1e6), st.floats(1e-6, 1e6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(SPANS, st.integers(1, 12))
def test_ticks_are_round_few_and_within(span: tuple[float, float], most: int) -> None:
    low, high = span
    found = ticks(low, high, most)
    assert len(found) <= most + 1
    slack = (high - low) * 1e-6 + high * 1e-9
    for tick in found:
        assert low - slack <= tick <= high + slack
    for a, b in pairwise(found):
        step = b - a
        power = 10.0 ** math.floor(math.log10(step * 1.001))
        rounding = 1e-6 * step + 4 * math.ulp(high)  # of the difference of two numbers far from zero
        assert min(abs(step - digit * power) for digit in (1, 2, 5)) <= rounding


@given(st.floats(1e-6, 1e9), st.integers(1, 40), st.integers(2, 4))
def test_even_ticks_are_round_and_equally_far_apart(high: float, rows: int, apart: int) -> None:
    top, found = even_ticks(high, rows, apart)
    lines = [line for line, _ in found]
    values = [value for _, value in found]
    assert high <= top * (1 + 1e-9) <= 2.5 * high
    assert lines[0] == values[0] == 0
    assert lines[-1] < rows
    assert len({b - a for a, b in pairwise(lines)}) <= 1
    assert all(line >= apart for line in lines[1:])
    for line, value in found:
        assert value / top * rows == pytest.approx(line)
    if len(values) > 1:
        assert round(values[1] / 10.0 ** math.floor(math.log10(values[1] * 1.001))) in (1, 2, 5)


def test_an_empty_or_infinite_axis_has_no_ticks() -> None:
    assert ticks(1.0, 1.0, 5) == ticks(0.0, math.inf, 5) == ticks(0.0, 9.0, 0) == []
    assert ticks(0.0, 1.0, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_labels_have_the_decimals_their_distance_needs() -> None:
    assert labels(ticks(0.0, 60.0, 3)) == ["0", "20", "40", "60"]
    assert labels(ticks(0.0, 0.6, 3)) == ["0.0", "0.2", "0.4", "0.6"]
    assert labels([0.0]) == ["0"]
    assert labels(ticks(0.0, 9000.0, 2)) == ["0", "5,000"]


def test_ticks_of_a_logarithmic_axis_leave_out_what_there_is_no_room_for() -> None:
    assert log_ticks(0.1, 1000, 9) == pytest.approx([0.1, 1, 10, 100, 1000])
    assert log_ticks(0.1, 1000, 3) == pytest.approx([0.1, 10, 1000])
    assert log_ticks(0, 10, 3) == []
    assert log_ticks(1.5e11, 7e11, 9) == pytest.approx([2e11, 5e11])
    assert log_ticks(9, 60, 2) == pytest.approx([10, 20])
    assert log_ticks(3, 4, 9) == []


def test_labels_below_a_chart_do_not_run_into_each_other() -> None:
    assert marked([(0, "100"), (3, "150"), (6, "200"), (11, "250")], 12) == "╵100  ╵200  "
    assert marked([(-2, "50")], 5) == " " * 5
    assert marked([(0, "0"), (9, "250")], 10) == "╵0    250╵"


def test_a_percentile_line_is_visible_on_bars_and_on_the_background() -> None:
    drawn = bars([8.0, 8.0, 1.0, 1.0], top=8.0, width=2, height=2)
    assert drawn == ["⣿ ", "⣿⣀"]
    assert dotted(drawn, 7, 2) == ["⣾⠁", "⣿⣀"]
    assert dotted(drawn, 7, 4) == ["⣾ ", "⣿⣀"]
    assert dotted(drawn, 0, 2) == ["⣿ ", "⢿⢀"]
    assert dotted(drawn, 99, 2) == drawn


def _window(latencies: list[float]) -> LatencyWindow:
    of = Percentiles.of(latencies)
    assert of is not None
    return LatencyWindow([replace(record(n, 20 + n), latency_s=latency) for n, latency in enumerate(latencies, 1)], of)


def _lines(latencies: list[float], width: int, height: int, cursor: int | None = None) -> list[str]:
    return [line.plain for line in latency_chart(_window(latencies), width, height, cursor)]


STEADY = [0.010] * 99 + [0.012]


def test_the_latency_chart_has_round_ticks_on_both_axes() -> None:
    lines = _lines([0.010] * 97 + [0.020] * 3, 40, 11)
    assert [line.partition("┤")[0].strip() for line in lines if "┤" in line] == ["20", "15", "10", "5", "0"]
    assert lines[-1].split() == ["step", "╵50", "100╵"]
    assert all(len(line) == 40 for line in lines)
    for tick in (50,):  # two steps a cell, the newest rightmost
        assert lines[-1].index(f"╵{tick}") == 39 - (100 - tick) // 2


def test_a_bar_taller_than_the_chart_is_marked_with_an_arrow() -> None:
    latencies = [0.010] * 100
    latencies[-21] = 0.5
    lines = _lines(latencies, 80, 9)
    assert lines[0].count("↑") == 1
    assert lines[0].index("↑") == 80 - 12 - 1 - 20 // 2
    assert not any("↑" in line for line in lines[1:])
    assert not any("↑" in line for line in _lines(STEADY, 80, 9))


def test_the_latency_chart_labels_p50_and_p95_at_their_height() -> None:
    lines = _lines([0.010] * 80 + [0.020] * 20, 60, 9)
    names = [line[:3] for line in lines]
    assert names.index("p95") < names.index("p50")


@given(st.lists(st.floats(0, 10), max_size=300), st.floats(1e-6, 10), st.integers(1, 30))
def test_the_histogram_has_every_step_once(latencies: list[float], top: float, rows: int) -> None:
    counts = histogram(latencies, top, rows)
    assert len(counts) == rows
    assert sum(counts) == len(latencies)
    assert sum(counts[1:]) == sum(int(latency / top * rows) < rows - 1 for latency in latencies)


def test_the_histogram_shares_the_axis_of_the_history() -> None:
    lines = _lines([0.010] * 60 + [0.020] * 20, 72, 9)
    tall = [cells for line in lines[:-1] if (cells := line.rpartition("▏")[2].strip())]
    assert [len(cells) for cells in tall] == [3, 10]
    assert "60 steps" in lines[-1]


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=400), st.integers(24, 80), st.integers(9, 20))
def test_the_percentiles_are_those_of_the_meters(latencies: list[float], width: int, height: int) -> None:
    metrics = LiveMetrics()
    records = [replace(record(n, 20 + n), latency_s=latency) for n, latency in enumerate([1.0, *latencies])]
    metrics.take([delta_of(records)])
    lines = [line.plain for line in LatencySection(metrics).lines(metrics, width, height)]
    of = Percentiles.of(latencies)
    assert of is not None
    assert f"{format_milliseconds(of.p50)} ms p50" in MeterLines(metrics).lines(metrics, width, 5)[1].plain
    chart = [line for line in lines[1:] if line[8:9] in ("│", "┤", "┈")]
    top = even_ticks(min(of.p99 * HEADROOM, 3 * of.p50) * 1e3, len(chart), 2)[0] / 1e3
    for name, value in (("p50", of.p50), ("p95", of.p95)):
        rows = [row for row, line in enumerate(chart) if line.startswith(name)]
        assert value <= top or not rows
        height_of = 4 * (len(chart) - 1 - rows[0]) if rows else 0  # p50 covers p95 in the same line
        assert not rows or height_of - 1 <= value / top * 4 * len(chart) <= height_of + 5


def test_colours_tell_the_distance_from_the_median() -> None:
    assert [colour(value, 0.010) for value in (0.005, 0.010, 0.012, 0.015, 0.021)] == [
        "$primary",
        "$primary",
        "$primary",
        "$warning",
        "$error",
    ]
    chart = latency_chart(_window([0.010] * 80 + [0.027] * 20), 40, 13)
    styles = [_style(line) for line in chart[:-1]]
    assert styles == sorted(styles, key=["$error", "$warning", "$primary"].index)
    assert set(styles) == {"$error", "$warning", "$primary"}


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=300),
    st.integers(20, 200),
    st.integers(1, 20),
    st.none() | st.integers(0, 400),
)
def test_the_latency_chart_has_the_given_size_for_any_steps(
    latencies: list[float], width: int, height: int, cursor: int | None
) -> None:
    lines = _lines(latencies, width, height, cursor)
    assert len(lines) == height
    assert {len(line) for line in lines} == {width}


def _style(line: Content) -> str:
    """Return the last of a line's styles: of its bars."""
    return str(line.spans[-1].style)


# -- roofline, speed against context, history ----------------------------------------------------------------------

POINTS = [(RooflinePoint(2.7, 19.4e9), "◆", ""), (RooflinePoint(96.0, 71.3e9), "▲", "")]


def _plot(roof: float | None, width: int = 56, height: int = 13, nominal: float | None = None) -> list[str]:
    trail = [RooflinePoint(2.9, 15e9), RooflinePoint(2.8, 18e9)]
    return [line.plain for line in plot(POINTS, trail, Roofs(10e9, nominal, roof), width, height)]


def test_the_roofline_has_round_ticks_and_a_measured_roof() -> None:
    lines = _plot(150e9)
    assert any(line.startswith("100G┤") for line in lines)
    assert "╵10 " in lines[-1]
    assert "╵100 " in lines[-1]
    assert any("⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀" in line for line in lines[:3])  # flat
    assert {len(line) for line in lines} == {56}
    assert _plot(150e9, nominal=20e9) != lines


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (145e9, "145G"),
        (999.4e9, "999G"),
        (999.6e9, "1T"),
        (999.9e9, "1T"),
        (1e12, "1T"),
        (999.9e6, "1G"),
        (1.5e15, "1.5P"),
    ],
)
def test_flops_have_three_digits_and_no_exponent(flops: float, text: str) -> None:
    assert flops_text(flops) == text


def test_without_a_compute_roof_the_plot_ends_at_its_points() -> None:
    lines = _plot(None)
    assert not any("⣀⣀⣀⣀⣀⣀" in line for line in lines)
    assert "1000" not in lines[-1]
    assert max(line.rfind("▲") for line in lines) > 40


def test_a_point_above_the_roofline_is_explained() -> None:
    limits = Roofs(10e9, None, 50e9)
    assert limits.why_above(RooflinePoint(2.0, 19e9)) == ""
    assert "above the measured memory" in limits.why_above(RooflinePoint(2.0, 21e9))
    assert "compute" in limits.why_above(RooflinePoint(96.0, 71e9))
    assert limits.limit_of(RooflinePoint(2.0, 10e9)) == "memory limits it, 50 % used; arithmetic from 5 FLOP/B"
    assert limits.limit_of(RooflinePoint(10.0, 10e9)) == "arithmetic limits it, 20 % used"
    assert Roofs(10e9, None, None).limit_of(RooflinePoint(2.0, 10e9)) == "memory limits it, 50 % used"
    assert Roofs(None, None, None).limit_of(RooflinePoint(2.0, 10e9)) == ""
    metrics = LiveMetrics()
    assert roofs(metrics.machine) == Roofs(None, None, None)
    metrics.machine = MachineFacts(compute_flops=50e9, peak_flops=400e9)
    assert (roofs(metrics.machine).compute, roofs(metrics.machine).vendors) == (50e9, False)
    metrics.machine = MachineFacts(peak_flops=400e9)
    assert (roofs(metrics.machine).compute, roofs(metrics.machine).vendors) == (400e9, True)
    fast = _answering()
    fast.machine = replace(fast.machine, measured_gb_s=1.0)
    section = RooflineSection(fast)
    section.lines(fast, 60, 12)
    assert "above the measured memory" in str(section.border_subtitle)
    lines = RooflineSection(_answering()).lines(_answering(), 60, 12)
    assert len(lines) == 12
    assert "memory limits it" in lines[-2].plain


def test_the_expected_speed_follows_from_the_shapes() -> None:
    assert expected_rate(COST, 10.0, 1) == pytest.approx(10e9 / COST.step_bytes(0))
    assert expected_rate(COST, 10.0, 8192) == pytest.approx(10e9 / COST.step_bytes(8191))
    lines = [line.plain for line in context_chart(COST, 10.0, 7.0, [(32, 71.0), (500, 60.0)], 2048, 60, 10)]
    assert sum(line.count("•") for line in lines) == 2
    assert lines[-1].split() == ["╵0", "╵500", "╵1,000", "╵1,500", "2,000╵"]
    assert lines[0].startswith("100┤")
    assert {len(line) for line in lines} == {60}


@pytest.mark.parametrize(
    ("tokens", "limit", "span"),
    [(0, 8192, 2048), (600, 8192, 4096), (5000, 8192, 8192), (5000, 0, 32768), (9, 512, 512)],
)
def test_the_context_that_is_shown_grows_with_the_conversation(tokens: int, limit: int, span: int) -> None:
    assert span_of(tokens, limit) == span


STEPS = st.tuples(
    st.integers(0, 5000), st.integers(0, 12), st.integers(0, 12), st.floats(0.002, 0.5)
)  # past, draft tokens, accepted ones at most, seconds


@given(st.lists(STEPS, min_size=1, max_size=40), st.booleans())
def test_the_decode_point_is_under_the_roof_unless_bandwidth_exceeds_it(
    steps: list[tuple[int, int, int, float]], over: bool
) -> None:
    """Whatever was drafted and accepted: the FLOPs and the bytes are of the same steps."""
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.submitted()
    for index, (past, proposed, most, seconds) in enumerate(steps, 1):
        accepted = min(most, proposed)
        step = replace(record(index, past + 1 + accepted), proposed=proposed, accepted=accepted, latency_s=seconds)
        rows = 1 + proposed
        read = COST.kv_bytes_read(past + proposed)
        written = rows * COST.kv_bytes_written()
        metrics.take([delta_of([replace(step, kv_bytes_read=read, kv_bytes_written=written)])])
    if over:
        metrics.take([Done(1, Finished("stop", summary(20, 0, len(steps))))])
    point = decode_point(metrics.totals)
    achieved = metrics.achieved_gb_s
    assert point is not None
    assert achieved is not None
    assert point.flops == pytest.approx(achieved * 1e9 * point.intensity)
    if over:
        counted = sum(COST.step_flops(past + row) for past, proposed, _, _ in steps for row in range(1 + proposed))
        assert point.flops == pytest.approx(counted / sum(seconds for *_, seconds in steps))


@pytest.mark.parametrize("width", [22, 26, 40])
def test_the_bytes_of_a_step_are_shown_before_the_first_step(width: int) -> None:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    lines = [line.plain for line in StepSection(metrics).lines(metrics, width, 6)]
    assert lines[1] == "93.5 MiB to read and write"[:width]
    assert lines[2].startswith("model weights   93.5 M")


PARTS = StepParts(weights_s=0.0038, kv_s=0.0005, sampling_s=0.0002, waiting_s=0.0008, host_s=0.0001)  # and 0.6 ms


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            6,
            [
                "model weights 3.80",
                "waiting 0.80",
                "other kernels 0.60",
                "K/V cache 0.50",
                "sampling 0.20",
                "host 0.10",
            ],
        ),
        (4, ["model weights 3.80", "waiting 0.80", "other kernels 0.60", "+ 3 smaller 0.80"]),
        (2, ["model weights 3.80", "+ 5 smaller 2.20"]),
    ],
)
@pytest.mark.parametrize("width", [24, 33, 80])
def test_the_largest_parts_of_a_step_stand_first(lines: int, expected: list[str], width: int) -> None:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.submitted()
    metrics.take([delta_of([replace(record(n, 20 + n), latency_s=0.006, parts=PARTS) for n in range(40)])])
    shown = [line.plain for line in StepSection(metrics).lines(metrics, width, lines + 2)]
    assert len(shown) == lines + 2
    assert [" ".join(line.split()[: -2 if width > 24 else -1]) for line in shown[1:-1]] == expected
    assert all(line.count("ms") == 1 for line in shown[1:-1])
    assert shown[-1].startswith("94.")
    bytes_too = [line.plain for line in StepSection(metrics).lines(metrics, width, 9)]
    assert len(bytes_too) == 8  # a sum of all parts in the ninth line says nothing


@given(st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=8), st.integers(4, 60), st.integers(1, 4))
def test_a_legend_has_its_first_pieces_in_order(names: list[str], width: int, max_lines: int) -> None:
    lines = legend([Content(name) for name in names], lambda count: Content(f"+{len(names) - count}"), width, max_lines)
    assert 1 <= len(lines) <= max_lines
    assert all(line.cell_length <= width for line in lines)
    words = " ".join(line.plain for line in lines).split()
    shown = len([word for word in words if not word.startswith("+")])
    if len(words[0]) == len(names[0]):  # not cut
        assert words[:shown] == names[:shown]
        assert words[shown:] == ([f"+{len(names) - shown}"] if shown < len(names) and len(words) > shown else [])
        assert shown == len(names) or len(words) > shown or shown == 1


def test_rare_causes_of_stalls_are_summed() -> None:
    causes = [*["garbage collection"] * 9, *["growth of the KV cache"] * 4, *["other programs"] * 2, ""]
    assert _cause_line(causes, 100).plain.endswith("O 2x other programs ? 1x unknown cause")
    assert _cause_line(causes, 50).plain == "C 9x garbage collection + 7x more"


@pytest.mark.parametrize("kind", [RooflineSection, ContextSpeedSection])
def test_a_chart_that_is_not_drawn_names_the_reason(kind: type[Section]) -> None:
    metrics = _answering()
    section = kind(metrics)
    assert [line.plain for line in section.lines(metrics, 60, 3)] == ["no room here"]
    metrics.machine = replace(metrics.machine, measured_gb_s=None)
    assert [line.plain for line in section.lines(metrics, 60, 9)] == ["memory bandwidth not measured yet"]


def test_overlapping_braille_layers_show_all_dots_in_the_front_style() -> None:
    (line,) = layered([(["⠁⠁ "], "red"), (["⡀  "], "blue"), (["  •"], "green")])
    assert line.plain == "⡁⠁•"
    assert [str(span.style) for span in line.spans] == ["blue", "red", "green"]


def test_the_history_has_an_entry_for_each_second_of_decoding() -> None:
    history = DecodeHistory()
    history.add([record(n, 20 + n) for n in range(401)])  # 6 ms each, the first does not count
    assert len(history.samples) == 2
    history.end_turn()
    assert len(history.samples) == 3
    history.add([record(n, 20) for n in range(4)])
    history.end_turn()  # three steps say nothing
    assert len(history.samples) == 3
    history.add([record(n, 1000 + n) for n in range(8)])  # seven tokens are no point of the chart either
    assert [context for context, _ in history.speeds()] == [32 + 64 * n for n in range(7)]
    assert history.token_gb_s == pytest.approx(sum(history.samples) / 3)


def _answering() -> LiveMetrics:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.submitted()
    metrics.take([Prefill(1, 19, 19, 0)])
    metrics.take([delta_of([record(n, 20 + n) for n in range(200)])])
    metrics.set_context(219)
    return metrics


def test_the_running_turn_is_a_live_row() -> None:
    metrics = _answering()
    section = TurnsSection(metrics)
    row = section.lines(metrics, 60, 5)[1].plain
    assert row.split()[:4] == ["●", "1", "20", "0"]
    assert "200" in row
    before = section.change_key(metrics)
    metrics.take([delta_of([record(200, 220)])])
    assert section.change_key(metrics) != before
    metrics.take([Done(1, Finished("stop", summary(20, 0, 201)))])
    rows = section.lines(metrics, 60, 5)
    assert len(rows) == 2
    assert "●" not in rows[1].plain


def test_the_time_until_the_context_is_full_is_shown() -> None:
    metrics = _answering()
    lines = [line.plain for line in ContextSection(metrics).lines(metrics, 50, 6)]
    assert lines[-1].startswith(f"{512 - 219} more until full")
    here = COST.step_bytes(219)
    limit = COST.step_bytes(511)
    expected = (512 - 219) * (here + limit) / 2 / ((metrics.history.token_gb_s or 0) * 1e9)
    assert seconds_until_full(metrics) == pytest.approx(expected)
    assert re.search(r"about \d+ s of decoding$", lines[-1].rstrip())


def test_accepted_drafts_shorten_the_time_until_the_context_is_full() -> None:
    """As many tokens a step as there were: four, each of which the steps alone would have taken four times as long."""
    plain = _answering()
    guessed = LiveMetrics()
    guessed.ready(*facts(CARD))
    guessed.submitted()
    guessed.take([delta_of([replace(record(n, 20 + n), proposed=3, accepted=3) for n in range(200)])])
    guessed.set_context(219)
    assert (seconds_until_full(guessed) or 0) == pytest.approx((seconds_until_full(plain) or 0) / 4)
    rate = guessed.history.token_gb_s or 0
    peak = guessed.machine.measured_gb_s or 0
    assert expected_rate(COST, rate, 120) == pytest.approx(guessed.rate_average, rel=0.05)
    chart = context_chart(COST, peak, 4 * peak, [], 512, 40, 8)  # beyond the roofline, and on the chart
    assert any(cell not in " ⠁⠂⠄⡀⠈⠐⠠⢀" for line in chart[:2] for cell in line.plain.partition("│")[2])


def test_the_legend_leaves_out_what_does_not_fit() -> None:
    metrics = _answering()
    section = ContextSpeedSection(metrics)
    assert section.lines(metrics, 60, 7)[-1].plain.endswith("• measured")
    assert section.lines(metrics, 40, 7)[-1].plain.rstrip().endswith("one token a step")
    assert section.lines(metrics, 24, 7)[-1].plain.rstrip().endswith("expected")


def test_the_contexts_legend_is_in_the_order_of_its_bar() -> None:
    """All parts stand in the legend if they fit; a narrower view has the largest."""
    metrics = _answering()
    assert [name for name, tokens in origins(metrics) if tokens] == ["new", "output"]
    section = ContextSection(metrics)
    assert section.lines(metrics, 60, 8)[2].plain == "█ new 20  █ output 199"
    assert section.lines(metrics, 18, 8)[2].plain == "█new 20 █out 199"
    assert section.lines(metrics, 14, 8)[2].plain == "█out 199"

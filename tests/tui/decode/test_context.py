"""The context section: tokens by origin, the next turn's reuse, and the reason for a miss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.app.answer.prompt_reuse import PromptReuse
from headrace.app.engine.events import Done, Prefill, PrefixCached
from headrace.app.tui.decode.context import ContextSection, _bar, origins
from headrace.app.tui.metrics.facts import facts
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.models.text.prefix_difference import PrefixDifference
from headrace.runtime.engine.request import Finished
from headrace.runtime.metrics.cost import LayerKV
from tests.support.deltas import delta_of
from tests.support.scripted_engine import CARD, Script, ScriptedEngine, record, summary
from tests.tui.conftest import Driver

DIFFERENCE = PrefixDifference(12, "You are a ", "kind\nhelper", "terse \x1b[31mone", "kind", "terse")


def loaded() -> LiveMetrics:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    return metrics


def lines_of(metrics: LiveMetrics, width: int = 60, height: int = 9) -> list[str]:
    return [line.plain for line in ContextSection(metrics).lines(metrics, width, height)]


def answered() -> LiveMetrics:
    """Return the metrics of a turn: 20 tokens cached, 10 prefetched, 15 new, 40 of output."""
    metrics = loaded()
    metrics.submitted()
    metrics.take([Prefill(1, 14, 14, 30, reuse=PromptReuse(30, prefetched=10))])
    metrics.take([delta_of([record(n, 45 + n) for n in range(40)])])
    metrics.set_context(84)
    metrics.take([Done(1, Finished("stop", summary(45, 30, 40)))])
    return metrics


def test_tokens_of_the_context_are_counted_by_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = answered()
    assert lines_of(metrics)[2] == "█ cached 20  █ prefetched 10  █ new 15  █ output 39"  # in four colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert origins(metrics) == [("cached", 20), ("prefetched", 10), ("new", 15), ("output", 39), ("template", 0)]
    lines = lines_of(metrics)
    assert lines[0].startswith("84 of 512 tokens")
    assert lines[2] == "█ cached 20  ▓ prefetched 10  ▒ new 15  ░ output 39"
    assert lines[3].rstrip() == "next turn reuses 84"
    assert lines_of(metrics, 34)[2] == "█cached 20 ▓pre 10 ▒new 15 ░out 39"
    assert lines_of(metrics, 33)[2] == "░out 39 █cached 20 + 2 more 25"
    assert lines_of(metrics, 20)[2] == "░out 39 + 3 more 45"
    metrics.set_context(120)  # typed, not prefetched yet
    assert origins(metrics)[-2:] == [("output", 40), ("not cached", 35)]
    assert lines_of(metrics)[3].rstrip() == "next turn reuses 84 of 120"
    metrics.take([PrefixCached(118, 1, 1, PromptReuse(84), 3)])
    line = lines_of(metrics)[3]
    assert line.startswith("next turn reuses 118")
    assert line.endswith("3 blocks shared with others")


def test_the_context_line_names_tokens_read_once_an_indexer_leaves_some_out() -> None:
    metrics = answered()
    assert metrics.model.cost is not None
    indexed = [LayerKV(2, 100, window=8), LayerKV(2, 100, chosen=64)]
    metrics.model = replace(metrics.model, cost=replace(metrics.model.cost, kv=indexed))
    assert lines_of(metrics)[4].endswith("; a step reads 64 tokens")
    assert lines_of(metrics, 40)[4].endswith("held; a step reads 64 tokens")
    metrics.set_context(60)
    assert "a step reads" not in lines_of(metrics)[4]


@pytest.mark.parametrize(
    ("context", "limit", "filled"),
    [
        (84, 512, "██▓▓▒░░░░░"),  # 84 of 512 tokens fill 10 of 60 cells
        (84, 8192, "█▓▒░"),
        (84, 84, "██████████████▓▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒▒▒░░░░░░░░░░░░░░░░░░░░░░░░░░░░"),
        (84, 0, "██████████████▓▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒▒▒░░░░░░░░░░░░░░░░░░░░░░░░░░░░"),
        (0, 512, ""),
    ],
)
def test_the_bar_of_the_context_is_full_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, context: int, limit: int, filled: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")  # a pattern a part
    metrics = answered()
    metrics.model = replace(metrics.model, context_limit=limit)
    metrics.set_context(context)
    assert lines_of(metrics)[1] == filled.ljust(60, "─")


def test_small_parts_do_not_lengthen_the_bar() -> None:
    parts = [("cached", 3703), ("new", 20), ("output", 64), ("template", 8)]
    assert _bar(parts, 8192, 41).plain == "█" * 18 + "·" + "─" * 22  # 46 % of 41 cells


def test_the_context_of_a_reopened_session_counts_cached_tokens() -> None:
    metrics = loaded()
    metrics.set_context(100)
    assert origins(metrics) == [("cached", 0), ("not cached", 100)]
    metrics.take([PrefixCached(99, 1, 1)])
    assert origins(metrics) == [("cached", 99), ("template", 1)]


@given(
    st.tuples(*[st.integers(0, 300)] * 4),
    st.integers(0, 40),
    st.integers(0, 700),
    st.booleans(),
    st.integers(4, 80),
    st.integers(1, 12),
    st.sampled_from([None, PromptReuse(1, difference=DIFFERENCE), PromptReuse(1, dropped=9)]),
)
def test_parts_of_the_context_sum_to_it_and_fit_any_window(
    counts: tuple[int, int, int, int], steps: int, context: int, over: bool, width: int, height: int,
    reuse: PromptReuse | None,
) -> None:  # fmt: skip
    metrics = loaded()
    reused, prefetched, done, more = counts
    metrics.submitted()
    metrics.take([Prefill(1, done, done + more, reused, reuse=PromptReuse(reused, prefetched))])
    if steps:
        metrics.take([delta_of([record(n, 20 + n) for n in range(steps)])])
    metrics.set_context(context)
    if over:
        metrics.take([Done(1, Finished("stop", summary(reused + done + 1, reused, steps)))])
    metrics.reuse = reuse
    parts = origins(metrics)
    assert sum(tokens for _, tokens in parts) == context
    assert all(tokens >= 0 for _, tokens in parts)
    lines = ContextSection(metrics).lines(metrics, width, height)
    assert len(lines) <= height
    assert all(line.cell_length <= width for line in lines)
    assert len(lines) < 2 or lines[1].cell_length == width


def test_a_prefix_miss_shows_its_first_token_and_the_text_around_it() -> None:
    metrics = answered()
    metrics.reuse = PromptReuse(12, difference=DIFFERENCE)
    lines = lines_of(metrics, 70)
    assert lines[3] == "miss at token 13: “kind” cached, “terse” now"
    assert lines_of(metrics, 34)[3] == "miss at 13: “kind” → “terse”"
    assert lines[4] == "cached  You are a kind⏎helper"
    assert lines[5] == "prompt  You are a terse ␛[31mone"
    assert [line for line in lines_of(metrics, 70, 6) if "token 13" in line], "one line of it fits into few"
    assert not [line for line in lines_of(metrics, 70, 6) if line.startswith("prompt ")]
    metrics.reuse = PromptReuse(12, dropped=7)
    assert lines_of(metrics)[3] == "7 equal tokens were dropped from the cache"


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 55)], ids=str)
def test_the_reason_of_a_miss_is_on_the_screen(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("one")
        await it.press("f2", "3")
        assert "miss at token 13: “kind” cached" in it.text() or "miss at 13: “kind” → “terse”" in it.text()
        assert "pre 5" in it.text() or "prefetched 5" in it.text()
        it.engine._backlog.append(PrefixCached(24, 24 * 768, 256 * 768, PromptReuse(24), 2))
        if size[1] > 24:  # else the miss has the line
            await it.until(lambda: "next turn reuses 24 of 44" in it.text())
        assert "miss at" in it.text(), "of this turn"
        missed = PrefixDifference(3, "", "a", "b", "a", "b")
        it.engine._backlog.append(PrefixCached(24, 24 * 768, 256 * 768, PromptReuse(3, difference=missed)))
        await it.until(lambda: "“a”" in it.text())

    script = Script(prompt_tokens=40, reused=12, reuse=PromptReuse(12, 5, difference=DIFFERENCE))
    play(scenario, ScriptedEngine().script(script), size=size)

"""Figures on the screen are current, of this session, and the same everywhere."""

from headrace.app.engine.events import Abandoned, Done, PrefixCached, PromptCounted
from headrace.app.tui.decode.context import ContextSection
from headrace.app.tui.decode.latency import LatencySection
from headrace.app.tui.metrics.facts import facts
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.runtime.engine.request import Finished
from headrace.runtime.metrics.units import three_digits
from tests.support.deltas import delta_of
from tests.support.scripted_engine import CARD, LATENCY_S, Script, record, summary
from tests.tui.conftest import Driver


def decoded(steps: int = 300) -> LiveMetrics:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.submitted()
    metrics.take([delta_of([record(n, 20 + n) for n in range(steps)])])
    return metrics


def test_current_figures_are_empty_while_nothing_decodes() -> None:
    metrics = decoded()
    assert metrics.rate_now
    metrics.take([Done(1, Finished("stop", summary(20, 0, 300)))])
    assert metrics.rate_now is None
    metrics.submitted()
    metrics.take([delta_of([record(0, 20)])])  # a first step says how long the prompt took, not how fast decoding is
    assert metrics.rate_now is None


def test_a_finished_answer_has_one_speed() -> None:
    metrics = decoded()
    metrics.take([Done(1, Finished("stop", summary(20, 0, 300)))])
    assert metrics.rate_average == metrics.turns[-1].tokens_per_second == 1 / LATENCY_S


def test_the_end_of_an_older_answer_does_not_end_the_loading_phase() -> None:
    metrics = decoded()
    metrics.loading("loading another", None)
    metrics.take([Abandoned(1)])
    assert metrics.phase == "load"


def test_cached_tokens_are_within_the_limit(play) -> None:
    async def scenario(it: Driver) -> None:
        section = it.app.poller.chat.query_one(ContextSection)  # type: ignore[union-attr]
        metrics = decoded(500)  # of 512 tokens, in blocks of 256
        metrics.model = facts(CARD)[0]
        metrics.fill = type(metrics.fill)(400, metrics.fill.used_bytes, CARD.cost.kv_bytes(768))
        (line,) = [line.plain for line in section.lines(metrics, 60, 9) if " held" in line.plain]
        held, limit = line.split("used, ")[1].split(" held of ")
        assert held == limit

    play(scenario)


def test_the_header_and_the_cache_count_the_tokens_of_the_conversation(play) -> None:
    async def scenario(it: Driver) -> None:
        def counts() -> tuple[str, str]:
            text = it.text()
            header = text.splitlines()[0].split(" / ")[0].split()[-1]
            return header, text.split(" of 512 tokens")[0].split()[-1]

        assert counts()[0] == "0"
        it.engine.script(Script(prompt_tokens=120, hold=2), Script(prompt_tokens=150))
        await it.write("one")
        await it.until(lambda: counts() == ("121", "121"))  # the prompt, and the answer's first token
        it.engine.release()
        await it.idle()
        await it.until(lambda: counts() == ("124", "124"))
        await it.ask("two")
        await it.until(lambda: counts() == ("154", "154"))

        it.state.restart_engine()  # the cache is gone, the conversation is not
        await it.idle()
        await it.until(lambda: counts() == ("154", "154") and "reuses 0 of 154" in it.text())
        await it.until(lambda: it.engine.ahead)
        it.engine._backlog.append(PrefixCached(100, 100 * 768, 256 * 768))  # as far as it got
        await it.until(lambda: counts() == ("154", "154") and "reuses 100 of 154" in it.text())
        it.engine._backlog.append(PromptCounted(it.engine.ahead[-1].id, 156, 448))
        it.engine._backlog.append(PrefixCached(155, 155 * 768, 256 * 768))
        await it.until(lambda: counts() == ("156", "156") and "next turn reuses 155" in it.text())

    play(scenario)


def test_a_new_session_clears_the_step_chart_and_its_subtitle() -> None:
    metrics = decoded()
    section = LatencySection(metrics)
    section.lines(metrics, 60, 9)
    assert section.border_subtitle == "the last 78 of 299 steps"
    metrics.session_changed([])
    assert [line.plain for line in section.lines(metrics, 60, 9)] == ["no steps yet"]
    assert not section.border_subtitle


def test_without_a_model_no_cache_is_shown() -> None:
    metrics = LiveMetrics()
    assert [line.plain for line in ContextSection(metrics).lines(metrics, 60, 4)] == ["no model yet"]


def test_turns_and_speed_are_those_of_the_session(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("one")
        first = it.state.conversation.session
        speed = f"{three_digits(1 / LATENCY_S)} tok/s"
        await it.until(lambda: len(it.state.metrics.turns) == 1 and speed in it.text())
        await it.write("/new")
        await it.until(lambda: it.state.metrics.turns == [])
        await it.until(lambda: "● loaded" in it.text() and speed not in it.text())
        await it.ask("two")
        assert [turn.number for turn in it.state.metrics.turns] == [1]
        it.state.open_session(it.state.store.session(first.id))
        await it.until(lambda: [turn.completion_tokens for turn in it.state.metrics.turns] == [4])

    play(scenario)

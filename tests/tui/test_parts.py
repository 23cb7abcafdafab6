"""The parts that know no screen: growing Markdown, braille, metrics, commands, paths, parameters."""

import pickle
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from textual.content import Content
from textual.highlight import HighlightTheme, highlight
from textual.markup import parse_style

from headrace.app.answer.prompt_reuse import PromptReuse
from headrace.app.chat.attachments import take_attachments
from headrace.app.chat.commands import COMMANDS, Invocation, matching, parse_command, unknown_command
from headrace.app.chat.parameters import PARAMETERS, read_parameter, write_parameter
from headrace.app.engine.events import Died, Done, Prefill
from headrace.app.sessions.records import Message
from headrace.app.tui.decode.drawing import Canvas, bars
from headrace.app.tui.decode.latency import LatencySection
from headrace.app.tui.decode.meters import MeterLines, state, whole_why
from headrace.app.tui.decode.tables import TurnsSection
from headrace.app.tui.input.completion import as_typed, completions, typed_path
from headrace.app.tui.metrics.facts import facts
from headrace.app.tui.metrics.figures import decode_point, prefill_point
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.screens.message_actions import code_blocks, web_addresses
from headrace.app.tui.transcript import code_theme
from headrace.app.tui.transcript.code_theme import AnsiDarkCodeTheme, AnsiLightCodeTheme, CodeTheme, coloured
from headrace.app.tui.transcript.entry import Entry, LayoutOptions, MessageState
from headrace.app.tui.transcript.growing_markdown import GrowingMarkdown
from headrace.app.tui.transcript.markdown_lines import render
from headrace.app.tui.widgets.status_bar import Status, StatusBar
from headrace.runtime.engine.request import Finished
from headrace.runtime.errors import UsageError
from headrace.runtime.machine.machine_load import MachineLoad
from headrace.runtime.metrics.units import format_seconds, three_digits
from tests.support.deltas import delta, delta_of
from tests.support.scripted_engine import CARD, record, summary
from tests.support.summaries import make_summary
from tests.tui.conftest import Driver

BLOCKS = st.sampled_from(
    ["A paragraph of words.", "# Title", "- one\n- two", "1. a\n2. b", "> quote", "```py\nx = 1\n\ny = 2\n```", "---"]
)


@given(st.lists(BLOCKS, max_size=8), st.integers(1, 30))
def test_growing_markdown_ends_like_complete_markdown(blocks: list[str], cut: int) -> None:
    source = "\n\n".join(blocks)
    growing = GrowingMarkdown()
    for start in range(0, len(source), cut):
        growing.append(source[start : start + cut])
        growing.lines(50)
    whole = [line.plain.rstrip() for line in GrowingMarkdown(source).lines(50)]
    assert [line.plain.rstrip() for line in growing.lines(50)] == whole


@example(["Note:\n", "***", "very important*** indeed"])
@example(["Tags:\n", "#", "python"])
@example(["Use\n", "```", "x = 1``` to set"])
@example(["> more\nlazy\n", "*", "*bold**"])
@example(["1\n>", "\n", "1\n"])
@example(["words\n| x |\n|-", "--|\nand on"])
@given(st.lists(st.text("ab *_#`->1.=|~:\n", min_size=1, max_size=8), max_size=12))
def test_growing_markdown_corrects_blocks_that_turn_out_otherwise(pieces: list[str]) -> None:
    growing = GrowingMarkdown()
    for piece in pieces:
        growing.append(piece)
        growing.lines(50)
    whole = [line.plain.rstrip() for line in GrowingMarkdown("".join(pieces)).lines(50)]
    assert [line.plain.rstrip() for line in growing.lines(50)] == whole


@pytest.mark.parametrize(
    "text",
    [
        r"The area is \( a_1 * b_2 * \, c \) here.",
        "\\[ x_1 = \\frac{1}{2} \\\\\ny_2 = \\{ 3 \\} \\]",
        r"still open: \[ x",
        r"\] and \) alone",
    ],
)
def test_formulas_keep_their_backslashes(text: str) -> None:
    assert "\n".join(line.plain for line in render(text, 60)) == text


def test_other_escapes_and_emphasis_are_markdown() -> None:
    (line,) = render(r"\*a\* \# \( x \) *b*", 60)
    assert line.plain == r"*a* # \( x \) b"


@given(st.lists(BLOCKS, max_size=8), st.integers(1, 30))
def test_growing_markdown_reuses_the_objects_of_unchanged_lines(blocks: list[str], cut: int) -> None:
    source = "\n\n".join(blocks)
    growing = GrowingMarkdown()
    before = list[Content]()
    for start in range(0, len(source), cut):
        growing.append(source[start : start + cut])
        after = growing.lines(50)
        assert all(new is old for old, new in zip(before, after, strict=False) if new.is_same(old))
        before = after


def test_an_unfinished_block_only_is_laid_out_again() -> None:
    growing = GrowingMarkdown("first\n\nsecond\n\nthi")
    before = growing.lines(40)
    growing.append("rd")
    after = growing.lines(40)
    assert [a is b for a, b in zip(before, after, strict=True)][:3] == [True, True, True]
    assert after[-1].plain == "third"
    assert [line.plain for line in growing.lines(20)] == ["first", "", "second", "", "third"]


LINES = [
    "- a b\n",
    "- **c**\n",
    "  more\n",
    "\n",
    "  - in it\n",
    "7. d\n",
    "2) e\n",
    "    f\n",
    "```\n",
    "x y\n",
    "- ",
    "-",
]
ITEMS = st.lists(st.sampled_from(LINES), max_size=14)


@example(["- a b\n", "- **c**\n", "\n", "- a b\n", "x y\n"], 1)
@example(["7. d\n", "7. d\n", "7. d\n", "\n", "    f\n"], 3)
@example(["- a b\n", "- a b\n", "-", "- "], 1)
@example(["- a b\n", "- ", "- a b\n", "\n", "- "], 1)
@given(ITEMS, st.integers(1, 9))
def test_a_growing_list_is_drawn_like_a_complete_one(items: list[str], cut: int) -> None:
    source = "".join(items)
    growing = GrowingMarkdown()
    for start in range(0, len(source), cut):
        growing.append(source[start : start + cut])
        growing.lines(50)
    growing.highlight_code()
    whole = render(source, 50)
    grown = growing.lines(50)
    assert [line.plain for line in grown] == [line.plain for line in whole]
    assert all(old.is_same(new) for old, new in zip(grown, whole, strict=True))
    assert [line.plain for line in growing.lines(9)] == [line.plain for line in render(source, 9)]


@pytest.mark.parametrize("language", ["perl", "python", "c++", "html", "no such language", "text"])
def test_code_has_the_colours_of_textual(language: str) -> None:
    code = "def f(x):  # a\n    return 's' + 1\n\nmy $x = <b>q{a}</b>;\n"
    ours = coloured(code, language, CodeTheme)
    theirs = highlight(code, language=language, theme=CodeTheme)
    assert ours.plain == theirs.plain
    assert ours.is_same(theirs)


def test_code_with_a_slow_lexer_is_shown_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_theme, "_LONGEST_S", -1.0)
    code = "my $x = 1;\n" * 9
    shown = coloured(code, "perl", CodeTheme)
    assert shown.plain == code.rstrip("\n")
    assert len(shown.spans) < 5


def test_growing_code_is_highlighted_once_complete() -> None:
    source = "```python\ndef one():\n    return 1\n\n\ndef two(): # the second"
    growing = GrowingMarkdown()
    looks = []
    for letter in source:
        growing.append(letter)
        looks.append([line.plain for line in growing.lines(40)])
    assert looks[-1] == [line.plain for line in render(source, 40)]
    assert not growing.lines(40)[-1].is_same(render(source, 40)[-1])
    assert growing.highlight_code()
    assert all(old.is_same(new) for old, new in zip(growing.lines(40), render(source, 40), strict=True))
    assert not growing.highlight_code()
    growing.append("\n```\n\nDone.")
    assert [line.plain for line in growing.lines(40)][-2:] == ["", "Done."]


def plain(source: str, width: int = 60) -> list[str]:
    return [line.plain.rstrip() for line in render(source, width)]


def test_markdown_keeps_line_breaks() -> None:
    assert plain("a\nb") == ["a", "b"]


def test_a_link_shows_its_whole_address() -> None:
    assert plain("a [x *y*](http://z/ä) b") == ["a x y ⟨http://z/%C3%A4⟩ b"]
    assert plain("[http://bank.example](http://evil.example)") == ["http://bank.example ⟨http://evil.example⟩"]
    assert plain("<http://z> http://y") == ["http://z http://y"]  # written out: once
    assert plain("![alt](http://z/i.png)") == ["▨ alt ⟨http://z/i.png⟩"]


@pytest.mark.parametrize("source", ["[x](javascript:alert(1))", "[x](file:///etc/passwd)", "<mailto:a@b>", "[x](/y)"])
def test_links_without_a_web_address_are_shown_as_written(source: str) -> None:
    assert plain(source) == [source]
    assert web_addresses(source) == []


def test_web_addresses_of_a_message_are_found_once() -> None:
    source = "[a](https://a.b/c?d=1) see https://e.f/g. and **<http://h>**, `https://code` ![i](http://j) https://e.f/g"
    assert web_addresses(source) == ["https://a.b/c?d=1", "https://e.f/g", "http://h", "http://j"]


def test_markdown_tasks_are_drawn_with_checkboxes() -> None:
    assert plain("- [ ] to do\n- [x] done\n  - [X] inside\n- [ ]x") == ["☐ to do", "☑ done", "  ☑ inside", "• [ ]x"]
    assert plain("1. [ ] numbered") == ["1. [ ] numbered"]


def test_columns_are_aligned_as_in_the_table_head() -> None:
    lines = plain("|a|b|c|\n|-|:-:|--:|\n|1|2|3|\n|four|fives|sixes|")
    assert lines == ["a    │   b   │     c", "─────┼───────┼──────", "1    │   2   │     3", "four │ fives │ sixes"]


def test_code_lines_too_long_are_folded_not_lost() -> None:
    code = "x" * 90
    lines = [line.plain.removeprefix("▏ ") for line in render(f"```\n{code}\n```", 40)]
    assert "".join(lines) == code


@pytest.mark.parametrize("look", [{}, {"ansi": True}, {"ansi": True, "dark": False}])
def test_unknown_syntax_is_not_marked_as_an_error(look: dict[str, bool]) -> None:
    lines = render("```python\nname = ```js\n```", 40, **look)
    assert lines[-1].plain == "▏ name = ```js"
    assert not any("red" in str(span.style) or "error" in str(span.style) for span in lines[-1].spans)


@pytest.mark.parametrize("theme", [AnsiDarkCodeTheme, AnsiLightCodeTheme])
def test_styles_of_the_terminal_code_themes_can_be_parsed(theme: type[HighlightTheme]) -> None:
    for style in theme.STYLES.values():
        parse_style(style)


def test_bars_have_a_zero_baseline() -> None:
    assert bars([0.0, 4.0, 8.0, 8.0], top=8.0, width=2, height=2) == [" ⣿", "⢸⣿"]
    assert bars([1e-9], top=1.0, width=1, height=1) == ["⢀"]  # above zero shows a dot
    assert bars([99.0, 99.0], top=1.0, width=1, height=1) == ["⣿"]
    assert bars([], top=1.0, width=2, height=1) == ["  "]


def test_canvas_coordinates_start_at_the_lower_left() -> None:
    canvas = Canvas(2, 1)
    canvas.dot(0, 0)
    canvas.dot(3, 3)
    canvas.dot(9, 9)  # outside
    assert canvas.rows() == ["⡀⠈"]


def _metrics(steps: int = 30) -> LiveMetrics:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.submitted()
    metrics.take([delta_of([record(n, 20 + n) for n in range(steps)])])
    return metrics


def test_metrics_follow_the_definitions() -> None:
    metrics = _metrics()
    later = [step.latency_s for step in metrics.answer.records if step.index > 0]
    assert metrics.rate_average == pytest.approx(len(later) / sum(later))
    assert metrics.mbu == pytest.approx((metrics.achieved_gb_s or 0) / 54.0)
    assert LiveMetrics().rate_now is None
    assert LiveMetrics().mbu is None


def test_parts_of_a_time_to_first_token_are_listed_by_length() -> None:
    """In the order of their lengths, as many as fit; while the answer runs, its prefill is what remains."""
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.take([Prefill(1, 0, 37, 0, 0.976, 0.004), delta(1, "", [replace(record(0, 38), latency_s=0.01)])])
    metrics.take([delta(1, "Hi", [], ttft_s=1.05)])
    assert state(metrics, 80).plain.endswith("  first token 1.05 s")
    assert "First token after 1.05 s: 37 computed, wait 976 ms, prefill 60.0 ms" in whole_why(metrics)
    ended = replace(summary(38, 8, 30), ttft_s=0.98, queue_s=0.1, tokenize_s=0.2, prefill_s=0.6, first_step_s=0.05)
    metrics.take([Done(1, Finished("stop", ended))])
    shown = (
        "First token after 980 ms: 8 prompt tokens cached, 29 computed, prefill 600 ms, tokenize 200 ms, wait 100 ms"
    )
    assert f"{shown}, first step 50.0 ms, rest 30.0 ms." in whole_why(metrics)
    metrics.take([Done(1, Finished("cancelled", replace(ended, ttft_s=None)))])
    assert "first token" not in state(metrics, 80).plain


def test_prefill_time_is_the_same_during_decoding_and_at_the_end() -> None:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.submitted()
    metrics.take([Prefill(1, 37, 37, 0, 0.1, 0.2, prefill_s=0.6)])
    metrics.take([delta(1, "Hi", [replace(record(0, 38), latency_s=0.05)], ttft_s=0.98)])
    during = metrics.first_token
    metrics.take(
        [
            Done(
                1,
                Finished(
                    "stop",
                    replace(
                        summary(38, 0, 30), ttft_s=0.98, queue_s=0.1, tokenize_s=0.2, prefill_s=0.6, first_step_s=0.05
                    ),
                ),
            )
        ]
    )
    assert during is not None
    assert dict(during.parts()) == pytest.approx(dict(metrics.first_token.parts()))  # type: ignore[union-attr]


def test_mbu_is_of_the_latest_reading_and_as_stored_at_the_end() -> None:
    metrics = _metrics()
    metrics.machine = replace(metrics.machine, memory_gb_s=27.0)
    assert metrics.mbu == pytest.approx((metrics.achieved_gb_s or 0) / 27.0)
    metrics.take([Done(1, Finished("stop", make_summary(mbu=0.42)))])
    assert (metrics.mbu, metrics.mbu_average, metrics.turns[-1].mbu) == (0.42, 0.42, 0.42)


def test_other_load_hides_mbu() -> None:
    metrics = _metrics()
    busy = MachineLoad(2, 2.0, 1.0, memory_used=0, memory_total=1, swap_used=0)
    metrics.set_load(busy)
    assert not metrics.busy  # one look may be a program that starts
    metrics.set_load(busy)
    assert (metrics.busy, metrics.mbu, metrics.mbu_average) == (True, None, None)
    for lines in (MeterLines(metrics), TurnsSection(metrics)):
        assert "busy" in "".join(line.plain for line in lines.lines(metrics, 80, 8))
    metrics.take([Done(1, Finished("stop", make_summary(mbu=0.42)))])
    assert (metrics.busy, metrics.mbu) == (False, 0.42)
    metrics.submitted()
    metrics.take([delta_of([record(n, 20 + n) for n in range(9)])])
    metrics.take([Done(1, Finished("stop", replace(make_summary(mbu=None), busy=True)))])
    metrics.set_load(MachineLoad(2, 1.0, 1.0, memory_used=0, memory_total=1, swap_used=0))
    assert (metrics.busy, metrics.mbu, metrics.mbu_average) == (True, None, None)


def test_a_frozen_copy_of_metrics_does_not_change() -> None:
    metrics = _metrics()
    metrics.take([delta(1, "word", [record(30, 50)])])
    frozen = metrics.frozen()
    metrics.take([delta_of([record(31, 51)])])
    metrics.take([Done(1, Finished("stop", summary(20, 5, 31)))])
    assert len(frozen.answer.records) == 31
    assert frozen.answer.records[0] is metrics.answer.records[0]  # nothing in a record changes
    assert frozen.texts[0] is metrics.texts[0]
    assert not frozen.turns
    assert frozen.phase == "decode"
    assert metrics.turns[0].reused_tokens == 5


_BUSY = MachineLoad(2, 2.0, 1.0, memory_used=0, memory_total=1, swap_used=0)


def _states(metrics: LiveMetrics) -> dict[str, bytes]:
    """Return the content of every attribute."""
    return {name: pickle.dumps(value) for name, value in vars(metrics).items()}


def _differing(one: dict[str, bytes], other: dict[str, bytes]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def _whole_turn(metrics: LiveMetrics) -> None:
    """Feed an answer with all that a turn has, and looks at a busy machine."""
    metrics.take([Prefill(1, 0, 14, 6, waited_s=0.1, reuse=PromptReuse(6, prefetched=2))])
    metrics.take([delta(1, "word", [record(n, 20 + n) for n in range(9)], ttft_s=0.5)])
    for _ in range(2):
        metrics.set_load(_BUSY)
        metrics.take([delta(1, "word", [record(9, 29)])])
    ended = replace(make_summary(mbu=0.42), prefill_tokens=64, prefill_s=0.5)  # long enough to be measured
    metrics.take([Done(1, Finished("stop", ended))])


def test_later_events_do_not_change_the_state_of_a_frozen_copy() -> None:
    metrics = _metrics()
    metrics.set_load(MachineLoad(2, 1.0, 1.0, memory_used=0, memory_total=1, swap_used=0))
    metrics.take([delta_of([record(30, 50)])])
    frozen = metrics.frozen()
    before = _states(frozen)
    for step in (31, 32):
        metrics.take([delta_of([replace(record(step, 20 + step), latency_s=0.6)])])  # a point of the trail
        metrics.set_load(_BUSY)
    _whole_turn(metrics)
    assert not _differing(before, _states(frozen))


def test_a_new_turn_resets_all_metrics_but_machine_model_and_prompt() -> None:
    fresh = LiveMetrics()
    used = LiveMetrics()
    for metrics in (fresh, used):
        metrics.ready(*facts(CARD))
    _whole_turn(used)
    for metrics in (fresh, used):
        metrics.submitted()
    assert _differing(_states(fresh), _states(used)) == {
        "version", "_prefill", "reuse", "fill", "history", "turns", "prefill", "load", "_contended_samples",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "mark", "cause"),
    [
        ({}, "?", "unknown cause"),
        ({"fed": 128}, "P", "prefill of another sequence"),
        ({"gc_s": 0.15}, "C", "garbage collection"),
        ({"kv_allocated_bytes": 1 << 40, "active_memory_bytes": 1 << 40}, "G", "growth of the KV cache"),
    ],
)
def test_a_stall_is_marked_with_its_cause(change: dict[str, float], mark: str, cause: str) -> None:
    metrics = _metrics()
    metrics.take([delta_of([replace(record(30, 50), latency_s=0.2, **change)])])  # type: ignore[arg-type]
    lines = [line.plain for line in LatencySection(metrics).lines(metrics, 60, 10)]
    assert lines[0].rstrip().endswith(mark)
    assert lines[-1] == f"{mark} 1x {cause}"


def test_a_stall_is_attributed_to_other_programs() -> None:
    metrics = _metrics()
    metrics.set_load(MachineLoad(2, 1.0, 1.0, memory_used=0, memory_total=1, swap_used=0))
    metrics.take([delta_of([replace(record(30, 50), latency_s=0.2), record(31, 51)])])
    metrics.set_load(MachineLoad(2, 2.0, 1.0, memory_used=0, memory_total=1, swap_used=0))
    metrics.take([delta_of([replace(record(32, 52), latency_s=0.2)])])
    lines = [line.plain for line in LatencySection(metrics).lines(metrics, 60, 10)]
    assert lines[-1] == "O 1x other programs ? 1x unknown cause"


def test_the_roofline_points_lie_under_the_roof() -> None:
    metrics = _metrics()
    metrics.take([Done(1, Finished("stop", summary(200, 0, 30)))])
    point = decode_point(metrics.totals)
    assert point is not None
    assert point.flops <= 54e9 * point.intensity
    prefill = prefill_point(metrics.prefill)
    assert prefill is not None
    assert prefill.intensity > point.intensity


@pytest.mark.parametrize(("rate", "text"), [(None, "–"), (9.836, "9.84"), (96.1, "96.1"), (211.7, "212")])
def test_rates_have_three_digits(rate: float | None, text: str) -> None:
    assert three_digits(rate) == text


def test_times_have_a_suitable_unit() -> None:
    assert [format_seconds(value) for value in (None, 0.0042, 0.42, 4.2)] == ["–", "4.2 ms", "420 ms", "4.20 s"]


def test_phases_have_different_symbols_without_colour() -> None:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    assert state(metrics, 80).plain == "● idle      loaded in 0.20 s  a step reads 93.5 MiB of weights"
    metrics.submitted()
    assert state(metrics, 60).plain == "◌ prefill"
    metrics.take([Died("")])
    assert state(metrics, 60).plain.startswith("✗")


def test_every_slash_command_has_an_action_in_the_chat(play) -> None:
    async def scenario(it: Driver) -> None:
        chat = it.app.poller.chat
        assert chat is not None
        assert {command.name for command in COMMANDS} == set(chat.actions.commands)

    play(scenario)


@pytest.mark.parametrize(
    ("room", "shown"),
    [
        (60, "▚ headrace  smollm2-135m  Why is the sky blue?"),
        (40, "▚ headrace  smollm2-135m  Why is the sk…"),
        (34, "▚ headrace  smollm2-135m"),
        (20, "▚  smollm2-135m"),
        (10, "▚  smollm…"),
    ],
)
def test_a_narrow_status_line_drops_the_least_important_parts(room: int, shown: str) -> None:
    bar = StatusBar(LiveMetrics())
    bar._status = Status("smollm2-135m", "Why is the sky blue?")
    assert bar._left(room).plain == shown


def test_commands_and_messages_are_distinguished() -> None:
    assert parse_command("/set temperature 1").rest == "temperature 1"  # type: ignore[union-attr]
    assert parse_command("/nope").command is None  # type: ignore[union-attr]
    for text in ("hello", "//quit", "/etc/hosts is empty", "/usr", "a /quit", "/?!", "/quit\nnow"):
        invocation = parse_command(text)
        assert invocation is None or invocation.command is None
    assert [command.name for command in matching("re")][:3] == ["regen", "rename", "restart"]


def test_commands_are_found_by_their_aliases() -> None:
    names = [name for command in COMMANDS for name in command.names]
    assert len(names) == len(set(names))
    for command in COMMANDS:
        for name in command.names:
            invocation = parse_command(f"/{name}")
            assert invocation is not None
            assert invocation.command is command
            assert matching(name)[0] is command
    assert [command.name for command in matching("exi")] == ["quit"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("undo", "/delete removes the last message, /edit changes it"),
        ("theme", "Ctrl+P"),
        ("history", "/sessions"),
        ("save", "/export"),
        ("load", "/model"),
        ("show", "/system"),
        ("seting", "did you mean /settings?"),
        ("modle", "did you mean /model?"),
        ("frobnicate", "/help lists the commands"),
    ],
)
def test_an_unknown_command_has_a_hint(name: str, hint: str) -> None:
    assert parse_command(f"/{name}") == Invocation(name, "", None)
    error = unknown_command(name)
    assert str(error) == f"/{name}: unknown command"
    assert error.hint is not None
    assert hint in error.hint
    for named in re.findall(r"/(\w+)", error.hint):
        invocation = parse_command(f"/{named}")
        assert invocation is not None
        assert invocation.command is not None


def test_paths_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "data.csv").touch()
    (tmp_path / ".hidden").touch()
    assert completions("d") == ["docs/", "data.csv"]
    assert completions(".h") == [".hidden"]
    assert completions("nowhere/x") == []
    assert typed_path("see @da") == "da"
    assert typed_path("mail a@b") is None
    assert typed_path("/file do") == "do"
    assert typed_path("hello\n/file my do") == "my do"
    assert typed_path("/file notes.txt\n") is None
    assert completions("~nobody-has-this-name/x") == []


@pytest.mark.parametrize("before", ["see @my", 'see @"my', "/file my", '/file "my f', "hello\n/file my f"])
def test_a_path_with_spaces_is_completed_in_quotes(before: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my folder").mkdir()
    (tmp_path / "my folder" / "a b.txt").write_text("found")
    for expected in ('"my folder/', '"my folder/a b.txt" '):
        typed = typed_path(before)
        assert typed is not None
        (found,) = completions(typed)
        assert as_typed(found, typed) == expected
        before = before.removesuffix(typed) + expected
    assert [attachment.text for attachment in take_attachments(before)[1]] == ["found"]


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_parameters_are_read_as_written(parameter) -> None:
    text = {"stop": "END | \\n", "temperature": "0.7", "thinking": "off", "speculate": "off"}.get(parameter.name, "1")
    value = read_parameter(parameter.name, text)
    assert read_parameter(parameter.name, write_parameter(parameter.name, {parameter.name: value})) == value
    assert read_parameter(parameter.name, "default") is None
    if parameter.name != "stop":
        with pytest.raises(UsageError, match=parameter.name):
            read_parameter(parameter.name, "warm")
        with pytest.raises(UsageError, match=parameter.name):
            read_parameter(parameter.name, "nan")


def test_code_blocks_are_found() -> None:
    assert code_blocks("a\n\n```py\nx\n```\n\nb\n\n~~~\ny\n~~~\n") == ["x\n", "y\n"]


def test_an_entry_shows_text_that_was_appended() -> None:
    message = Message(1, "s", None, "assistant", "half", 0.0, partial=True)
    entry = Entry(message, MessageState(growing=True))
    look = LayoutOptions(40)
    assert entry.rows(look)[0][0].plain == "half▍"
    grown = Message(1, "s", None, "assistant", "half and\n\nwhole \x1b[1m", 0.0, finish_reason="stop")
    assert entry.update(grown, MessageState())
    assert [content.plain for content, _ in entry.rows(look)][:3] == ["half and", "", "whole ␛[1m"]


def test_lines_of_a_message_that_fit_are_not_wrapped_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["All work and no play.", "", " \t日本", "x" * 18]
    message = Message(1, "s", None, "user", "\n".join([*lines, "y" * 19]), 0.0)
    wrapped: list[str] = []
    wrap = Content.wrap

    def watched(line: Content, width: int) -> list[Content]:
        wrapped.append(line.plain)
        return wrap(line, width)

    monkeypatch.setattr(Content, "wrap", watched)
    rows = [row.plain for row, _ in Entry(message, MessageState()).rows(LayoutOptions(20))]
    assert rows[:6] == ["❯ All work and no", "  play.", "  ", "      日本", f"  {'x' * 18}", f"  {'y' * 18}"]
    assert wrapped == ["All work and no play.", "y" * 19]

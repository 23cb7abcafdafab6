"""Workloads with and without speculation: counts, lines and changed tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.app.bench.compare import checked
from headrace.app.bench.measure import pair as measuring
from headrace.app.bench.measure.document import identity
from headrace.app.bench.measure.pair import WorkloadPrompt, measure_pair, questions
from headrace.app.bench.measure.plan import Test, plan_speculation
from headrace.app.bench.measure.records import DraftCost, RunCosts
from headrace.app.bench.measure.records import Result as Entry
from headrace.app.bench.measure.result import result
from headrace.app.bench.measure.run_cost import DRAFT_LENGTHS, break_even, run_costs, tokens_per_step
from headrace.app.bench.measure.sample import Answered, Pair, Repetition, Sample
from headrace.app.bench.measure.setup import EngineSetup
from headrace.app.bench.measure.workloads import chosen_workloads
from headrace.app.bench.show import formats
from headrace.app.bench.show.columns import results_table
from headrace.app.bench.show.terminal_views import show_run
from headrace.app.cli.bench.command import bench
from headrace.app.verify.expectation import Expectation
from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import EngineError, UsageError
from tests.support.tiny import load_decoder, write_model
from tests.support.tiny_chat import write_chat_model

PROSE = Test(100, 24, workload="prose")
ASKED = WorkloadPrompt([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], frozenset())


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(write_model(tmp_path_factory.mktemp("pair") / "tiny", "qwen3"))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return write_chat_model(tmp_path / "tiny")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments, catch_exceptions=False, standalone_mode=False)


def test_workloads_are_planned_alone_and_together() -> None:
    tests = plan_speculation(chosen_workloads(["edit", "prose"]), [1, 4])
    assert [test.label for test in tests] == [
        "edit", "prose", "edit t1", "prose t1", "edit x4", "prose x4", "edit t1 x4", "prose t1 x4",
    ]  # fmt: skip
    assert {test.kind for test in tests} == {"workload"}
    assert len(set(tests)) == len(tests)
    with pytest.raises(UsageError, match="--batch"):
        plan_speculation(chosen_workloads([]), [0])


@pytest.mark.sampled
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_and_speculative_answers_are_complete_and_equal(decoder: Decoder, batch: int, temperature: float) -> None:
    engine = Engine(decoder, context_limit=64, keep_prefix=True, max_running=batch)
    test = Test(100, 24, batch=batch, workload="prose", temperature=temperature)
    for turn in (1, 2):
        sample = measure_pair(engine, test, ASKED, turn)
        assert sample.pair is not None
        assert sample.pair.same
        # All but what is said until every sequence has its first token.
        for answered in (sample.pair.on, sample.pair.off):
            assert batch * 12 <= answered.tokens <= batch * 23
            assert answered.seconds > 0
        off = sample.pair.off
        assert (off.proposed, off.accepted, off.tried) == (0, 0, 0)
        assert off.steps == off.tokens
        assert sample.pair.on.steps + sample.pair.on.accepted == sample.pair.on.tokens
    assert not engine.has_work


def test_seeds_differ_by_turn_and_sequence_and_the_order_alternates(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda engine, request: asked.append(request) or submit(engine, request))
    engine = Engine(decoder, context_limit=64, max_running=2)
    for turn in (1, 2):
        measure_pair(engine, Test(100, 12, batch=2, workload="prose", temperature=1.0), ASKED, turn)
    seeds = [request.sampling.seed for request in asked]
    assert seeds[:2] == seeds[2:4]
    assert seeds[4:6] == seeds[6:8]
    assert len(set(seeds)) == 4
    ways = [request.speculate for request in asked[::2]]
    assert ways[0] == ways[3] != ways[1] == ways[2]


def test_answers_of_a_few_tokens_are_an_error(decoder: Decoder) -> None:
    short = WorkloadPrompt(ASKED.prompt, frozenset(range(decoder.vocab_size)))
    with pytest.raises(EngineError, match="too short"):
        measure_pair(Engine(decoder, context_limit=64), PROSE, short, 1)


def answered(tokens: int, seconds: float, steps: int, **guesses: int) -> Answered:
    return Answered(tokens, seconds, steps, **guesses)


def repetition(seconds: float, *, same: bool = True) -> Repetition:
    on = answered(100, seconds, 40, proposed=80, accepted=60, tried=72)
    found = Pair(on, answered(100, 1.0, 100), same, ("ngram",))
    return Repetition(Sample(0.0, None, [seconds / 40] * 40, 1e8, 1e6, prompt_tokens=33, pair=found), 0.0, 40.0)


def entry(*seconds: float, same: bool = True, test: Test = PROSE) -> Entry:
    repetitions = [repetition(one, same=same) for one in seconds]
    setup = EngineSetup("headrace", "tiny", "0", 2, 2)
    return result(test, repetitions, setup=setup, peak_gb_s=50.0, nominal_gb_s=None)


def test_the_figures_of_a_workload_are_paired() -> None:
    found = entry(0.4, 0.5, 0.5)
    assert found.test == "prose"
    assert found.prompt_tokens == 33
    assert found.tokens_per_second.median == 200
    speculation = found.speculation
    assert speculation.plain_tokens_per_second.median == 100
    assert speculation.ratio.median == 2
    assert speculation.ratio.low <= 2 <= speculation.ratio.high
    assert (speculation.proposed, speculation.accepted) == (240, 180)
    assert (speculation.acceptance, speculation.chance) == (0.75, 60 / 72)
    assert (speculation.accepted_per_step, speculation.tokens_per_step) == (1.5, 2.5)
    assert speculation.sources == ["ngram"]
    assert found.roofline_tokens_per_second == pytest.approx(2.5 * 50e9 / 1.01e8)

    repetitions = [Repetition(Sample(0.0, None, [0.1] * 3), 0.0, None)]
    setup = EngineSetup("llama.cpp", "x")
    assert result(Test(0, 4), repetitions, setup=setup, peak_gb_s=None, nominal_gb_s=None).speculation is None


def test_different_output_is_an_error() -> None:
    same = entry(0.5, 0.5)
    other = entry(0.5, 0.5, same=False)
    exact = {"tiny": Expectation(True, 0.0, "native kernels")}
    near = {"tiny": Expectation(False, 0.5, "stock MLX operations: near-ties may flip")}
    assert identity([], exact) is None
    well = identity([same, same], exact)
    assert well is not None
    assert (well.tests, well.same, well.differs, well.broken) == (2, 2, [], [])
    assert formats.identity_line(well) == "speculation changed no token in any of 2 tests"
    broken = identity([same, other], exact)
    assert broken is not None
    assert broken.broken == ["tiny prose"]
    assert ": tiny prose" in formats.identity_line(broken)
    tie = identity([same, other], near)
    assert tie is not None
    assert tie.broken == []
    assert formats.identity_line(tie).endswith("(stock MLX operations: near-ties may flip)")


def test_costs_of_draft_tokens_are_relative_to_a_plain_step(decoder: Decoder) -> None:
    found = run_costs(decoder, depth=16, rounds=1)
    assert found is not None
    assert found.step_ms > 0
    for row in found.guesses:
        assert row.cost == pytest.approx(row.step_ms / found.step_ms)
        assert row.break_even is None or 0 <= row.break_even <= 1
    assert run_costs(object()) is None
    line = formats.break_even_line(RunCosts(256, 15, 1.0, [DraftCost(1, 1.1, 1.1, 0.1), DraftCost(4, 6.0, 6.0, None)]))
    assert line.endswith("1 draft token 1.10x a step, from 10 %; 4 draft tokens 6.00x a step, never")


def test_result_tables_fit_the_width_and_show_the_speedup() -> None:
    from io import StringIO

    from rich.console import Console

    for width in (40, 80, 120):
        text = StringIO()
        Console(width=width, file=text).print(results_table([entry(0.5, 0.5)], width))
        assert "2.00x" in text.getvalue()
        assert max(map(len, text.getvalue().splitlines())) <= width


def test_every_output_format_has_the_workloads(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("-m", str(model), "--speculate", "--workload", "prose", "-r", "1", "--batch", "1,2")
    document = json.loads(run(*arguments, "--json").stdout)
    assert [one["test"] for one in document["results"]] == ["prose", "prose t1", "prose x2", "prose t1 x2"]
    assert document["identity"]["broken"] == []
    assert document["run_costs"]["guesses"]
    assert document["scaling"] == []
    run_document = checked(document, "the run")
    markdown = formats.markdown(run_document)
    assert "| gain (95 %) |" in markdown
    assert "- break-even by acceptance rate" in markdown
    show_run(run_document)
    table = " ".join(capsys.readouterr().out.split())
    assert "speculation changed no token in any of 4 tests" in table
    assert "prose t1 x2" in table


def test_a_draft_model_is_measured_in_the_place_of_n_grams(model: Path) -> None:
    arguments = ("-m", str(model), "--speculate", "--workload", "prose", "-r", "1", "--draft", str(model), "--json")
    document = json.loads(run(*arguments).stdout)
    assert {source for entry in document["results"] for source in entry["speculation"]["sources"]} <= {"draft"}
    assert document["identity"]["broken"] == []


def test_a_changed_token_is_exit_code_1(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = measuring.measure_pair

    def broken(*arguments: Any) -> Sample:
        from msgspec.structs import replace

        sample = pair(*arguments)
        assert sample.pair is not None
        return replace(sample, pair=replace(sample.pair, same=False))

    monkeypatch.setattr("headrace.app.bench.measure.own.measure_pair", broken)
    exact = Expectation(True, 0.0, "as they should be")
    monkeypatch.setattr("headrace.app.bench.measure.run.expectation", lambda _: exact)
    done = run("-m", str(model), "--speculate", "--workload", "prose", "-r", "1")
    assert done.return_value == 1
    assert "speculation changed tokens" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--workload", "prose"), "--workload"),
        (("--draft", "tiny"), "--draft"),
        (("--speculate", "--workload", "novel"), "novel"),
        (("--speculate", "-p", "8"), "-p"),
        (("--speculate", "--no-pg"), "--pg"),
        (("--speculate", "--vs", "mlx-lm"), "mlx-lm"),
        (("--speculate", "--vs", "llama.cpp"), "llama-bench"),
        (("--speculate", "--batch", "2", "--vs", "llama.cpp", "--llama-python", "x"), "--batch"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        run(*arguments)


def test_prompts_are_rendered_by_the_models_template(model: Path) -> None:
    from headrace.models.loading.load import load_model

    loaded = load_model(model, name="tiny")
    found = questions(loaded, plan_speculation(chosen_workloads(["chat"]), [1]))
    text = loaded.tokenizer.decode(found["chat"].prompt, skip_special=False)
    assert text.startswith("<|im_start|>system\nYou are a friendly assistant.")
    assert text.endswith("<|im_start|>assistant\n")
    assert found["chat"].stop_ids == loaded.tokenizer.eos_ids
    assert questions(loaded, [Test(0, 4)]) == {}


def test_a_step_emits_accepted_tokens_and_one_more() -> None:
    assert tokens_per_step(0.0, 4) == 1
    assert tokens_per_step(1.0, 4) == 5
    assert tokens_per_step(0.5, 2) == 1.75
    assert tokens_per_step(0.8, 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8))


def test_break_even_is_where_tokens_per_step_equal_its_relative_cost() -> None:
    assert break_even(1.0, 3) == 0.0
    assert break_even(1.25, 1) == pytest.approx(0.25)
    assert break_even(5.0, 4) == pytest.approx(1.0)
    assert break_even(5.01, 4) is None
    for drafts in DRAFT_LENGTHS:
        chance = break_even(1.4, drafts)
        assert chance is not None
        assert tokens_per_step(chance, drafts) == pytest.approx(1.4)

"""The sentence on decode speed: true for any steps, with the word for why where a figure is above its limit."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.app.answer.sentence import StepFigures, cause, cpu_phrase, sentence
from headrace.runtime.machine.machine_load import CPUUse, MachineLoad

MIB = 1 << 20


def test_the_sentence_has_bytes_limit_speed_and_time_not_reading() -> None:
    of = StepFigures(step_bytes=97 * MIB, step_s=2.04e-3, memory_gb_s=60.0)
    assert sentence(of) == (
        "Each token reads 97.0 MiB. This machine now reads 60.0 GB/s, so at most 590 tok/s. "
        "You get 490: 0.3 ms of each 2.0 ms step is not reading."
    )
    assert "reads up to 60.0" in sentence(StepFigures(step_bytes=97 * MIB, step_s=2.04e-3, peak_gb_s=60.0))


def test_draft_tokens_and_sequences_are_named() -> None:
    of = StepFigures(
        step_bytes=97 * MIB, step_s=2e-3, tokens=1.9, proposed=100, accepted=62, memory_gb_s=60.0, sequences=1.0
    )
    assert sentence(of).startswith("Each step reads 97.0 MiB and gives 1.9 tokens: 62 % of draft tokens were accepted.")
    together = StepFigures(step_bytes=99 * MIB, step_s=2e-3, tokens=4.0, sequences=4.0, memory_gb_s=60.0)
    assert sentence(together).startswith("Each step reads 99.0 MiB and gives 4.0 tokens for 4 sequences.")
    assert "You get 2000:" in sentence(together)


def test_the_bytes_of_rank_0_are_named_as_such() -> None:
    of = StepFigures(step_bytes=60 * MIB, step_s=2e-3, memory_gb_s=60.0, ranks=2)
    assert sentence(of).startswith("Each token reads 60.0 MiB on rank 0 of 2.")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"step_bytes": 0, "step_s": None}, "No model is loaded."),
        ({"step_bytes": 0}, "500 tok/s; a step's bytes are unknown."),
        ({"memory_gb_s": None}, "is not measured yet. You get 500 tok/s."),
        ({"step_s": None}, "No speed yet: it needs two steps."),
        ({"step_s": 0.0}, "No speed yet: it needs two steps."),
        ({"step_s": 1e-3}, "You get 1000, above that: some bytes came from a cache"),
        ({"step_s": 97 * MIB / 60e9}, "nearly all of a step is reading."),
        ({"slowed_by": "pip runs"}, "is not reading, in part because pip runs."),
        ({"step_flops": 1.9e9, "compute_flops": 1e12}, "GFLOP take longer than its bytes, at 1000 GFLOP/s, so at most"),
        ({"step_flops": 1.9e9, "compute_flops": 1e12}, "0.1 ms of each 2.0 ms step is not computing."),
        ({"step_flops": 4e9, "compute_flops": 1e12}, "at 2000 GFLOP/s, so at most 500 tok/s."),  # reached 2e12
    ],
)
def test_the_sentence_describes_unknown_and_unusual_figures(changed: dict[str, object], text: str) -> None:
    given_figures: dict[str, object] = {"step_bytes": 97 * MIB, "step_s": 2e-3, "memory_gb_s": 60.0}
    assert text in sentence(StepFigures(**given_figures | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step_s", "line", "words"),
    [
        (4e-3, "Pip runs.", "in part because pip runs"),
        (97 * MIB / 60e9, "All of a step is reading.", "nearly all of a step is reading"),
        (1e-3, "Above the measured peak.", "above that: some bytes came from a cache"),
    ],
)
def test_line_and_sentence_name_other_programs_for_the_same_steps(step_s: float, line: str, words: str) -> None:
    figures = StepFigures(step_bytes=97 * MIB, step_s=step_s, memory_gb_s=60.0, slowed_by="pip runs")
    assert cause(figures) == line
    assert words in sentence(figures)
    assert ("pip" in sentence(figures)) == ("Pip" in line)


@pytest.mark.parametrize("step_s", [None, 0.0])
def test_steps_of_unknown_time_have_no_cause(step_s: float | None) -> None:
    assert not cause(StepFigures(step_bytes=97 * MIB, step_s=step_s, memory_gb_s=60.0))


def test_other_programs_are_named() -> None:
    assert cpu_phrase(CPUUse(2, 2.0, 0.3), "used") == "other programs used 1.7 of 2 cores"
    assert cpu_phrase(MachineLoad(2, 2.0, 0.3, 1, 2, 0, busiest="pip\x1b[31m")).startswith(
        "other programs use 1.7 of 2 cores (mostly pip"
    )
    assert "\x1b" not in cpu_phrase(MachineLoad(2, 2.0, 0.3, 1, 2, 0, busiest="pip\x1b[31m"))


POSITIVE = st.floats(1e-9, 1e9)


@given(
    st.builds(
        StepFigures,
        step_bytes=st.floats(0, 1e13),
        step_s=st.none() | st.just(0.0) | POSITIVE,
        tokens=st.floats(1, 64),
        sequences=st.floats(1, 64),
        proposed=st.just(0) | st.integers(5, 9),
        accepted=st.integers(0, 5),
        memory_gb_s=st.none() | st.floats(1e-3, 1e5),
        peak_gb_s=st.none() | st.floats(1e-3, 1e5),
        step_flops=st.floats(0, 1e15),
        compute_flops=st.none() | st.floats(1e6, 1e16),
        slowed_by=st.sampled_from(["", "pip runs"]),
    )
)
def test_a_speed_above_its_limit_is_described_as_above(of: StepFigures) -> None:
    text = sentence(of)
    assert not re.search(r"nan|inf\b|-\d", text), text
    most = re.search(r"at most (\S+) tok/s", text)
    got = re.search(r"You get ([\d.]+)", text)
    if most and got and float(got[1]) > float(most[1]):
        assert "above that" in text
    if of.least_s is not None and of.step_s and of.share is not None and of.share <= 1:
        assert of.least_s <= of.step_s * (1 + 1e-9)
        assert math.isclose(of.least_s + (of.step_s - of.least_s), of.step_s)

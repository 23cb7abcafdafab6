"""Steps of an answer: spans of draft tokens, their stored form, and damage to it."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from headrace.app.answer.answer_steps import AnswerSteps, StepText, unpacked

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
STEPS = st.builds(
    lambda pieces, accepted, rejected: StepText(tuple(pieces), min(accepted, len(pieces)), tuple(rejected)),
    st.lists(TEXTS, min_size=1, max_size=4),
    st.integers(0, 3),
    st.lists(TEXTS, max_size=3),
)


@given(TEXTS, st.lists(st.tuples(STEPS, st.floats(0, 100)), max_size=8), st.integers(0, 8))
def test_stored_steps_are_read_again(before: str, drawn: list[tuple[StepText, float]], recorded: int) -> None:
    latencies = [latency for _, latency in drawn][:recorded]
    steps = AnswerSteps(len(before), [text for text, _ in drawn], latencies)
    content = before + steps.text
    found = unpacked(steps.packed(), content)
    assert found is not None
    assert (found.start, found.texts) == (steps.start, steps.texts)
    assert all(abs(a - b) <= 1e-6 for a, b in zip(found.latencies_s, latencies, strict=True))
    assert unpacked(steps.packed(), content + "x") is None
    marked = "".join(content[begin:end] for begin, end in steps.accepted_spans())
    assert marked == "".join(piece for text in steps.texts for piece in text.pieces[: text.accepted])
    places = [place for place, _ in steps.rejected()]
    assert places == sorted(places)
    assert all(len(before) <= place <= len(content) for place in places)


@given(st.binary(max_size=60) | st.none() | st.text(max_size=5) | st.builds(zlib.compress, st.binary(max_size=60)))
def test_damaged_steps_are_no_error(data: object) -> None:
    assert unpacked(data, "text") is None


def test_damaged_values_are_refused() -> None:
    for document in (
        '{"start":0,"steps":[[[4],5,[]]],"latencies_us":[1]}',
        '{"start":0,"steps":[[[4],0,[1]]],"latencies_us":[1]}',
        '{"start":0,"steps":[[[4],0,[]]],"latencies_us":[1,2]}',
        '{"start":0,"steps":[[[4],0,[]]],"latencies_us":[-1]}',
        '{"start":0,"steps":[[[3],0,[]]],"latencies_us":[]}',
        '{"start":-1,"steps":[[[5],0,[]]],"latencies_us":[]}',
        '{"start":0,"steps":[[[true],0,[]],[[3],0,[]]],"latencies_us":[]}',
        '{"start":0,"steps":{},"latencies_us":[]}',
    ):
        assert unpacked(zlib.compress(document.encode()), "text") is None, document
    sound = '{"start":0,"steps":[[[1,3],1,["no"]]],"latencies_us":[2000]}'
    found = unpacked(zlib.compress(sound.encode()), "text")
    assert found == AnswerSteps(0, [StepText(("t", "ext"), 1, ("no",))], [0.002])


def test_a_continued_answer_has_the_steps_of_both_parts() -> None:
    first = AnswerSteps(2, [StepText(("one",))], [0.1])
    second = AnswerSteps(5, [StepText((" two",))], [0.2])
    assert second.joined_to(first) == AnswerSteps(2, [StepText(("one",)), StepText((" two",))], [0.1, 0.2])
    assert second.joined_to(None) is second
    assert second.joined_to(AnswerSteps(0, [StepText(("one",))], [0.1])) is second, "text between them has no steps"
    assert second.joined_to(AnswerSteps(2, [StepText(("one",))], [])) is second, "its latencies are not known"

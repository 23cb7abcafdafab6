"""An answer's account in words."""

from headrace.app.answer.phrases import phrases, plain_phrases


def test_phrases_have_singular_and_plural_forms() -> None:
    assert plain_phrases(1, None, 0.1) == ["1 token", "first token after 0.10 s"]
    assert phrases(3237, 106.2, 0.0506, 0.046) == ["3,237 tokens", "106 tok/s", "TTFT 50.6 ms", "MBU 5 %"]
    assert phrases(5, None, None, None, busy=True) == ["5 tokens", "MBU busy"]

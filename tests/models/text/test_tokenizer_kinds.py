"""Twenty kinds of tokenizer, controls declared in five ways: no message text gives the id of one."""

from pathlib import Path

import pytest

from headrace.models.text.tokenizer import Tokenizer
from tests.support.smuggling import Smuggling
from tests.support.tokenizer_kinds import DECLARED, KINDS, texts, write_kind


@pytest.mark.sampled(24)
@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_is_encoded_to_a_control_token(tmp_path: Path, kind: str, declared: str) -> None:
    template = ("put together", "written out", "around")[len(kind) % 3]
    tried = Smuggling(Tokenizer.load(write_kind(tmp_path, kind, declared, template)))
    assert declared == "pieces" or len(tried.controls) == 4
    assert [(text, ways) for text in texts(seed=16, count=12) if (ways := tried.ways(text))] == []

"""Every model module of mlx-lm through headrace: see `modules`."""

from pathlib import Path

import pytest

from tests.parity.modules import DIFFERENT, PAGE, compare
from tests.support.every_module import LEFT_OUT, names

pytestmark = pytest.mark.peer


def test_the_page_lists_all_modules() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("<!-- modules -->")[2].partition("<!-- end -->")[0]
    listed = {word.strip("`,.:") for word in text.split() if word.startswith("`")}
    assert listed == {*names(), *LEFT_OUT}


@pytest.mark.nightly
@pytest.mark.parametrize("name", names())
def test_no_mlx_lm_module_gives_different_turns(tmp_path: Path, name: str) -> None:
    assert compare(name, tmp_path) != DIFFERENT

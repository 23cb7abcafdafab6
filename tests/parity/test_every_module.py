"""Every model module of mlx-lm through headrace: see `modules`."""

from pathlib import Path

import pytest

from tests.parity.modules import DIFFERENT, OWN, PAGE, ROUNDED, compare, listed, recorded
from tests.support.every_module import LEFT_OUT, names

pytestmark = pytest.mark.peer


def test_the_page_lists_all_modules() -> None:
    assert recorded(PAGE.read_text(encoding="utf-8")).keys() == {*names(), *LEFT_OUT}


def test_results_of_modules_are_read_back_from_a_page() -> None:
    results = {"lfm2-vl": "equal: in float32", "llama": DIFFERENT}
    results |= {f"module_{number}": "equal" for number in range(40)}  # several lines
    read = recorded(f"<!-- modules -->\n{listed(results)}<!-- end -->\n")
    assert read == results | {name: f"not compared: {why}" for name, why in LEFT_OUT.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("name", names())
def test_turns_of_a_module_agree_as_the_page_says(tmp_path: Path, name: str) -> None:
    result = compare(name, tmp_path)
    listed_result = recorded(PAGE.read_text(encoding="utf-8"))[name]
    assert result != DIFFERENT
    # Instruction sets round differently: near-ties of routers and indexers turn on one and not on another.
    assert result == listed_result or {result, listed_result} == {OWN, ROUNDED}

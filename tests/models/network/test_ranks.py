"""Ranks of this machine give the tokens of one rank, for every family of the decoder, however it is divided."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from headrace.models.loading import load
from headrace.models.loading.load import load_model
from tests import mlx_lm_models, tiny
from tests.rank_process import Ranks, answers

_LONG = [(5 * i) % 90 for i in range(140)]
_BATCHES = [[_LONG], [[*_LONG, 7, 8], [1, 2, 3], _LONG[30:60]]]  # the second begins with a cached prefix
_NO_TENSOR = ("olmo2", "olmo3", "minimax", "granite-hybrid", "falcon-h1-normed")  # norms over all heads


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), 2)
    yield ranks
    ranks.close()


def models() -> list[str]:
    return [*tiny.EVERY, *mlx_lm_models.MODELS]


def written(name: str, folder: Path) -> Path:
    if name in tiny.EVERY:
        return tiny.write_model(folder / name, name)
    return mlx_lm_models.write_mlx_lm_model(folder / name, mlx_lm_models.config_of(name))


def alone(job: dict[str, Any]) -> Any:
    """Return the tokens of one rank."""
    with patch.dict(os.environ, job.get("environment", {})), patch.object(load, "_tokenizer"):
        loaded = load_model(Path(job["path"]), name="tiny", context=256)
        return {"tokens": answers(loaded.network, loaded.context_limit, job)}


@pytest.mark.parametrize("name", models())
def test_tensor_parallel_gives_the_same_tokens(two: Ranks, tmp_path: Path, name: str) -> None:
    job = {"path": str(written(name, tmp_path)), "batches": _BATCHES, "tokens": 12}
    job["environment"] = {"HEADRACE_EXACT": "1"}
    answer = two.ask(**job, kind="tensor", shares=[1, 1])
    if name.startswith(_NO_TENSOR):
        assert answer["error"] == "UsageError"
    else:
        assert answer == alone(job)


@pytest.mark.parametrize("name", models())
def test_a_pipeline_gives_the_same_tokens(two: Ranks, tmp_path: Path, name: str) -> None:
    job = {"path": str(written(name, tmp_path)), "batches": _BATCHES, "tokens": 12}
    job["environment"] = {"HEADRACE_EXACT": "1"}
    assert two.ask(**job, kind="pipeline", shares=[1, 1.2]) == alone(job)

"""Recommended sampling: the files' own, else the catalog's for a model of the store."""

import json
import tomllib
from pathlib import Path

import pytest

from headrace.models.loading.recommended import catalog_sampling, recommended_sampling
from headrace.models.registry.catalog import load_catalog
from headrace.models.registry.resolve import DEFAULT_MODEL, ResolvedModel
from headrace.runtime.config.paths import ASSETS

SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-360m", "smollm2-1.7b"])
def test_the_catalog_recommends_the_cards_sampling(name: str, tmp_path: Path) -> None:
    penalty = {"repetition_penalty": 1.1} if name == DEFAULT_MODEL else {}
    expected = {**SMOLLM2, **penalty}
    assert recommended_sampling(ResolvedModel(name, tmp_path, "", stored_as=name)) == expected


def test_recommended_sampling_is_of_catalog_models() -> None:
    """A renamed model would lose its sampling without a word."""
    with (ASSETS / "sampling.toml").open("rb") as file:
        assert tomllib.load(file).keys() <= load_catalog().keys()


@pytest.mark.parametrize("own", [{"temperature": 0.6}, {"do_sample": True}, {"do_sample": False}])
def test_generation_config_takes_precedence_over_the_catalog(own: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({**own, "eos_token_id": 2}))
    resolved = ResolvedModel("smollm2-135m", tmp_path, "", stored_as="smollm2-135m")
    assert recommended_sampling(resolved) == {**own, "eos_token_id": 2}
    assert catalog_sampling(resolved) == {}


@pytest.mark.parametrize("stored_as", [None, "qwen3-4b", "org--name"])
def test_models_outside_the_catalog_have_no_recommended_sampling(stored_as: str | None, tmp_path: Path) -> None:
    assert recommended_sampling(ResolvedModel("smollm2-135m", tmp_path, "", stored_as=stored_as)) == {}

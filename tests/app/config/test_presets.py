"""Presets: read and written without loss, nothing unknown accepted."""

from pathlib import Path

import pytest

from headrace.app.answer.options import OPTIONS, AnswerOptions
from headrace.app.config.presets import Preset, delete_preset, load_presets, save_preset
from headrace.runtime.errors import UsageError
from tests.support.option_values import VALUES


def test_saving_keeps_the_rest_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "presets.toml"
    assert load_presets(path) == {}
    path.write_text('# mine\n[old]\nsystem = "Be brief."  # always\ntemperature = 1\n')
    new = Preset('Say "ü"\nand [x]', {"temperature": 0.2, "top_k": 5, "stop": ["###", "\n"], "thinking": False})
    save_preset("a b.c", new, path)
    assert load_presets(path) == {"old": Preset("Be brief.", {"temperature": 1}), "a b.c": new}
    assert path.read_text().startswith('# mine\n[old]\nsystem = "Be brief."  # always\n')
    save_preset("a b.c", Preset(), path)
    assert load_presets(path)["a b.c"] == Preset()
    delete_preset("a b.c", path)
    assert list(load_presets(path)) == ["old"]
    with pytest.raises(UsageError, match="a b"):
        delete_preset("a b.c", path)


def test_a_preset_keeps_every_option_but_a_logit_bias(tmp_path: Path) -> None:
    path = tmp_path / "presets.toml"
    for name in OPTIONS:
        given = AnswerOptions.read({name: VALUES[name]}).stored()
        save_preset("p", Preset("", given), path)
        assert load_presets(path) == {"p": Preset("", given)}
        assert bool(given) == (name != "logit_bias")
    path.write_text("[p.logit_bias]\n5 = 1.0\n")
    with pytest.raises(UsageError, match="logit_bias"):
        load_presets(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "x"),
        ("[p]\ntemprature = 1", r"unknown setting temprature in \[p\]"),
        ("[p]\ntemperature = -1", r"temperature in \[p\]"),
        ("[p]\ntop_k = 1.5", r"top_k in \[p\]"),
        ("[p]\nstop = 1", r"stop in \[p\]"),
        ("[p]\nsystem = 1", r"system in \[p\]"),
        ("[p", r"presets\.toml"),
    ],
)
def test_invalid_presets_are_named_and_not_changed(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "presets.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem):
        load_presets(path)
    with pytest.raises(UsageError, match=problem):
        save_preset("new", Preset("x"), path)
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["", " ", "x" * 41, "a\nb"])
def test_invalid_preset_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name"):
        save_preset(name, Preset(), tmp_path / "presets.toml")

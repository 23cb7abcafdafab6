"""The settings file: documented defaults, complaints that say where, and changes that keep the rest as it is."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.app.chat.parameters import read_parameter
from headrace.app.config.settings import (
    _SECTIONS,
    SAMPLING_ROWS,
    ChatSettings,
    Settings,
    _rows,
    chosen_model,
    default_text,
    load_settings,
    save_setting,
    write_default,
)
from headrace.runtime.errors import UsageError
from headrace.runtime.sampling.params import SamplingParams


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "settings.toml"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_no_file_and_the_documented_file_both_mean_the_defaults(path: Path) -> None:
    assert load_settings(path) == Settings()
    assert write_default(path)
    assert load_settings(path) == Settings()
    assert path.read_text() == default_text()
    path.write_text("[chat]\n")
    assert not write_default(path)
    assert path.read_text() == "[chat]\n"


def test_every_setting_is_in_the_file_with_a_comment() -> None:
    lines = default_text().splitlines()
    for section in _SECTIONS.values():
        for name in _rows(section):
            (at,) = (i for i, line in enumerate(lines) if line.removeprefix("# ").startswith(f"{name} = "))
            assert lines[at - 1].startswith("# ")
            assert lines[at - 1].endswith(".")


def test_the_examples_are_valid_settings(path: Path) -> None:
    text = "\n".join(line.removeprefix("# ") if " = " in line else line for line in default_text().splitlines())
    settings = load_settings(written(path, text))
    given = settings.sampling.stored()
    assert set(given) == set(SAMPLING_ROWS)
    given.pop("max_tokens")
    given.pop("thinking")
    given.pop("speculate")
    SamplingParams(**given)


def test_set_values_are_read(path: Path) -> None:
    text = '[chat]\nmodel = "qwen3-4b"\n[sampling]\ntemperature = 1\nseed = 7\n[screen]\nmouse = false\n'
    settings = load_settings(written(path, text))
    assert (settings.chat.model, settings.screen.mouse) == ("qwen3-4b", False)
    assert settings.sampling.stored() == {"temperature": 1, "seed": 7}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[chat]\nmodle = 'x'\n", "modle in [chat]"),
        ('[chat]\n"\\n" = 1\n', "'\\n' in [chat]"),
        ('["\\u001b[2J"]\n', "['\\x1b[2J']"),
        ("[chta]\n", "[chta]"),
        ("chat = 1\n", "chat"),
        ("model = 'x'\n", "[model]"),
        ("[chat]\nmodel = 1\n", "model in [chat] must be a text, not 1"),
        ("[chat]\ncontext = true\n", "context in [chat]"),
        ("[chat]\ncontext = -5\n", "context in [chat] must be 0 or more, not -5"),
        ("[chat]\nkv = 'q5'\n", "kv in [chat] must be one of f16, q8, k8v4, q4, auto, not 'q5'"),
        ("[sampling]\ntop_p = 1.5\n", "top_p in [sampling] must be above 0 and at most 1, not 1.5"),
        ("[sampling]\ntop_p = 0\n", "top_p in [sampling] must be above 0 and at most 1, not 0"),
        ("[sampling]\ntemperature = inf\n", "temperature in [sampling] must be"),
        ("[sampling]\nrepetition_penalty = 0\n", "repetition_penalty in [sampling] must be"),
        ("[sampling]\npresence_penalty = -inf\n", "presence_penalty in [sampling] must be"),
        ("[sampling]\nseed = 12345678901234567890123\n", "seed in [sampling] must be from 0 to 2^64 - 1, not"),
        (f"[sampling]\nseed = {'1' * 5000}\n", "settings.toml"),
        ("[sampling]\ntemperature = 'hot'\n", "temperature in [sampling] must be a number, not 'hot'"),
        ("[sampling]\ntemperature = nan\n", "temperature in [sampling] must be"),
        (
            "[sampling]\nspeculate = 'draft'\n",
            "speculate in [sampling] must be one of auto, ngram, mtp, off, not 'draft'",
        ),
        ("[sampling]\nspeculate = false\n", "speculate in [sampling] must be"),
        ("[screen]\nmouse = 1\n", "mouse in [screen] must be true or false"),
        ("[chat\n", "settings.toml"),
        ("\udcff", "settings.toml"),
    ],
)
def test_errors_are_one_line_with_the_path(path: Path, text: str, complaint: str) -> None:
    path.parent.mkdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as caught:
        load_settings(path)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_as_settings_file_is_not_read(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(UsageError, match=re.escape(f"{path} cannot be read: it is not a regular file")):
        load_settings(path)


_NUMBERS = [name for name in SAMPLING_ROWS if name not in ("thinking", "speculate")]
_AWKWARD = st.sampled_from([0, 1, -1, 1e-9, 1e-300, 0.01, 100, 101, 2**63, 2**64 - 1, 2**64, 10**22])


@example(name="max_tokens", value=-1)
@given(name=st.sampled_from(_NUMBERS), value=_AWKWARD | st.floats() | st.integers())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_file_the_set_command_and_the_sampler_agree(path: Path, name: str, value: float) -> None:
    """The file and /set accept the same values, and the sampler accepts them."""
    try:
        taken = load_settings(written(path, f"[sampling]\n{name} = {value!r}\n")).sampling.stored()
    except UsageError:
        with pytest.raises(UsageError, match=name):
            read_parameter(name, repr(value))
    else:
        assert read_parameter(name, repr(value)) == taken[name]
        if (name, value) != ("max_tokens", -1):  # which is as many as fit
            assert taken[name] == value
        taken.pop("max_tokens", None)
        SamplingParams(**taken)


def test_an_unreadable_settings_file_is_named(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        load_settings(path)


def test_changing_one_setting_keeps_comments_and_the_rest(path: Path) -> None:
    settings = save_setting("screen", "theme", "nord", path)
    assert settings.screen.theme == "nord"
    assert path.read_text() == default_text().replace('theme = ""', 'theme = "nord"')
    written(path, "# mine\n[chat]\nsystem = '''a\nb'''  # kept\n")
    assert save_setting("sampling", "temperature", 0.5, path).sampling.temperature == 0.5
    assert path.read_text().startswith("# mine\n[chat]\nsystem = '''a\nb'''  # kept\n")
    assert tomllib.loads(path.read_text())["sampling"] == {"temperature": 0.5}


@pytest.mark.parametrize(("section", "name", "value"), [("screen", "them", "x"), ("sampling", "top_p", 2.0)])
def test_a_change_that_would_not_load_is_refused(path: Path, section: str, name: str, value: Any) -> None:
    write_default(path)
    with pytest.raises(UsageError):
        save_setting(section, name, value, path)
    assert path.read_text() == default_text()


def test_a_settings_file_with_errors_is_not_rewritten(path: Path) -> None:
    written(path, "[chat]\nmodle = 'x'\n")
    with pytest.raises(UsageError, match="modle"):
        save_setting("screen", "theme", "nord", path)
    assert path.read_text() == "[chat]\nmodle = 'x'\n"


def test_the_command_line_beats_the_environment_beats_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(chat=ChatSettings(model="of-the-file"))
    monkeypatch.setenv("HEADRACE_MODEL", "of-the-environment")
    assert chosen_model("given", settings) == "given"
    assert chosen_model(None, settings) == "of-the-environment"
    monkeypatch.setenv("HEADRACE_MODEL", "")
    assert chosen_model(None, settings) == "of-the-file"
    assert chosen_model(None, Settings()) is None
    assert chosen_model("", settings) == ""  # refused as an empty name, not taken for the default

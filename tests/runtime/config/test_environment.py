"""HEADRACE_* variables are valid or refused, never ignored."""

import subprocess
import sys

import pytest

from headrace.runtime.config import environment
from headrace.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("text", "meant"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("off", False), ("", False)],
)
def test_switches_are_read_from_common_words(text: str, meant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_EXACT", text)
    monkeypatch.setenv("HEADRACE_DEBUG", text)
    assert (environment.exact(), environment.debug()) == (meant, meant)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_EXACT", "ture"),
        ("HEADRACE_DEBUG", "2"),
        ("HEADRACE_KERNELS", "refrence"),
        ("HEADRACE_THREADS", "two"),
        ("HEADRACE_THREADS", "-1"),
        ("HEADRACE_THREADS", "2.0"),
        ("HEADRACE_THREADS", "²"),
        ("HEADRACE_THREADS", "9" * 5000),
        ("HEADRACE_THREADS", "0" * 9 + "1025"),
    ],
)
def test_invalid_values_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=name) as raised:
        environment.check()
    assert raised.value.hint
    assert len(str(raised.value)) < 150


def test_threads_and_kernels_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_THREADS", "3")
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    assert (environment.threads(), environment.reference_kernels()) == (3, True)
    monkeypatch.setenv("HEADRACE_KERNELS", "amx")
    assert (environment.kernels(), environment.reference_kernels()) == ("amx", False)
    monkeypatch.setenv("HEADRACE_KERNELS", "avx2")
    assert (environment.kernels(), environment.reference_kernels()) == ("avx2", False)
    monkeypatch.setenv("HEADRACE_THREADS", "0" * 5000 + "2")
    assert environment.threads() == 2
    monkeypatch.setenv("HEADRACE_THREADS", "")
    monkeypatch.delenv("HEADRACE_KERNELS")
    assert (environment.threads(), environment.reference_kernels()) == (0, False)


def test_misspelt_names_are_reported_and_others_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_THREAD", "2")
    monkeypatch.setenv("HEADRACEHOME", "/x")
    monkeypatch.setenv("HEADRACE_TEST_HOME", "/x")
    assert environment.check() == [
        "HEADRACEHOME is not read by headrace; did you mean HEADRACE_HOME?",
        "HEADRACE_THREAD is not read by headrace; did you mean HEADRACE_THREADS?",
    ]


def test_importing_the_kernels_validates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_THREADS", "two")
    done = subprocess.run([sys.executable, "-c", "import headrace.runtime.ops"], capture_output=True, text=True)
    assert "UsageError: HEADRACE_THREADS: 'two'" in done.stderr

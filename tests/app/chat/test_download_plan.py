"""Names of models as the chat takes them, before anything is loaded."""

from pathlib import Path

import pytest

from headrace.app.chat.download_plan import check_model_name, download_plan
from headrace.models.registry.adapters import find_adapter
from headrace.models.registry.progress import silent
from headrace.runtime.errors import ModelNotFoundError, UsageError
from tests.support.adapters import write_adapter
from tests.support.tiny import write_model


def test_a_model_is_named_with_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    base = write_model(tmp_path / "base", "llama")
    lora = tmp_path / "lora"
    write_adapter(lora, base)
    check_model_name(f"{base}+{lora}")
    check_model_name(f"{base}+org/lora")
    assert download_plan(f"{base}+{lora}") is None
    with pytest.raises(ModelNotFoundError, match="no adapter 'lake'"):
        check_model_name(f"{base}+lake")
    with pytest.raises(ModelNotFoundError, match="so it is not an adapter"):
        check_model_name(f"{base}+{base}")


@pytest.mark.parametrize("text", ["~nobody-has-this-name", "~nobody-has-this-name/lora", "x" * 5000, "a\0b"])
def test_adapters_that_cannot_be_paths_are_refused(tmp_path: Path, text: str) -> None:
    base = write_model(tmp_path / "base", "llama")
    with pytest.raises(UsageError):
        check_model_name(f"{base}+{text}")
    with pytest.raises(UsageError):
        check_model_name(f"{text}+{base}")
    with pytest.raises(UsageError):
        find_adapter(text, silent, fetch=False)

"""Names of models and files that would drive a terminal, in everything the commands print about them."""

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import headrace
from tests.support.tiny_chat import write_chat_model

NAME = "\x1b[31mred\x9b2J\u202e\x07"
# ESC and the rest of C0 but tab and newline, C1, and what reorders.
DRIVES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / NAME)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "command",
    [
        "predict -m", "predict --explain -m", "models show", "run -n 2 hi --stats -m",
        "verify --tokens 2 --sequences 2 -m",
        *(f"bench -p 4 -n 4 -r 1 {form} -m" for form in ("-o md", "-o table", "--json")),
    ],
)  # fmt: skip
def test_commands_escape_names(command: str, model: Path, tmp_path: Path) -> None:
    done = headrace(*command.split(), model, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "red" in done.stdout + done.stderr
    assert not DRIVES.search(done.stdout + done.stderr)


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["run hi -m", "predict -m", "models show", "bench -m"])
@pytest.mark.parametrize(
    "change",
    [{"quantization_config": {"quant_method": NAME}}, {"model_type": NAME}, {"rope_scaling": {"type": NAME}}],
    ids=lambda change: str(*change),
)
def test_errors_escape_the_content_of_files(
    command: str, change: dict[str, object], model: Path, tmp_path: Path
) -> None:
    config = model / "config.json"
    before = config.read_text()
    config.write_text(json.dumps(json.loads(before) | change))
    try:
        done = headrace(*command.split(), model, home=tmp_path)
    finally:
        config.write_text(before)
    assert "Traceback" not in done.stderr
    assert not DRIVES.search(done.stdout + done.stderr)


def test_errors_escape_file_names(model: Path, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}\n.bin").write_bytes(b"a\xff")
    done = headrace("run", "hi", "-m", model, "-f", tmp_path / f"{NAME}\n.bin", home=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "red" in done.stderr
    assert not DRIVES.search(done.stderr)

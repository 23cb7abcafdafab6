"""The house rules that a machine can check: import contracts, and what a start may import.

Cold start is a feature, so what `headrace --help` and an ordinary run of the default model import is fixed here.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gguf_models import write_gguf
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent


def imported_by(tmp_path: Path, *arguments: str, home: Path | None = None, **more: str) -> set[str]:
    """Names of the modules in memory after `headrace ARGUMENTS`, run in a process of its own."""
    report = tmp_path / "modules.json"
    code = (
        "import atexit, json, pathlib, sys\n"
        f"report = pathlib.Path({str(report)!r})\n"
        "atexit.register(lambda: report.write_text(json.dumps(sorted(sys.modules))))\n"
        "from headrace.app.cli.main import main\n"
        "main()\n"
    )
    environment = {**os.environ, "HEADRACE_HOME": str(home or tmp_path), **more}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return set(json.loads(report.read_text()))


def test_import_contracts_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = {"mlx", "mlx_lm", "textual", "transformers", "numpy", "tokenizers", "huggingface_hub", "gguf", "jinja2"}
    assert not heavy & imported_by(tmp_path, "--help")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "command", ["chat", "run", "serve", "bench", "models", "sessions", "paths", "doctor", "completion"]
)
def test_a_commands_help_draws_nothing_and_loads_no_model_code(tmp_path: Path, command: str) -> None:
    heavy = {"mlx_lm", "textual", "transformers", "numpy", "tokenizers", "huggingface_hub", "gguf"}
    assert not heavy & imported_by(tmp_path, command, "--help")


def test_a_list_of_models_imports_no_http_client(tmp_path: Path) -> None:
    heavy = {"httpx", "httpx2", "mlx_lm", "textual", "transformers", "gguf"}
    assert not heavy & imported_by(tmp_path, "list")


def test_a_gguf_starts_without_the_package_gguf(tmp_path: Path) -> None:
    """Its types have numbers and layouts of ours; the package has the reference, for types that are requantized."""
    file = write_gguf(tmp_path / "tiny.gguf", "llama", matrices="Q4_0")
    assert not {"gguf", "transformers", "mlx_lm"} & imported_by(
        tmp_path, "run", "hi", "--raw", "-n", "1", "-m", str(file)
    )


def test_completing_a_models_name_imports_nothing_heavy(tmp_path: Path) -> None:
    words = {"_HEADRACE_COMPLETE": "bash_complete", "COMP_WORDS": "headrace run -m smol", "COMP_CWORD": "3"}
    heavy = {"mlx", "mlx_lm", "textual", "transformers", "numpy", "tokenizers", "huggingface_hub", "gguf", "jinja2"}
    assert not heavy & imported_by(tmp_path, **words)


@pytest.mark.real
def test_an_ordinary_run_of_the_default_model_starts_lean(tmp_path: Path, default_model: Path) -> None:
    """It imports mlx, tokenizers, click, msgspec. Nothing else that is large."""
    home = default_model.parents[2]
    modules = imported_by(tmp_path, "run", "Say hello.", "-n", "2", home=home)
    assert {"mlx", "tokenizers"} <= modules
    heavy = {"transformers", "mlx_lm", "textual", "numpy", "gguf", "huggingface_hub", "torch", "llguidance"}
    assert not heavy & modules


def test_records_are_structs() -> None:
    """Left are messages of textual and a model's arguments of mlx-lm: a Struct has no base class with an `__init__`."""
    with_dataclasses = {
        str(path.relative_to(ROOT))
        for folder in ("app", "models", "runtime")
        for path in (ROOT / folder).rglob("*.py")
        if "dataclass" in path.read_text()
    }
    of_textual = {"app/tui/input/prompt.py", "app/tui/input/search_bars.py", "app/tui/transcript/transcript.py"}
    of_mlx_lm = {"models/mlx_lm/deepseek_v4.py"}
    assert with_dataclasses == of_textual | of_mlx_lm


def test_shares_are_formatted_in_one_place() -> None:
    """A format with a percent sign makes `31%`; `percent` of runtime/metrics/units.py makes `31 %`."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("app", "models", "runtime")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"\{[^{}]*:[^{}]*[0-9]%\}", line)
    ]
    assert not found

"""One import name: headrace beside a project that has `app/`, `models/`, `runtime/` and `assets/` of its own.

headrace is installed from its wheel, without the compiled kernels, in an environment that cannot see this repository.
It runs in the project's folder, whose modules must stay the project's, here and in the engine's process.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import write_chat_model

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("scikit_build_core", reason="builds the wheel")

OWN = ("app", "models", "runtime", "assets")
_TALK = """
import sys, time
import headrace
{project}
from headrace.app.answer.options import AnswerOptions
from headrace.app.engine.client import EngineClient
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Delta, Done
client, said = EngineClient(), []
client.start(ModelSpec(sys.argv[1]))
client.submit(Generate(1, [{{"role": "user", "content": "hi"}}], AnswerOptions(max_tokens=2)))
while not any(isinstance(event, Done) for event in said):
    said += client.poll()
    assert client.state in ("loading", "ready"), (client.state, said)
    time.sleep(0.01)
client.close()
print(headrace.__file__)
"""
_IMPORT_OWN = "\n".join(f"import {name}; assert {name}.OWNER == 'the project'" for name in OWN)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with headrace and what it depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    # As pip does it, without pip, which takes as long as the build.
    build = f"from scikit_build_core.build import build_wheel; build_wheel({str(folder)!r}, {{'wheel.cmake': 'false'}})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("headrace-*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input", "--python", python]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel], check=True, capture_output=True)
    here = [path for path in sys.path if Path(path).name == "site-packages"]  # no .pth file of theirs is read
    (packages(python.parent) / "dependencies.pth").write_text("\n".join(here))
    (python.parent / "talk").write_text(_TALK.format(project=""))
    return python.parent


def packages(installed: Path) -> Path:
    """Return the environment's folder of installed packages."""
    (folder,) = installed.parent.glob("lib/python*/site-packages")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "chat")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that says whose its modules are."""
    for name in OWN:
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "__init__.py").write_text("OWNER = 'the project'\n")
    (tmp_path / "project" / "main.py").write_text(_TALK.format(project=_IMPORT_OWN))
    return tmp_path / "project"


def run_in(project: Path, command: list[str | Path], *, path: str | None) -> str:
    """The output of a command that must succeed in the project's folder; `path`: PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HEADRACE_HOME"] = str(project.parent / "home")
    if path is not None:
        environment["PYTHONPATH"] = path
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    log = project.parent / "home" / "cache" / "engine.log"
    assert done.returncode == 0, (done.stderr, log.read_text() if log.exists() else "")
    return done.stdout


@pytest.mark.sampled
@pytest.mark.parametrize("path", [None, "."])
def test_headrace_does_not_shadow_a_projects_modules(
    installed: Path, model: Path, project: Path, path: str | None
) -> None:
    said = run_in(project, [installed / "python", "main.py", model], path=path)
    assert said.strip() == str(packages(installed) / "headrace" / "__init__.py")


@pytest.mark.sampled
@pytest.mark.parametrize("path", [None, "."])
def test_the_command_runs_in_a_projects_folder(installed: Path, model: Path, project: Path, path: str | None) -> None:
    assert run_in(project, [installed / "headrace", "run", "hi", "-m", model, "-n", "2"], path=path)


def test_files_and_packages_shadow_no_module(installed: Path, model: Path, project: Path) -> None:
    """Neither files of the folder nor packages, some of which bear the names of modules that Python has by now.

    msgspec imports uuid, `runtime.ops.native` contextvars and `runtime.metrics.running_median` statistics.
    """
    for name in ("queue.py", "random.py", "tokenizers.py", "headrace.py", "pip.py"):
        (project / name).write_text(f"raise SystemExit('{name} of the folder')\n")
    backports = [packages(installed) / f"{name}.py" for name in ("contextvars", "statistics", "uuid")]
    for backport in backports:
        backport.write_text(f"raise SystemExit('the package {backport.stem}')\n")
    try:
        assert run_in(project, [installed / "python", installed / "talk", model], path=None)
        assert run_in(project, [installed / "headrace", "run", "hi", "-m", model, "-n", "2"], path=None)
    finally:
        for backport in backports:
            backport.unlink()

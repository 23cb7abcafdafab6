"""Builds of an installation on Linux: nothing before the wheel step, and no kernels without a compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")


def test_metadata_needs_no_compiler(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    prepare = "import sys, scikit_build_core.build as b; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
    env = {**os.environ, "CXX": "/nonexistent", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", prepare, tmp_path], cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / done.stdout.splitlines()[-1] / "METADATA").is_file()


def test_a_build_without_a_compiler_succeeds_and_installs_nothing(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None or ninja is None:
        pytest.skip("no cmake and ninja")
    build = tmp_path / "build"
    installed = tmp_path / "installed"
    for step in (
        ["-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"],
        ["--build", build],
        ["--install", build, "--component", "headrace", "--prefix", installed],
    ):
        env = {**os.environ, "CXX": "/nonexistent"}
        done = subprocess.run([cmake, *step], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
    assert not list(installed.rglob("*.so"))

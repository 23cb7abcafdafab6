"""Contents of an installation on a Mac: the wheel as it is built there, from the build backend that is told so.

One wheel for every Python and every Mac, with no compiler asked for: Metal does the work of the CPU kernels.
"""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("scikit_build_core", reason="builds the wheel")

_BUILD = """
import platform, sys, sysconfig
sysconfig.get_config_vars()  # of this Python, read while it may still know where it is
import scikit_build_core.build as backend
import scikit_build_core.build.wheel
import scikit_build_core.builder.get_requires
import scikit_build_core.settings.skbuild_read_settings
sys.platform = "darwin"
platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"
platform.mac_ver = lambda *_, **__: ("15.3.1", ("", "", ""), "arm64")
assert backend.get_requires_for_build_wheel() == [], "needs something to build with"
print(backend.build_wheel(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    without_tools = {**os.environ, "PATH": str(folder)}
    command = [sys.executable, "-c", _BUILD, folder]
    done = subprocess.run(command, cwd=ROOT, env=without_tools, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def test_the_wheel_fits_every_python_and_every_mac(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (facts,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: true" in facts
    assert "Tag: py3-none-any" in facts


def test_the_wheel_has_all_of_the_program_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    kinds = (".py", ".pyi", ".toml", ".json", ".tcss", ".txt", ".typed", ".html")
    sources = [path for top in ("app", "models", "runtime", "assets") for path in (ROOT / top).rglob("*")]
    wanted = {
        f"headrace/{path.relative_to(ROOT).as_posix()}"
        for path in sources
        if path.suffix in kinds and "screenshots" not in path.parts and path.parts[-2] != "tests"
    }
    wanted |= {f"headrace/{path.name}" for path in (ROOT / "headrace").iterdir() if path.is_file()}
    assert found == wanted


def test_the_wheel_requires_mlx_with_metal_and_starts_by_its_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {
            name.rsplit("/", 1)[1]: archive.read(name).decode() for name in archive.namelist() if "dist-info" in name
        }
    facts = Parser().parsestr(files["METADATA"])
    requirements = [Requirement(text) for text in facts.get_all("Requires-Dist", [])]
    for machine, expected in (("arm64", {"mlx", "mlx-lm"}), ("x86_64", set())):  # there are no wheels for Intel
        mac = {"platform_system": "Darwin", "platform_machine": machine, "extra": ""}
        wanted = {each.name for each in requirements if each.marker is None or each.marker.evaluate(mac)}
        assert {name for name in wanted if name.startswith("mlx")} == expected
    assert facts["Requires-Python"] == ">=3.11"
    assert "headrace = headrace.app.cli.main:main" in files["entry_points.txt"]

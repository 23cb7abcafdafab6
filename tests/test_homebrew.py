"""The Homebrew formula: its resources against pyproject, its Ruby, and its commands."""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tests.support.patience import PATIENCE_S
from tests.test_house import ROOT

FOLDER = ROOT / "docs/homebrew"
MAC = {"platform_system": "Darwin", "platform_machine": "arm64", "sys_platform": "darwin", "extra": ""}
TEXT = (FOLDER / "headrace.rb").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "formula.py"))


def _resources() -> list[tuple[str, str, str]]:
    """Return (name, URL, hash) of every wheel."""
    found = []
    for name, body in re.findall(r'^  resource "([^"]+)" do\n(.*?)^  end', TEXT, re.DOTALL | re.MULTILINE):
        wheels = re.findall(r'url "([^"]+)", using: :nounzip\s+sha256 "([0-9a-f]{64})"', body)
        found += [(name, url, digest) for url, digest in wheels]
    return found


def test_every_dependency_of_a_mac_is_a_resource_that_fits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate(MAC)]
    versions = {name: parse_wheel_filename(url.rpartition("/")[2])[1] for name, url, _ in _resources()}
    assert "mlx" in {one.name for one in wanted}
    wrong = [str(one) for one in wanted if versions.get(canonicalize_name(one.name)) not in one.specifier]
    assert not wrong, "run docs/homebrew/formula.py again"


def test_resources_are_wheels_of_the_package_index_for_apple_silicon() -> None:
    resources = _resources()
    names = [name for name, _, _ in resources]
    assert names == sorted(names)
    assert len(resources) == TEXT.count("sha256")
    for name, url, _ in resources:
        assert url.startswith("https://files.pythonhosted.org/packages/")
        found, _, _, tags = parse_wheel_filename(url.rpartition("/")[2])
        assert found == name
        platforms = {tag.platform for tag in tags}
        assert "any" in platforms or any(one.endswith(("_arm64", "_universal2")) for one in platforms)
        assert {tag.interpreter for tag in tags} <= {"py3", "py2", "cp314", *(f"cp3{n}" for n in range(6, 15))}


def test_the_homebrew_formula_is_the_scripts_output(script: dict[str, Any]) -> None:
    wheels = [script["Wheel"](name, "", url, digest, script["_macos"](url)) for name, url, digest in _resources()]
    head = re.findall(r"^  ((?:license|head) .*)$", TEXT, re.MULTILINE)
    assert script["formula"](wheels, head) == TEXT
    released = script["formula"](wheels, ['url "https://example.org/h.whl", using: :nounzip', 'sha256 "0"', "license"])
    assert "buildpath" not in released
    assert '(libexec/"wheels").install Dir["*.whl"]' in released
    assert max(len(line) for line in TEXT.splitlines() if " url " not in line) <= 118


@pytest.mark.skipif(shutil.which("ruby") is None, reason="no Ruby")
def test_the_formula_is_valid_ruby() -> None:
    done = subprocess.run(["ruby", "-wc", FOLDER / "headrace.rb"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Syntax OK\n", "")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("uv") is None, reason="no uv")
@pytest.mark.skipif(sys.platform != "linux", reason="`brew` itself does it on a Mac")
def test_the_formulas_commands_install_headrace_from_resources_alone(script: dict[str, Any], tmp_path: Path) -> None:
    """As `brew` runs them, with the resources of this machine's platform, and without an index."""
    wheels = tmp_path / "wheels"
    venv = tmp_path / "venv"
    wheels.mkdir()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    # Building a wheel for Linux needs nanobind, too; its kernels take a minute and are no part of a Mac's.
    platform = f"{os.uname().machine}-manylinux_2_36"
    needed = script["resolve"](platform, python, build=script["BUILD"] + "nanobind==3.1.0\n")
    for wheel in needed:
        with urllib.request.urlopen(wheel.url, timeout=PATIENCE_S) as answer:
            content = answer.read()
        assert hashlib.sha256(content).hexdigest() == wheel.sha256
        (wheels / wheel.url.rpartition("/")[2]).write_bytes(content)
    environment = {**os.environ, "SKBUILD_WHEEL_CMAKE": "false", "PIP_CONFIG_FILE": os.devnull}
    folders = {
        "VENV": str(venv),
        "WHEELS": str(wheels),
        "SOURCE": str(ROOT),
        f"python{script['PYTHON']}": sys.executable,
    }
    for command in (*script["INSTALL"], *script["POST_INSTALL"]):
        words = [
            folders.get(word, word).replace("VENV/", f"{venv}/").replace("=WHEELS", f"={wheels}") for word in command
        ]
        subprocess.run(words, check=True, env=environment, timeout=10 * PATIENCE_S)
    shown = subprocess.run([venv / "bin/headrace", "--version"], check=True, capture_output=True, text=True)
    assert shown.stdout.startswith("headrace ")

"""The Homebrew formula beside this script, from the dependencies in pyproject.toml. Needs `uv` and the package index.

    python docs/homebrew/formula.py                                       # installs from a clone, with --HEAD
    python docs/homebrew/formula.py --url URL --wheel FILE --homepage URL # installs a released wheel

Every dependency is a wheel for Apple silicon, with the hash of the package index. `brew` rewrites library names in what
`install` leaves behind, and those of wheels have no room for longer names: wheels are unpacked in `post_install`.

Guard: tests/test_homebrew.py.
"""

import argparse
import hashlib
import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORMULA = Path(__file__).with_name("headrace.rb")
PYTHON = "3.14"
BUILD = "scikit-build-core>=1.1\n"  # of a clone; pure Python on a Mac
SYSTEMS = {14: "sonoma", 15: "sequoia", 26: "tahoe"}  # macOS versions that wheels differ for
_TAG = re.compile(r"-macosx_(\d+)_\d+_(?:arm64|universal2)\.whl$")  # -macosx_14_0_arm64.whl
_WIDTH = 118  # columns of `brew style`

# Commands of `brew install` and `brew postinstall`. VENV and WHEELS lie in libexec; SOURCE is the clone.
INSTALL = (
    (f"python{PYTHON}", "-m", "venv", "VENV"),
    ("VENV/bin/pip", "wheel", "--no-index", "--find-links=WHEELS", "--no-deps", "--wheel-dir=WHEELS", "SOURCE"),
)
POST_INSTALL = (("VENV/bin/pip", "install", "--no-index", "--find-links=WHEELS", "headrace"),)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the package index. macos: the oldest version it runs on, 0 for any."""

    name: str
    version: str
    url: str
    sha256: str
    macos: int = 0


def all_wheels() -> list[Wheel]:
    """Return the wheels of every macOS version, by name."""
    found = {wheel.url: wheel for version in SYSTEMS for wheel in resolve(macos=f"{version}.0")}
    return sorted(found.values(), key=lambda wheel: wheel.name)


def resolve(
    platform: str = "aarch64-apple-darwin", python: str = PYTHON, macos: str = "14.0", build: str = BUILD
) -> list[Wheel]:
    """Return the wheels of all dependencies, by name. build: requirements of building headrace itself.

    Raises CalledProcessError if there is no solution.
    """
    with tempfile.TemporaryDirectory() as folder:
        needed, lock = Path(folder, "build.in"), Path(folder, "pylock.toml")
        needed.write_text(build, encoding="utf-8")
        command = ["uv", "pip", "compile", "--quiet", ROOT / "pyproject.toml", needed, "--only-binary", ":all:"]
        command += ["--extra", "report"]  # nobody adds a package to a keg
        command += ["--python-platform", platform, "--python-version", python, "--format", "pylock.toml", "-o", lock]
        subprocess.run(command, check=True, env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": macos})
        packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    return [
        Wheel(package["name"], package["version"], wheel["url"], wheel["hashes"]["sha256"], _macos(wheel["url"]))
        for package in packages
        for wheel in package["wheels"]
    ]


def formula(wheels: Sequence[Wheel], source: Sequence[str]) -> str:
    """Return the text of the formula. source: its lines on homepage, URL and hash."""
    lines = [
        "# Made by docs/homebrew/formula.py.",
        "class Headrace < Formula",
        '  desc "Run language models locally and see what every token costs"',
        *(f"  {line}" for line in source),
        "",
        "  depends_on arch: :arm64",
        "  depends_on macos: :sonoma",
        f'  depends_on "python@{PYTHON}"',
        "",
        '  skip_clean "libexec"',
        "",
    ]
    for name in dict.fromkeys(wheel.name for wheel in wheels):
        lines += [*_resource(name, [wheel for wheel in wheels if wheel.name == name]), ""]
    lines += [
        "  def install",
        '    resources.each { |wheel| wheel.stage(libexec/"wheels") }',
        *_commands(INSTALL if source[-1].startswith("head") else INSTALL[:1]),
        *([] if source[-1].startswith("head") else ['    (libexec/"wheels").install Dir["*.whl"]']),
        '    (bin/"headrace").write_env_script libexec/"venv/bin/headrace", {}',
        "  end",
        "",
        "  def post_install",
        *_commands(POST_INSTALL),
        "  end",
        "",
        "  test do",
        '    assert_match "headrace", shell_output("#{bin}/headrace --version")',
        "  end",
        "end",
    ]
    return "\n".join(lines) + "\n"


def _resource(name: str, wheels: Sequence[Wheel]) -> list[str]:
    """Return the stanza of a package; several wheels of it differ in the macOS that they need."""
    by_system = {max(wheel.macos, min(SYSTEMS)): wheel for wheel in sorted(wheels, key=lambda wheel: wheel.macos)}
    lines = [f'  resource "{name}" do']
    for number, (version, wheel) in enumerate(sorted(by_system.items())):
        newest = number == len(by_system) - 1
        block = [f'url "{wheel.url}", using: :nounzip', f'sha256 "{wheel.sha256}"']
        if len(by_system) == 1:
            lines += [f"    {line}" for line in block]
        else:
            lines += [f"    on_{SYSTEMS[version]}{' :or_newer' if newest else ''} do"]
            lines += [*(f"      {line}" for line in block), "    end"]
    return [*lines, "  end"]


def _commands(commands: Sequence[Sequence[str]]) -> list[str]:
    lines = []
    for command in commands:
        lines.append(f"    system {_ruby(command[0])}")
        for word in map(_ruby, command[1:]):
            lines[-1] += ","
            fits = len(lines[-1]) + len(word) + 2 <= _WIDTH
            lines = [*lines[:-1], f"{lines[-1]} {word}"] if fits else [*lines, f"           {word}"]
    return lines


def _ruby(word: str) -> str:
    """Return a word of a command as Ruby."""
    folder, _, rest = word.partition("/")
    if folder == "VENV":
        return f'libexec/"venv/{rest}"' if rest else 'libexec/"venv"'
    return "buildpath" if word == "SOURCE" else f'"{word.replace("WHEELS", "#{libexec}/wheels")}"'


def _macos(url: str) -> int:
    found = _TAG.search(url)
    return int(found[1]) if found else 0


def _source(arguments: argparse.Namespace) -> list[str]:
    """Return the formula's lines on where headrace comes from."""
    if not arguments.url:
        clone = 'file://#{ENV.fetch("HOMEBREW_CLONE", "")}'
        return ['license "MIT"', f'head "{clone}", using: :git, branch: "main"']
    digest = hashlib.sha256(arguments.wheel.read_bytes()).hexdigest()
    homepage = [f'homepage "{arguments.homepage}"'] if arguments.homepage else []
    return [*homepage, f'url "{arguments.url}", using: :nounzip', f'sha256 "{digest}"', 'license "MIT"']


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write headrace.rb.")
    parser.add_argument("--url", help="where a released wheel is found")
    parser.add_argument("--wheel", type=Path, help="the same wheel as a file, for its hash")
    parser.add_argument("--homepage")
    given = parser.parse_args()
    if bool(given.url) != bool(given.wheel):
        parser.error("--url and --wheel go together")
    FORMULA.write_text(formula(all_wheels(), _source(given)), encoding="utf-8")

"""`headrace --version`: installed, and from a source tree that was never installed."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("installed", "said"), [(True, "1.2.3"), (False, "(source tree, not installed)")])
def test_version_with_and_without_package_metadata(tmp_path: Path, installed: bool, said: str) -> None:
    """A search path on which there is only what is put there."""
    (tmp_path / "click").symlink_to(Path(click.__file__).parent)
    (tmp_path / "headrace").symlink_to(ROOT / "headrace")
    if installed:
        (tmp_path / "headrace-1.2.3.dist-info").mkdir()
        metadata = tmp_path / "headrace-1.2.3.dist-info" / "METADATA"
        metadata.write_text("Metadata-Version: 2.1\nName: headrace\nVersion: 1.2.3\n")
    done = subprocess.run(
        [sys.executable, "-S", "-m", "headrace", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"headrace {said}\n", "")

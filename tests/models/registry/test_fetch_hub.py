"""Downloads from a hub over HTTP on the loopback interface, by the real huggingface_hub."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from filelock import FileLock
from huggingface_hub import file_download

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.registry.fetch_hub import HubFiles, fetch_adapter, fetch_header, fetch_hub
from headrace.models.registry.hub_cache import cached_bytes, delete_cached, remove_leftovers
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.progress import silent
from headrace.models.registry.source import parse_source
from headrace.models.registry.store import CachedFiles
from headrace.runtime.errors import (
    CheckpointError,
    FetchError,
    HeadraceError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from tests.support.checkpoints import WHOLE_CONFIG, shard, tensor
from tests.support.gguf_models import write_gguf
from tests.support.hub_server import HubServer, point_at
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # huggingface_hub keeps its connections open

WEIGHTS = shard({"a": tensor("U8", [400_000], 0)}, 400_000)
MODEL = {
    "config.json": json.dumps(WHOLE_CONFIG).encode(),
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# no",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"\x80\x04.",
    "onnx/model.json": b"{}",
}
HUB = HubId("org/name")


def names(files: HubFiles) -> set[str]:
    return {str(path.relative_to(files.folder)) for path in files.folder.rglob("*") if path.is_file()}


ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}


def test_only_files_of_an_adapter_are_fetched(hub: HubServer) -> None:
    hub.add("org/lora", ADAPTER)
    folder = fetch_adapter(HubId("org/lora"), silent)
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    asked = len(hub.requests)
    assert fetch_adapter(HubId("org/lora"), silent, fetch=False) == folder
    assert len(hub.requests) == asked


@pytest.mark.parametrize("name", ["org/lora:F16", "org/lora/lora-f16.gguf", "org/gguf"])
def test_an_adapter_in_a_gguf_is_fetched_by_its_name(hub: HubServer, name: str) -> None:
    hub.add("org/lora", {**ADAPTER, "lora-f16.gguf": b"GGUF", "lora-q8_0.gguf": b"GGUF8"})
    hub.add("org/gguf", {"lora-f16.gguf": b"GGUF", "README.md": b""})
    source = parse_source(name)
    assert isinstance(source, HubId)
    file = fetch_adapter(source, silent)
    assert (file.name, file.read_bytes()) == ("lora-f16.gguf", b"GGUF")
    assert fetch_adapter(source, silent, fetch=False) == file


def test_a_file_that_is_no_adapter_is_refused(hub: HubServer) -> None:
    hub.add("org/lora", {**ADAPTER, "sub/adapter_config.json": b"{}"})
    with pytest.raises(CheckpointError, match=r"no (adapter|weights)"):
        fetch_adapter(HubId("org/lora", file="sub"), silent)
    with pytest.raises(CheckpointError, match="no adapter"):
        fetch_adapter(HubId("org/lora", quantization="F16"), silent)


def test_an_adapter_as_a_pickle_is_refused(hub: HubServer) -> None:
    hub.add("org/lora", {"adapter_config.json": b"{}", "adapter_model.bin": b"\x80\x04."})
    with pytest.raises(CheckpointError, match="has no adapter"):
        fetch_adapter(HubId("org/lora"), silent)


def test_only_files_of_the_model_are_fetched(hub: HubServer) -> None:
    repo = hub.add("org/name", MODEL)
    files = fetch_hub(HUB)
    assert names(files) == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert (files.commit, files.gguf, files.licence) == (repo.commit, None, "mit")
    assert open_checkpoint(files.folder).nbytes == 400_000


def test_progress_goes_from_nothing_to_all_and_then_verifies(hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    reports: list[tuple[str, int, int | None]] = []
    fetch_hub(HUB, progress=lambda stage, done, total: reports.append((stage, done, total)))
    downloading = [(done, total) for stage, done, total in reports if stage == "downloading"]
    total = sum(
        len(MODEL[name]) for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    )
    assert {stated for _, stated in downloading} == {total}
    counts = [done for done, _ in downloading]
    assert counts == sorted(counts)
    assert counts[-1] == total
    assert reports[-1] == ("verifying", len(WEIGHTS), len(WEIGHTS))


def test_progress_comes_in_steps_that_a_slow_connection_takes_seconds_for(hub: HubServer) -> None:
    hub.add("org/name", {**MODEL, "model.safetensors": shard({"a": tensor("U8", [3 << 20], 0)}, 3 << 20)})
    counts: list[int] = []
    fetch_hub(HUB, progress=lambda stage, done, _: counts.append(done) if stage == "downloading" else None)
    assert max(after - before for before, after in pairwise(counts)) <= 256 << 10


def test_second_fetch_sends_no_weights_again(hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    first = fetch_hub(HUB)
    assert hub.fetched("model.safetensors") == 1
    assert fetch_hub(HUB) == first
    assert hub.fetched("model.safetensors") == 1


def test_a_new_commit_is_a_new_snapshot_of_the_same_weights(hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    old = fetch_hub(HUB)
    hub.add("org/name", MODEL | {"tokenizer.json": b'{"new": 1}'})
    new = fetch_hub(HUB)
    assert new.commit != old.commit
    assert (new.folder / "tokenizer.json").read_bytes() == b'{"new": 1}'
    assert (old.folder / "tokenizer.json").read_bytes() == b"{}"
    assert hub.fetched("model.safetensors") == 1


def test_revisions_are_fetched_by_name_and_missing_ones_refused(hub: HubServer) -> None:
    hub.add("org/name", MODEL, revisions={"main", "v2", "refs/pr/1"})
    for revision in ("v2", "refs/pr/1"):
        assert fetch_hub(HubId("org/name", revision)).folder.is_dir()
    with pytest.raises(ModelNotFoundError, match="v3"):
        fetch_hub(HubId("org/name", "v3"))


def test_broken_transfer_resumes(hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    hub.truncate.add("model.safetensors")
    files = fetch_hub(HUB)
    assert (files.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched("model.safetensors") == 2


def test_damaged_weights_are_refused_and_deleted(hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    hub.damage.add("model.safetensors")
    with pytest.raises(FetchError, match="damaged"):
        fetch_hub(HUB)
    hub.damage.clear()
    assert (fetch_hub(HUB).folder / "model.safetensors").read_bytes() == WEIGHTS


def test_code_is_refused_before_the_weights_are_fetched(hub: HubServer) -> None:
    hub.add("org/name", MODEL | {"config.json": json.dumps({"model_file": "evil.py"}).encode()})
    with pytest.raises(CheckpointError, match="model_file"):
        fetch_hub(HUB)
    assert hub.fetched("model.safetensors") == 0


@pytest.mark.parametrize("config", [b"", b"[]", b"[" * 10_000])
def test_an_invalid_config_is_refused(hub: HubServer, config: bytes) -> None:
    hub.add("org/name", MODEL | {"config.json": config})
    with pytest.raises(CheckpointError):
        fetch_hub(HUB)
    assert hub.fetched("model.safetensors") == 0


@pytest.mark.parametrize(
    ("files", "kind", "word"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"."}, CheckpointError, "pickles"),
        ({"config.json": b"{}", "README.md": b""}, CheckpointError, "no weights"),
        ({"m-00001-of-00002.gguf": b""}, CheckpointError, "lacks"),
        ({"m-Q9_X.gguf": b"", "m-Q1_Y.gguf": b""}, UnsupportedModelError, "quantization"),
    ],
)
def test_repositories_without_a_usable_model_are_refused(
    hub: HubServer, files: dict[str, bytes], kind: type[HeadraceError], word: str
) -> None:
    hub.add("org/name", files)
    with pytest.raises(kind, match=word):
        fetch_hub(HUB)


def test_a_folder_of_a_repository_is_a_model(hub: HubServer) -> None:
    hub.add("org/name", {f"4bit/{name}": content for name, content in MODEL.items()} | {"README.md": b""})
    files = fetch_hub(HubId("org/name", file="4bit"))
    assert files.folder.name == "4bit"
    assert names(files) == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert set(files.names) == names(files)
    assert open_checkpoint(files.folder).nbytes == 400_000


def test_gguf_repository_gives_one_file(hub: HubServer, tmp_path: Path) -> None:
    kinds = ("Q2_K", "Q8_0", "Q4_K_M", "f16")
    content = write_gguf(tmp_path / "m.gguf", "llama").read_bytes()
    hub.add("org/name", {f"m-{kind}.gguf": content + kind.encode() for kind in kinds} | {"mmproj-Q4_K_M.gguf": b"eyes"})
    files = fetch_hub(HUB)
    assert files.gguf is not None
    assert files.gguf.read_bytes() == content + b"Q4_K_M"
    assert names(files) == {"m-Q4_K_M.gguf"}
    named = fetch_hub(HubId("org/name", file="m-Q8_0.gguf"))
    assert named.gguf is not None
    assert named.gguf.name == "m-Q8_0.gguf"
    with pytest.raises(ModelNotFoundError):
        fetch_hub(HubId("org/name", file="m-Q6_K.gguf"))


def test_missing_private_and_gated_repositories_are_errors(hub: HubServer) -> None:
    hub.add("org/private", MODEL, private=True)
    hub.add("org/gated", MODEL, gated=True)
    for name in ("org/missing", "org/private"):
        with pytest.raises(ModelNotFoundError):
            fetch_hub(HubId(name))
    with pytest.raises(FetchError, match="gated") as caught:
        fetch_hub(HubId("org/gated"))
    assert "HF_TOKEN" in str(caught.value.hint)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_failing_hub_is_a_one_line_error(hub: HubServer, status: int) -> None:
    hub.add("org/name", MODEL)
    hub.status = status
    with pytest.raises(FetchError, match=str(status)) as caught:
        fetch_hub(HUB)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_a_one_line_error(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    hub.add("org/name", MODEL)
    nothing_free = shutil.disk_usage("/")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nothing_free)  # huggingface_hub warns of it
    monkeypatch.setattr(file_download, "_chmod_and_move", full)
    with pytest.raises(FetchError, match="no space left in the hub's cache") as raised:
        fetch_hub(HUB)
    assert "HF_HOME" in (raised.value.hint or "")
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]


def test_without_network_the_cache_serves(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", MODEL)
    online = fetch_hub(HUB)
    # what another tool left in the cache has its branch name recorded
    refs = online.folder.parents[1] / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(online.commit)
    point_at("http://127.0.0.1:9", tmp_path / "cache", monkeypatch)
    offline = fetch_hub(HUB)
    assert (offline.folder, offline.commit) == (online.folder, online.commit)
    with pytest.raises(FetchError, match="cannot be reached"):
        fetch_header(HubId("org/other"))
    with pytest.raises(FetchError, match="cannot be reached") as caught:
        fetch_hub(HubId("org/other"))
    assert "\n" not in str(caught.value)


def test_without_network_the_cache_serves_a_gguf_next_to_a_config(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", "llama").read_bytes()
    hub.add("org/name", {"config.json": MODEL["config.json"], "m-Q8_0.gguf": gguf})
    online = fetch_hub(HUB)
    refs = online.folder.parents[1] / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(online.commit)
    point_at("http://127.0.0.1:9", tmp_path / "cache", monkeypatch)
    assert fetch_hub(HUB).gguf == online.gguf


def test_the_error_names_hf_hub_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", MODEL)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for fetch in (fetch_header, fetch_hub):
        with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set") as caught:
            fetch(HUB)
        assert "unset HF_HUB_OFFLINE" in (caught.value.hint or "")


def test_deleting_from_the_cache(hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    files = fetch_hub(HUB)
    revision = CachedFiles("org/name", files.commit)
    assert cached_bytes(revision) >= len(WEIGHTS)
    assert cached_bytes(CachedFiles("org/name", "0" * 40)) == 0
    assert delete_cached(revision) >= len(WEIGHTS)
    assert not files.folder.exists()
    assert delete_cached(revision) == 0


def test_deleting_a_gguf_from_the_cache_leaves_the_others(hub: HubServer, tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf", "llama").read_bytes()
    other = write_gguf(tmp_path / "n.gguf", "qwen3").read_bytes()
    hub.add("org/name", {"m-Q4_0.gguf": content, "sub/m-Q8_0.gguf": content, "n-F16.gguf": other})
    files = [fetch_hub(HubId("org/name", file=name)) for name in ("m-Q4_0.gguf", "sub/m-Q8_0.gguf", "n-F16.gguf")]
    first, second, third = (CachedFiles("org/name", each.commit, each.names[0]) for each in files)
    assert delete_cached(first) == 0  # the second has the same content
    assert cached_bytes(second) == delete_cached(second) == len(content)
    assert delete_cached(second) == delete_cached(CachedFiles("org/name", first.commit, "../../../x.gguf")) == 0
    repo = files[0].folder.parents[1]
    assert [path.name for path in repo.glob("snapshots/**/*.gguf")] == ["n-F16.gguf"]
    assert len(list((repo / "blobs").iterdir())) == 1
    assert cached_bytes(third) == len(other)


def test_abandoned_partial_downloads_are_deleted(hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    folder = fetch_hub(HUB).folder
    blob = (folder / "model.safetensors").resolve()
    dead, held, fresh, other = (
        blob.with_name(f"{name}.incomplete")
        for name in (f"{blob.name}.01234567", f"{(folder / 'tokenizer.json').resolve().name}.0", f"{blob.name}.1", "2")
    )
    for path in (dead, held, fresh, other):
        path.write_bytes(b"x")
    for path in (dead, held, other):
        os.utime(path, (0, 0))
    lock = blob.parents[2] / ".locks" / "models--org--name" / f"{held.name.split('.')[0]}.lock"
    with FileLock(lock):  # as a download of the same content in another process
        fetch_hub(HUB)
    assert sorted(blob.parent.glob("*.incomplete")) == sorted((held, fresh, other))
    fetch_hub(HUB)
    assert sorted(blob.parent.glob("*.incomplete")) == sorted((fresh, other))
    assert open_checkpoint(folder).nbytes == 400_000


def test_a_running_download_holds_its_lock(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.add("org/name", MODEL)
    hub.stall = threading.Event()
    fetching = threading.Thread(target=lambda: fetch_hub(HUB))
    fetching.start()
    assert hub.stall.wait(PATIENCE_S)
    try:
        digest = hashlib.sha256(WEIGHTS).hexdigest()
        (beginning,) = tmp_path.rglob(f"{digest}.*.incomplete")
        os.utime(beginning, (0, 0))
        remove_leftovers([beginning.with_name(digest)])
        assert beginning.exists()
    finally:
        hub.stall = None
        fetching.join()
    assert not beginning.exists()


def test_ctrl_c_ends_a_stalled_download_and_the_next_run_fetches_it(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/name", MODEL)
    hub.stall = threading.Event()
    script = (
        "import os; from headrace.models.registry.fetch_hub import fetch_hub\n"
        "from headrace.models.registry.hub_id import HubId\n"
        "try: fetch_hub(HubId('org/name'))\n"
        "except KeyboardInterrupt: print('interrupted', flush=True); os._exit(0)"  # at once, as the command does
    )
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HOME": str(tmp_path / "cache")}
    environment |= {"HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert hub.stall.wait(PATIENCE_S)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert output == "interrupted\n"
    hub.stall = None
    assert (fetch_hub(HUB).folder / "model.safetensors").read_bytes() == WEIGHTS

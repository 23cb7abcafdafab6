"""Models of Ollama and LM Studio, in folders laid out as those programs do: found by name, listed, run."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from headrace.app.model_info.model_report import foreign_documents
from headrace.models.registry import fetch_hub
from headrace.models.registry.find_shape import find_shape
from headrace.models.registry.hub_cache import cached_models
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.other_programs import find_foreign, foreign_models
from headrace.models.registry.resolve import find_source, installed_name, names_on_disk, resolve
from headrace.models.registry.source import CatalogName, LocalDirectory, LocalGGUF, parse_source
from headrace.models.registry.store import Store
from headrace.runtime.errors import ModelNotFoundError, UnsupportedModelError
from tests.support.gguf_models import write_adapter, write_gguf, write_split
from tests.support.ollama import add_to_ollama
from tests.support.tiny import write_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder in which no program has a model yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / ".ollama" / "models"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home / "store")


@pytest.mark.usefixtures("home")
def test_folders_of_a_user_without_a_home_have_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", "~nobody-has-this-name/models")
    assert list(foreign_models()) == []


def test_a_model_of_ollama_runs_by_its_name(home: Path, store: Store) -> None:
    blob = add_to_ollama(home, "registry.ollama.ai/library/tiny/1b")
    add_to_ollama(home, "registry.ollama.ai/library/other/latest")
    assert [model.name for model in foreign_models()] == ["other:latest", "tiny:1b"]
    assert find_source("tiny:1b", store) == find_source("Tiny:1B", store) == LocalGGUF(blob)
    assert find_source("other", store) == LocalGGUF(blob)
    with pytest.raises(ModelNotFoundError, match="not in the store"):
        resolve("tiny:1b", store=store, fetch=False)
    assert (resolve("tiny:1b", store=store).path / "config.json").is_file()
    assert resolve("tiny:1b", store=store, fetch=False).path.parent == store.root
    assert installed_name("tiny:1b", store) == resolve("tiny:1b", store=store).stored_as
    assert find_shape("tiny:1b", store)[1].context_length > 0


def test_models_of_ollama_are_found_with_namespace_and_host(home: Path, store: Store) -> None:
    blob = add_to_ollama(home, "registry.ollama.ai/someone/tiny/latest")
    add_to_ollama(home, "hf.co/org/name/Q4_K_M")
    assert [model.name for model in foreign_models()] == ["hf.co/org/name:Q4_K_M", "someone/tiny:latest"]
    for text in ("someone/tiny", "someone/tiny:latest", "hf.co/org/name:Q4_K_M", "org/name:q4_k_m", "org/name:Q4"):
        assert find_source(text, store) == LocalGGUF(blob), text
    for text in ("org/name", "hf.co/org/name", "https://huggingface.co/Org/Name", "org/name:latest"):
        assert find_source(text, store) == LocalGGUF(blob), text
    assert isinstance(find_source("org/name:Q8_0", store), HubId)
    assert isinstance(find_source("someone/tiny@v2", store), HubId)


def test_a_catalog_model_is_not_replaced_by_one_of_the_same_name(home: Path, store: Store) -> None:
    add_to_ollama(home, "registry.ollama.ai/library/qwen3.5-4b/latest")
    assert find_source("qwen3.5-4b", store) == CatalogName("qwen3.5-4b")
    assert isinstance(find_source("qwen3.5-4b:latest", store), LocalGGUF)


def test_an_adapter_of_ollama_is_applied(home: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(home / "headrace"))
    blob = add_to_ollama(home, "registry.ollama.ai/library/tuned/latest", adapters=1)
    assert find_source("tuned", store) == LocalGGUF(blob, blob.with_name("sha256-ada"))
    adapter = resolve("tuned", store=store).adapter
    assert adapter == resolve(f"{blob}+{blob.with_name('sha256-ada')}", store=store).adapter
    assert adapter is not None
    with pytest.raises(UnsupportedModelError, match="has an adapter already"):
        resolve(f"tuned+{blob.with_name('sha256-ada')}", store=store)


def test_adapters_of_ollama_are_not_left_out_silently(home: Path, store: Store) -> None:
    blob = add_to_ollama(home, "registry.ollama.ai/library/tuned/latest", adapters=2)
    with pytest.raises(UnsupportedModelError, match="tuned:latest: Ollama applies several adapters"):
        find_source("tuned", store)
    add_to_ollama(home, "registry.ollama.ai/library/tuned/latest", adapters=1)
    blob.with_name("sha256-ada").unlink()
    assert foreign_models() == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"layers": 3}', '{"layers": [{"mediaType": "application/vnd.ollama.image.model"}]}']
)
def test_damaged_manifests_are_left_out(home: Path, text: str) -> None:
    add_to_ollama(home, "registry.ollama.ai/library/tiny/latest")
    manifest = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.write_text(text)
    assert foreign_models() == []


def test_a_manifest_reads_nothing_outside_the_store(home: Path) -> None:
    add_to_ollama(home, "registry.ollama.ai/library/tiny/latest")
    manifest = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    (home / "secret").write_text("x")
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "../../../secret"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    assert foreign_models() == []


def test_models_of_lm_studio_are_found_by_their_names(home: Path, store: Store) -> None:
    folder = home / ".lmstudio" / "models"
    mlx = write_model(folder / "mlx-community" / "tiny-4bit", "llama")
    several = folder / "bartowski" / "Tiny-GGUF"
    several.mkdir(parents=True)
    for kind in ("Q4_K_M", "Q8_0"):
        write_gguf(several / f"Tiny-{kind}.gguf", "llama")
    alone = folder / "unsloth" / "Tiny-GGUF"
    alone.mkdir(parents=True)
    write_gguf(alone / "Tiny-F16.gguf", "llama")
    (alone / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert find_source("mlx-community/tiny-4bit", store) == LocalDirectory(mlx)
    assert find_source("bartowski/Tiny-GGUF:Q8_0", store) == LocalGGUF(several / "Tiny-Q8_0.gguf")
    assert find_source("bartowski/Tiny-GGUF/Tiny-Q4_K_M.gguf", store) == LocalGGUF(several / "Tiny-Q4_K_M.gguf")
    for text in ("bartowski/Tiny-GGUF", "bartowski/Tiny-GGUF:Q4", "Bartowski/tiny-gguf:q4_k"):
        assert find_source(text, store) == LocalGGUF(several / "Tiny-Q4_K_M.gguf")
    assert find_source("bartowski/Tiny-GGUF:Q8", store) == LocalGGUF(several / "Tiny-Q8_0.gguf")
    assert isinstance(find_source("bartowski/Tiny-GGUF@main", store), HubId)
    assert isinstance(find_source("bartowski/Tiny", store), HubId)
    for text in ("unsloth/Tiny-GGUF", "unsloth/Tiny-GGUF:F16", "unsloth/Tiny-GGUF/Tiny-F16.gguf"):
        assert find_source(text, store) == LocalGGUF(alone / "Tiny-F16.gguf")
    assert isinstance(find_source("unsloth/Tiny-GGUF:Q8_0", store), HubId)
    assert find_foreign("nobody/nothing") is None
    rows = foreign_documents(store)
    assert [row["program"] for row in rows] == ["LM Studio"] * 4
    assert all(row["disk_bytes"] > 0 for row in rows)


@pytest.mark.parametrize("lm_studio", [".lmstudio", ".cache/lm-studio", "elsewhere"])
def test_models_of_lm_studio_are_found_where_its_settings_say(home: Path, store: Store, lm_studio: str) -> None:
    folder = home / "disk" / "llms" / "org" / "name"
    folder.mkdir(parents=True)
    file = write_gguf(folder / "name-Q8_0.gguf", "llama")
    settings = home / lm_studio / "settings.json"
    settings.parent.mkdir(parents=True)
    if lm_studio == "elsewhere":
        (home / ".lmstudio-home-pointer").write_text(f"{settings.parent}\n")
    settings.write_text(json.dumps({"language": "en", "downloadsFolder": str(home / "disk" / "llms")}))
    assert find_source("org/name", store) == LocalGGUF(file)
    settings.write_text("\ufeff" + settings.read_text())
    assert find_source("org/name", store) == LocalGGUF(file)
    for broken in ("", "{", "[]", "null", '{"downloadsFolder": 3}', '{"downloadsFolder": "llms"}', "[" * 100_000):
        settings.write_text(broken)
        assert foreign_models() == [], broken[:40]
    settings.write_bytes(b"\xff\0")
    assert foreign_models() == []


def test_ollama_and_lm_studio_prefer_quantizations_in_the_hubs_order(home: Path, store: Store) -> None:
    """The order is that of the hub's files."""
    folder = home / ".lmstudio" / "models" / "org" / "name"
    folder.mkdir(parents=True)
    larger = write_gguf(folder / "name-Q8_0.gguf", "llama")
    write_gguf(folder / "name-F16.gguf", "llama")
    assert find_source("org/name", store) == LocalGGUF(larger)
    blob = add_to_ollama(home, "hf.co/org/name/Q4_0")
    assert find_source("org/name", store) == find_source("org/name:Q4", store) == LocalGGUF(blob)
    assert find_source("org/name:Q8", store) == LocalGGUF(larger)
    usual = write_gguf(folder / "name-Q4_K_M.gguf", "llama")
    assert find_source("org/name", store) == find_source("org/name:Q4", store) == LocalGGUF(usual)


def test_files_without_a_known_quantization_leave_the_choice_to_the_hub(home: Path, store: Store) -> None:
    folder = home / ".lmstudio" / "models" / "org" / "name"
    folder.mkdir(parents=True)
    only = write_gguf(folder / "name-a.gguf", "llama")
    assert find_source("org/name", store) == LocalGGUF(only)
    assert isinstance(find_source("org/name:Q4", store), HubId)
    write_gguf(folder / "name-b.gguf", "llama")
    assert isinstance(find_source("org/name", store), HubId)


def test_a_set_that_lacks_a_part_is_left_to_the_hub(home: Path, store: Store) -> None:
    folder = home / ".lmstudio" / "models" / "org" / "name"
    folder.parent.mkdir(parents=True)
    first, _, last = write_split(folder)
    assert find_source("org/name", store) == LocalGGUF(first)
    last.unlink()
    assert isinstance(find_source("org/name", store), HubId)
    assert foreign_models() == []


def test_similar_names_begin_with_those_on_this_disk(home: Path, store: Store) -> None:
    add_to_ollama(home, "registry.ollama.ai/library/qwen3/270m")
    folder = home / ".lmstudio/models/org/qwen3-mine-GGUF"
    folder.mkdir(parents=True)
    write_gguf(folder / "m-Q8_0.gguf", "llama")
    resolve(str(write_gguf(home / "qwen3-own.gguf", "llama")), store=store)
    own = store.names()[0]
    assert names_on_disk(store) == [own, "qwen3:270m", "org/qwen3-mine-GGUF"]
    with pytest.raises(ModelNotFoundError) as error:
        resolve("qwen3", store=store, fetch=False)
    assert error.value.hint == f"did you mean {own} or qwen3:270m or org/qwen3-mine-GGUF?"


def test_a_missing_file_is_found_where_it_is(home: Path, store: Store) -> None:
    folder = home / ".lmstudio/models/org/name-GGUF"
    folder.mkdir(parents=True)
    write_gguf(folder / "m-Q8_0.gguf", "llama")
    file = write_gguf(home / "own.gguf", "llama")
    resolve(str(file), store=store)
    hints = {"m-Q8_0.gguf": "LM Studio has it: pass org/name-GGUF", "x.gguf": None}
    hints["./own.gguf"] = f"the store has it: pass {store.names()[0]}"
    for text, hint in hints.items():
        with pytest.raises(ModelNotFoundError, match="no such file") as error:
            find_source(text, store)
        assert error.value.hint == hint


def test_models_in_the_hubs_cache_are_listed_until_they_are_installed(home: Path, store: Store) -> None:
    repo = home / "hub" / "models--org--tiny-4bit"
    snapshot = repo / "snapshots" / ("1" * 40)
    write_model(snapshot, "llama")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    (repo / "refs" / "v2").write_text("2" * 40)  # was deleted
    vision = home / "hub" / "models--org--vit"
    shutil.copytree(repo, vision)
    (vision / "snapshots" / snapshot.name / "config.json").write_text('{"model_type": "vit"}')
    unfinished = home / "hub" / "models--org--unfinished"
    shutil.copytree(repo, unfinished)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (unfinished / "snapshots" / snapshot.name / "model.safetensors.index.json").write_text(json.dumps(index))
    rows = foreign_documents(store, cached_models())
    assert [(row["name"], row["program"], row["path"]) for row in rows] == [
        ("org/tiny-4bit", "hub's cache", str(snapshot))
    ]
    entry = store.root / "org--tiny-4bit"
    entry.mkdir(parents=True)
    origin = {"snapshot": str(snapshot), "repo": "org/tiny-4bit", "commit": snapshot.name}
    (entry / "headrace.json").write_text(json.dumps(origin))
    assert foreign_documents(store, cached_models()) == []


def test_ggufs_in_the_hubs_cache_are_listed_by_names_that_run(home: Path, store: Store) -> None:
    repo = home / "hub" / "models--org--tiny-GGUF"
    snapshot = repo / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs" / "refs" / "pr").mkdir(parents=True)
    for name in ("main", "refs/pr/1"):
        (repo / "refs" / name).write_text(snapshot.name)
    write_gguf(snapshot / "tiny-Q8_0.gguf", "llama")
    lora = write_adapter(snapshot / "tiny-lora.gguf", "llama")
    write_split(snapshot / "BF16")
    (snapshot / "tiny-00001-of-00002.gguf").write_bytes(b"GGUF")  # its second part is missing
    (snapshot / "mmproj-tiny.gguf").write_bytes(b"GGUF")
    cached = cached_models()
    names = ["org/tiny-GGUF/BF16/m-00001-of-00003.gguf", "org/tiny-GGUF/tiny-Q8_0.gguf"]
    names += [f"{name}@refs/pr/1" for name in names]
    assert sorted(row["name"] for row in foreign_documents(store, cached)) == sorted(names)
    adapters = [model for model in cached if model.is_adapter]
    assert [model.path for model in adapters] == [lora] * 2
    assert [str(parse_source(model.name)) for model in cached] == [model.name for model in cached]


def test_a_repository_name_means_its_gguf_in_the_hubs_cache(home: Path, store: Store) -> None:
    repo = home / "hub" / "models--org--tiny-GGUF"
    snapshot = repo / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    for name in ("tiny-Q8_0.gguf", "tiny-Q5_0.gguf"):
        write_gguf(snapshot / name, "llama")
    assert find_source("org/tiny-GGUF", store) == HubId("org/tiny-GGUF", file="tiny-Q5_0.gguf")
    assert find_source("org/tiny-GGUF:Q8", store) == HubId("org/tiny-GGUF", file="tiny-Q8_0.gguf")
    # Names of one file, or of one that the cache does not have
    for name in ("org/tiny-GGUF:Q8_0", "org/tiny-GGUF:Q4", "org/tiny-GGUF@main", "org/tiny-GGUF/tiny-Q4_0.gguf"):
        assert find_source(name, store) == parse_source(name)
    write_model(snapshot, "llama")
    assert find_source("org/tiny-GGUF", store) == HubId("org/tiny-GGUF")


def test_a_file_in_the_hubs_cache_is_installed_once_under_all_its_names(
    home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = home / "hub" / "models--org--tiny-GGUF"
    snapshot = repo / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    write_gguf(snapshot / "tiny-Q8_0.gguf", "llama")
    monkeypatch.setattr(fetch_hub, "_model_info", lambda *_, **__: None)  # offline
    names = ("org/tiny-GGUF", "org/tiny-GGUF:Q8", "org/tiny-GGUF:Q8_0", "org/tiny-GGUF/tiny-Q8_0.gguf")
    for first, entry in (
        ("org/tiny-GGUF", "org--tiny-GGUF%2Ftiny-Q8_0.gguf"),
        ("org/tiny-GGUF:Q8_0", "org--tiny-GGUF%3AQ8_0"),
    ):
        resolve(first, store=store)
        assert [resolve(name, store=store, fetch=False).stored_as for name in names] == [entry] * len(names)
        assert [installed_name(name, store) for name in names] == [entry] * len(names)
        store.remove(entry)
    with pytest.raises(ModelNotFoundError, match="not installed"):
        installed_name("org/tiny-GGUF", store)


def test_a_shard_of_a_name_that_no_file_can_have_is_missing(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--tiny"
    snapshot = write_model(repo / "snapshots" / ("1" * 40), "llama")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    assert [model.name for model in cached_models()] == ["org/tiny"]
    index = {"weight_map": {"model.norm.weight": "x" * 4000}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cached_models() == []

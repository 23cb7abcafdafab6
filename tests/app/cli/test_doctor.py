"""`headrace doctor`: what it finds wrong on recorded reports, how it prints, and its exit code."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from huggingface_hub import constants
from msgspec.structs import replace
from rich.cells import cell_len

import headrace
from headrace.app.cli.doctor import diagnosis
from headrace.app.cli.doctor.command import doctor, document, report_lines, sections
from headrace.app.cli.doctor.diagnosis import PACKAGES, DefaultModel, DoctorReport, Finding, Folder, findings
from headrace.app.config.settings import settings_path, write_default
from headrace.app.sessions.store import SessionStore, database_path
from headrace.app.versions import own_source, shadowed
from headrace.models.registry.store import Store
from headrace.runtime.machine import bandwidth, peaks
from headrace.runtime.machine.hardware import Machine, PowerState
from headrace.runtime.machine.memory import MemoryBudget
from headrace.runtime.machine.peaks import Peak
from headrace.runtime.machine.sensors import Readings
from tests.app.cli.test_models import install
from tests.support import commands
from tests.support.adapters import write_adapter
from tests.support.tiny import write_model

GIB = 2**30

MAC = DoctorReport(
    machine=Machine(
        backend="metal",
        device_name="Apple M4 Max",
        architecture="applegpu_g16s",
        memory_bytes=128 * GIB,
        device_memory_bytes=107 * GIB,
        os="macOS, Darwin 25.1.0 arm64",
        cpu="Apple M4 Max",
        physical_cores=16,
        usable_cores=16,
        isa=frozenset(),
    ),
    budget=MemoryBudget(107 * GIB, 107 * GIB, 5 * GIB, "recommended working set"),
    peak=Peak(480e9, 478e9, 492e9, 60, GIB, "mx.sum float32", "2026-11-20T05:46:44Z"),
    power=PowerState(
        on_battery=False, battery_percent=96, low_power_mode=False, throttled=False, thermal_pressure="nominal"
    ),
    swap_used=0,
    system={
        "kern.osproductversion": "26.1",
        "machdep.cpu.brand_string": "Apple M4 Max",
        "hw.perflevel0.physicalcpu": "12",
        "hw.perflevel1.physicalcpu": "4",
    },
    kernels={"kernels": "metal", "reason": "Metal kernels, and stock MLX operations"},
    versions=dict.fromkeys(("python", *PACKAGES), "1.0"),
    folders=[Folder("models", Path("/Users/x/models"), True, 500 * GIB), Folder("cache", Path("/c"), True, 500 * GIB)],
    default_model=DefaultModel("smollm2-135m", Path("/Users/x/models/smollm2-135m")),
    compiler=None,
    nvidia_driver=False,
)
assert MAC.machine is not None
MAC.machine.__dict__["gpu_cores"] = 40  # asked from ioreg on a real one

LINUX = replace(
    MAC,
    machine=replace(MAC.machine, backend="cpu", device_name="AMD EPYC", device_memory_bytes=None, os="Linux 6 x86_64"),
    power=PowerState(None, None, None, None),
    system={},
    kernels={"kernels": "native", "reason": "AVX-512"},
    compiler="g++",
)


def what(report: DoctorReport) -> list[str]:
    return [f"{finding.severity}: {finding.what}" for finding in findings(report)]


def plain(report: DoctorReport, problems: list[Finding]) -> str:
    """Return the report as it is printed into a pipe."""
    return "\n".join(line.plain for line in report_lines(sections(report), problems, None))


def test_healthy_machines_have_no_findings() -> None:
    assert findings(MAC) == []
    assert findings(LINUX) == []


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (replace(MAC, power=PowerState(True, 40, True, True)), ["battery", "low power mode", "throttled"]),
        (replace(MAC, power=PowerState(False, 40, False, False, "moderate")), ["warm"]),
        (replace(MAC, system={"sysctl.proc_translated": "1"}), ["broken: this Python runs under Rosetta"]),
        (replace(MAC, swap_used=6 * GIB), ["6.00 GiB of swap"]),
        (replace(MAC, budget=MemoryBudget(8 * GIB, GIB, GIB // 2, "free")), ["little memory"]),
        (replace(MAC, peak=replace(MAC.peak, bytes_per_second=100e9) if MAC.peak else None), ["under half"]),
        (replace(LINUX, peak=replace(LINUX.peak, busy=True) if LINUX.peak else None), ["while other programs"]),
        (replace(MAC, versions={**MAC.versions, "gguf": None}), ["broken: not installed: gguf"]),
        (replace(MAC, folders=[Folder("cache", Path("/c"), False, 0)]), ["broken: /c cannot be written"]),
        (replace(MAC, folders=[Folder("models", Path("/m"), True, 5)]), ["only 5 B of disk"]),
        (replace(LINUX, nvidia_driver=True), ["an NVIDIA GPU is present"]),
        (replace(LINUX, kernels={"kernels": "reference", "reason": "not built"}), ["not active: not built"]),
        (
            replace(MAC, kernels={"kernels": "reference", "reason": "add_norms differs"}),
            ["Metal kernels are not active"],
        ),
        (replace(LINUX, system={"machdep.cpu.brand_string": "Apple M1"}), ["this Mac has a GPU"]),
        (replace(MAC, machine=None, failures=[Finding("broken", "MLX does not work here: x", "y")]), ["MLX does not"]),
    ],
)
def test_each_problem_is_reported_with_a_hint(report: DoctorReport, expected: list[str]) -> None:
    found = what(report)
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))
    assert all(finding.do for finding in findings(report))


def test_a_small_address_space_is_not_reported_as_little_memory() -> None:
    [found] = findings(replace(LINUX, budget=MemoryBudget(GIB, GIB, GIB, "address space (ulimit -v)")))
    assert "ulimit" in found.do


@pytest.mark.parametrize(
    ("translated", "chip", "expected"),
    [("1", "Apple M4", "runs under Rosetta"), ("0", "Intel(R) Core(TM) i7", "this Mac has an Intel processor")],
)
def test_without_mlx_the_kind_of_python_is_the_only_finding(translated: str, chip: str, expected: str) -> None:
    """Advice to install MLX would fail: it has no wheels there."""
    system = {"sysctl.proc_translated": translated, "machdep.cpu.brand_string": chip}
    failures = [Finding("broken", "MLX does not work here: No module named 'mlx'", "reinstall")]
    versions = {**MAC.versions, "mlx": None, "mlx-lm": None}
    intel = replace(MAC, machine=None, budget=None, peak=None, system=system, versions=versions, failures=failures)
    [found] = what(intel)
    assert expected in found
    assert "pip install" not in findings(intel)[0].do


def test_energy_counters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(MAC, energy_parts="CPU and memory")
    assert ("energy", "read for CPU and memory") in sections(known)[0][1]
    assert ("energy", "no readable counter") in sections(MAC)[0][1]
    assert document(known, [])["energy_parts"] == "CPU and memory"
    assert known.machine is not None
    for joules, expected in ((5.0, "CPU"), (None, None)):
        readings = Readings(joules=joules, energy_parts="CPU")
        monkeypatch.setattr("headrace.app.cli.doctor.diagnosis.sensors", lambda _, found=readings: lambda: found)
        assert diagnosis._energy_parts(known.machine) == expected


def test_slow_kernels_are_explained_by_a_missing_compiler_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    slow = replace(LINUX, kernels={"kernels": "reference", "reason": "not built"})
    assert "reinstall" in findings(slow)[0].do
    assert "install a C++ compiler" in findings(replace(slow, compiler=None))[0].do
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    assert findings(slow)[0].do == "unset HEADRACE_KERNELS"


def test_no_hint_takes_headrace_from_a_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    monkeypatch.setattr(diagnosis, "own_source", lambda: "/clone/of/it")
    reference = {"kernels": "reference", "reason": "not built"}
    hints = [finding.do for finding in findings(replace(LINUX, kernels=reference))]
    hints += [finding.do for finding in findings(replace(LINUX, nvidia_driver=True))]
    assert hints == [
        "reinstall headrace: pip install --force-reinstall --no-deps /clone/of/it",
        "pip install '/clone/of/it[cuda]'",
    ]


@pytest.mark.parametrize(
    ("recorded", "source"),
    [
        ('{"url": "file:///home/me/a%20b", "dir_info": {"editable": true}}', "/home/me/a b"),
        ('{"url": "https://example.org/h.git", "vcs_info": {"vcs": "git"}}', "git+https://example.org/h.git"),
        ("{", "FOLDER_OF_HEADRACE"),
        (None, "FOLDER_OF_HEADRACE"),
    ],
)
def test_the_source_of_the_installation_is_named(
    recorded: str | None, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, _name: str) -> str | None:
            return recorded

    monkeypatch.setattr("headrace.app.versions.metadata.distribution", lambda _: Installed())
    assert own_source() == source


def test_an_installed_version_hidden_by_a_running_clone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def locate_file(self, name: str) -> Path:
            return tmp_path / name

    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    monkeypatch.setattr("headrace.app.versions.metadata.distribution", lambda _: Installed())
    slow = replace(LINUX, kernels={"kernels": "reference", "reason": "not built"}, compiler=None)
    assert shadowed() is None
    assert "compiler" in findings(slow)[0].do
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace" / "__init__.py").touch()
    assert shadowed() == tmp_path / "headrace"
    assert str(tmp_path / "headrace") in findings(slow)[0].do
    (tmp_path / "headrace" / "__init__.py").unlink()
    (tmp_path / "headrace").rmdir()
    (tmp_path / "headrace").symlink_to(Path(headrace.__file__).parent)
    assert shadowed() is None


def test_findings_are_sorted_by_severity() -> None:
    ill = replace(
        MAC, swap_used=6 * GIB, versions={**MAC.versions, "gguf": None}, power=PowerState(True, 1, True, True)
    )
    severities = [finding.severity for finding in findings(ill)]
    assert severities == sorted(severities, reverse=True)
    assert severities[0] == "broken"


@pytest.mark.parametrize("report", [MAC, LINUX, replace(MAC, machine=None, budget=None, peak=None)])
def test_reports_have_no_escapes_and_are_valid_json(report: DoctorReport) -> None:
    text = plain(report, findings(report))
    assert "\x1b" not in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert json.loads(json.dumps(document(report, findings(report)), allow_nan=False))["ok"] is True


def test_a_mac_names_both_bandwidths() -> None:
    text = plain(MAC, [])
    assert "Apple M4 Max, 16 cores (12 performance, 4 efficiency), 40 GPU cores" in text
    assert "480 GB/s  (mx.sum float32; 2026-11-20 05:46 UTC)" in text
    assert "546 GB/s" in text
    assert "88 % of nominal" in text
    assert "macOS 26.1 arm64" in text


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(bandwidth, "CPUMeter", lambda: SimpleNamespace(use=lambda: None))  # no other programs
    return tmp_path


def test_doctor_stores_the_peak_until_asked_to_calibrate(quick: Path) -> None:
    result = CliRunner().invoke(doctor, ["--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["measured_peak"]["gb_s"] > 0
    assert report["versions"]["mlx"]
    assert report["paths"]["models"]["path"] == str(quick / "data" / "models")
    assert report["default_model"]["path"] is None
    first = report["measured_peak"]
    found = len(peaks.measurements())  # with kernels, two readers take turns
    assert found in (1, 2)
    assert json.loads(CliRunner().invoke(doctor, ["--json"]).stdout)["measured_peak"] == first
    assert len(peaks.measurements()) == found
    again = json.loads(CliRunner().invoke(doctor, ["--json", "--calibrate"]).stdout)["measured_peak"]
    assert len(peaks.measurements()) > found
    assert again["bytes_per_second"] >= first["bytes_per_second"]  # one bad minute lowers nothing


@pytest.mark.usefixtures("quick")
def test_command_prints_plain_text_into_a_pipe() -> None:
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 0
    assert result.stdout.startswith("Machine\n")
    assert "\x1b" not in result.output


@pytest.mark.usefixtures("quick")
def test_exit_code_when_something_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PACKAGES", (*PACKAGES, "no-such-package-of-ours"))
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 1
    assert "broken: not installed: no-such-package-of-ours" in result.stdout


@pytest.mark.usefixtures("quick")
def test_mlx_that_does_not_load_is_a_finding_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Machine:
        raise ImportError("libmlx.so: undefined symbol\nand more")

    monkeypatch.setattr("headrace.runtime.machine.hardware.machine", broken)
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 1
    assert "broken: MLX does not work here: libmlx.so: undefined symbol\n" in result.stdout


def test_doctor_examines_settings_sessions_and_models(quick: Path) -> None:
    state = json.loads(CliRunner().invoke(doctor, ["--json"]).stdout)
    assert state["user_files"] == {"settings": "no file: defaults apply", "sessions": "none yet", "models": "none yet"}
    write_default()
    store = SessionStore()
    store.create()
    store.close()
    install(Store(quick / "data" / "models"))
    shown = CliRunner().invoke(doctor).stdout
    assert "settings      0 changed from the defaults" in shown
    assert "sessions      1 stored" in shown
    assert "models        1 installed; `headrace models verify`" in shown


def test_adapters_in_the_hubs_cache_are_counted_and_checked(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(quick))
    assert diagnosis.adapters_state() is None
    repo = quick / "models--org--lora"
    folder = repo / "snapshots" / ("1" * 40)
    write_adapter(folder, write_model(quick / "base", "llama"))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(folder.name)
    state = diagnosis.adapters_state()
    assert state is not None
    assert (state.text[:8], state.findings) == ("1 in the", [])
    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    state = diagnosis.adapters_state()
    assert state is not None
    assert [finding.do for finding in state.findings] == ["`headrace rm org/lora` removes it"]


def test_leftovers_in_the_store_are_named_and_not_counted(quick: Path) -> None:
    store = Store(quick / "data" / "models")
    install(store)
    (store.root / "half").mkdir()
    shown = CliRunner().invoke(doctor).stdout
    assert "models        1 installed" in shown
    assert "advice: half in the store: no complete model" in shown
    assert "headrace models rm half" in shown


def test_errors_of_settings_sessions_and_models_are_findings(quick: Path) -> None:
    write_default()
    settings_path().write_text("[chat]\nmodle = 'x'\n")
    database_path().parent.mkdir(parents=True)
    database_path().write_bytes(b"no database, by any means " * 100)
    models = Store(quick / "data" / "models")
    install(models)
    (models.root / "mine" / "tokenizer.json").write_text("{}")
    config = models.root / "mine" / "config.json"
    config.write_text(config.read_text() + "\n")  # as valid as before, and another file
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 1
    assert "unknown setting modle" in result.stdout
    assert "not a database" in result.stdout
    assert re.search(r"the stored model mine is damaged: config.json has [\d,]+ bytes, not the", result.stdout)


def test_a_file_in_place_of_the_store_is_a_finding(quick: Path) -> None:
    (quick / "data").mkdir()
    (quick / "data" / "models").write_text("")
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 1
    assert "models cannot be read: Not a directory" in re.sub(r"\s+", " ", result.stdout)


def test_a_folder_that_cannot_be_made_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert diagnosis._folder("models", tmp_path / "new" / "models").writable
    assert not diagnosis._folder("models", tmp_path / "file" / "models").writable


@pytest.mark.parametrize(
    "report", [MAC, LINUX, replace(MAC, power=PowerState(True, 40, True, True), swap_used=9 * GIB)]
)
def test_a_report_on_a_terminal_fits_eighty_columns(report: DoctorReport) -> None:
    lines = [line.plain for line in report_lines(sections(report), findings(report), 80)]
    assert all(len(line) <= 80 for line in lines)
    assert ("No problems found." in lines) == (not findings(report))
    assert " ".join(" ".join(lines).split()) == " ".join(plain(report, findings(report)).split())


def test_lines_are_folded_by_cells() -> None:
    wide = Finding("broken", "模型文件夹不可写" * 3 + "\tand\x1b[2J then", "first\nsecond")
    lines = [line.plain for line in report_lines([], [wide], 30)]
    assert max(map(cell_len, lines)) in (29, 30)
    assert "".join("".join(lines).split()) == "broken:" + "模型文件夹不可写" * 3 + "and␛[2Jthen->firstsecond"
    assert lines[-2:] == ["  -> first", "     second"]
    assert not any("\t" in line for line in lines)
    narrow = "".join(line.plain for line in report_lines([], [wide], 1))
    assert "".join(narrow.split()) == "".join("".join(lines).split())


_BLOCKED = """import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_commands_of_a_python_without_mlx_end_with_one_line(tmp_path: Path) -> None:
    """Such as an Intel Python under Rosetta: doctor reports it, others name doctor."""
    (tmp_path / "sitecustomize.py").write_text(_BLOCKED.format(packages=("mlx", "mlx_lm")))
    ran = commands.headrace("run", "hello", home=tmp_path, code=1, PYTHONPATH=str(tmp_path))
    assert len(ran.stderr.splitlines()) == 2
    assert "doctor" in ran.stderr
    found = commands.headrace("doctor", "--json", home=tmp_path, code=1, PYTHONPATH=str(tmp_path))
    assert any("mlx" in str(finding) for finding in json.loads(found.stdout)["problems"])


@pytest.mark.parametrize("command", [["run", "hello"], ["doctor"]])
def test_a_missing_msgspec_is_one_error_with_a_hint(command: list[str], tmp_path: Path) -> None:
    """The report of doctor is made of structs, so doctor ends with the same error."""
    (tmp_path / "sitecustomize.py").write_text(_BLOCKED.format(packages=("msgspec",)))
    ran = commands.headrace(*command, home=tmp_path, code=1, PYTHONPATH=str(tmp_path))
    message, hint = ran.stderr.splitlines()
    assert "msgspec" in message
    assert "pip install --force-reinstall" in hint
    assert "doctor" not in hint

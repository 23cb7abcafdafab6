"""Tests that guard a module: their order against the deliberate faults, and modules that no test reaches."""

import functools
import re
from pathlib import Path

import pytest

from tests.faults.deliberate.faults import faults
from tests.guards import COUNT, LAYERS, ROOT, Imports, main, nearest


@pytest.fixture(scope="module")
def imports() -> Imports:
    return Imports()


def test_nearest_guards_catch_19_of_20_deliberate_faults(imports: Imports) -> None:
    """The first test of a fault is the one that fails: a file, a function in it, or a folder."""
    missed = []
    guards = functools.cache(imports.guards)
    for fault in faults():
        catching = fault.tests[0].partition("::")[0]
        nearest_guards = guards(fault.file)[:COUNT]
        if not any(guard == catching or guard.startswith(f"{catching}/") for guard in nearest_guards):
            missed.append(f"{fault.id}: {fault.file}")
    assert len(missed) <= len(faults()) / 20, missed


def test_every_module_has_a_guard(imports: Imports) -> None:
    """A module that no test reaches by two imports names a test in its docstring."""
    modules = [file for file in imports.files if file.startswith(LAYERS) and not file.endswith("__init__.py")]
    assert len(modules) > 500
    assert not [file for file in modules if not imports.guards(file, steps=2)]


def write(root: Path, files: dict[str, str]) -> Imports:
    """Return the imports of a tree of these files."""
    for file, text in {"headrace/__init__.py": "", **files}.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Imports(root)


def test_order_of_guards(tmp_path: Path) -> None:
    others = "from headrace.runtime.errors import A, B"
    imports = write(
        tmp_path,
        {
            "runtime/kv/pool.py": '"""Blocks. tests/parity/test_pools.py compares, tests/bench/pools.py measures."""',
            "runtime/kv/paged.py": "from headrace.runtime.kv.pool import Pool",
            "app/bench/run.py": "from headrace.runtime.kv.paged import Paged",
            "runtime/errors.py": "",
            "tests/runtime/kv/test_pool.py": "from tests.support.pools import pool",
            "tests/runtime/kv/test_blocks.py": "from headrace.runtime.kv.pool import Pool",
            "tests/runtime/kv/test_few.py": f"from headrace.runtime.kv.pool import Pool\n{others}",
            "tests/runtime/kv/test_paged.py": "from headrace.runtime.kv.paged import (\n    Paged,\n)",
            "tests/app/test_bench.py": "from headrace.app.bench.run import run",
            "tests/app/test_other.py": "from headrace.runtime.errors import A",
            "tests/bench/pools.py": "",  # not collected by pytest
            "tests/parity/test_pools.py": "",
            "tests/support/pools.py": "from headrace.runtime.kv.pool import Pool",
        },
    )
    assert imports.guards("runtime/kv/pool.py") == [
        "tests/runtime/kv/test_pool.py",  # of its name
        "tests/parity/test_pools.py",  # named in it
        "tests/runtime/kv/test_blocks.py",  # imports it alone
        "tests/runtime/kv/test_few.py",
        "tests/runtime/kv/test_paged.py",  # imports a module that imports it
        "tests/app/test_bench.py",
    ]


def test_names_count_for_the_module_that_defines_them(tmp_path: Path) -> None:
    imports = write(
        tmp_path,
        {
            "runtime/ops/__init__.py": "from headrace.runtime.ops.weights import Weight  # noqa: F401",
            "runtime/ops/weights.py": "class Weight: ...",
            "tests/runtime/test_a.py": "from headrace.runtime.ops import Weight",
            "tests/runtime/test_b.py": "from headrace.runtime import ops",
        },
    )
    assert imports.guards("runtime/ops/weights.py")[0] == "tests/runtime/test_a.py"
    assert imports.guards("runtime/ops/__init__.py") == ["tests/runtime/test_b.py"]


def test_code_in_strings_and_fixtures_count(tmp_path: Path) -> None:
    imports = write(
        tmp_path,
        {
            "app/api.py": "",
            "app/cli/chat.py": "",
            "app/cli/commands.py": '_COMMANDS = {"chat": ("headrace.app.cli.chat", "chat")}',
            "tests/test_child.py": 'CODE = (\n    "from headrace.app.api import load\\n"\n)',
            "tests/test_patch.py": 'patch("headrace.app.api.load", None)',
            "tests/cli/conftest.py": "from headrace.app.cli.commands import main",
            "tests/cli/test_chat.py": "",
        },
    )
    assert set(imports.guards("app/api.py")) == {"tests/test_child.py", "tests/test_patch.py"}
    assert imports.guards("app/cli/chat.py") == ["tests/cli/test_chat.py"]


def test_nearest_of_several_files_take_turns(imports: Imports) -> None:
    files = ["app/chat/turn.py", "runtime/kv/pool.py"]
    first, second = (imports.guards(file) for file in files)
    tests = nearest(imports, files, count=2)
    assert tests[:2] == [first[0], second[0]]
    assert set(tests) == {*first[:2], *second[:2]}


def test_the_command_prints_the_nearest_guards(
    imports: Imports, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.guards.Imports", lambda: imports)
    files = ["app/chat/turn.py", "runtime/native/core/linear.cpp"]
    assert main([str(ROOT / file) for file in files] + ["--count", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["tests/app/chat/test_turn.py", "tests/runtime/ops/test_native_kernels.py"]


@pytest.mark.parametrize("file", ["app/chat/absent.py", "README.md", "/etc/passwd"])
def test_files_that_are_no_module_are_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([file])
    assert stopped.value.code == 2
    assert file in capsys.readouterr().err


def test_tests_that_a_text_names_exist() -> None:
    """Docstrings, comments and pages name tests by path, or by name alone where the folder is the same."""
    names = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    folders = [*LAYERS, "docs"]
    texts = [path for folder in folders for suffix in ("py", "md") for path in (ROOT / folder).rglob(f"*.{suffix}")]
    absent = []
    for path in [*texts, *ROOT.glob("*.md")]:
        for named in re.findall(r"tests/[\w/]+\.py|(?<![\w/])test_\w+\.py", path.read_text(encoding="utf-8")):
            exists = (ROOT / named).exists() if "/" in named else named in names
            if not exists:
                absent.append(f"{path.relative_to(ROOT)}: {named}")
    assert not absent

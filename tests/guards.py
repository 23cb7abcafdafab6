"""Test files that guard a module, nearest first.

    python -m tests.guards app/chat/turn.py                      # the nearest five
    .venv/bin/pytest $(python -m tests.guards app/chat/turn.py)
    python -m tests.guards --count 20 runtime/kv/pool.py         # up to twenty

The order is derived on each call, from import statements and from the tests that a module names in its text; it is
stored nowhere. No module is imported, so it works in a tree that does not run. `tests/test_guards.py` compares it with
the deliberate faults, and finds modules without guards.
"""

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("app", "models", "runtime")
COUNT = 5  # files printed by default: of 19 in 20 deliberate faults, one of them catches the fault
# Imports that are followed from a test to a module: test -> helper or module -> module -> module. The fourth reaches
# nearly everything from anywhere.
_STEPS = 3
# Folders that are mirrored elsewhere than below tests/ at their own path
_MIRRORS = {"tests/app/tui": "tests/tui"}
_KERNELS = "runtime/ops/native.py"  # the Python side of all C++ files below runtime/native

# Import statements of headrace and of tests. They are searched for, not parsed: a thousand files are read at once, and
# code in strings, which a test runs in another process, counts too.
_IMPORT = re.compile(
    r"""
      ^[ \t"']* from [ ] (?P<source> (?:headrace|tests) [.\w]* ) [ ] import [ ] (?P<names> \( [^)]* \) | [^\n"';]* )
    | ^[ \t"']* import [ ] (?P<module> (?:headrace|tests) \.[.\w]+ )   # as in `import headrace.app.tui as tui`
    | ["'] (?P<quoted> headrace (?:\.\w+)+ )                           # as in the table of commands, or a patched name
    """,
    re.MULTILINE | re.VERBOSE,
)


class Imports:
    """Import statements of the tree: files, by their path below the root, and the files that they import."""

    def __init__(self, root: Path = ROOT) -> None:
        folders = (*LAYERS, "tests")
        paths = [root / "headrace/__init__.py", *(path for folder in folders for path in (root / folder).rglob("*.py"))]
        texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}
        self.files = texts.keys()
        self._texts = texts
        # file -> pairs of a module and a name imported from it; the name is empty where the module itself is imported
        self._statements = {file: list(_statements(text)) for file, text in texts.items()}
        # (file, name) -> the pair that brings this name into the file
        self._names = {(file, pair[1]): pair for file, pairs in self._statements.items() for pair in pairs if pair[1]}
        # imported file -> files that import it, and the share of their imported names that it has
        self.importers: dict[str, dict[str, float]] = defaultdict(dict)
        for file in self.files:
            imported = Counter(self._imported(file))
            imported.pop(file, None)
            for target, count in imported.items():
                self.importers[target][file] = count / imported.total()

    def _imported(self, file: str) -> Iterator[str]:
        for module, name in self._statements[file]:
            target = self._definition(module, name)
            if target is not None:
                yield target
        if file.startswith("tests/"):  # pytest imports them
            folders = [parent.as_posix() for parent in Path(file).parents]
            yield from (f"{folder}/conftest.py" for folder in folders if f"{folder}/conftest.py" in self.files)

    def _definition(self, module: str, name: str) -> str | None:
        """Return the file that defines a name of a module, which may have imported it from another one."""
        seen = set()
        while (module, name) not in seen:
            seen.add((module, name))
            submodule = self._file(f"{module}.{name}")
            if submodule is not None:
                return submodule
            file = self._file(module)
            if file is None:
                return None
            module, name = self._names.get((file, name), (module, name))
        return file

    def _file(self, module: str) -> str | None:
        path = module.strip(".").removeprefix("headrace.").replace(".", "/")
        return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in self.files), None)

    def guards(self, file: str, steps: int = _STEPS) -> list[str]:
        """Return the test files that reach a file by at most `steps` imports, nearest first.

        1. The test of its name in the mirrored folder, then tests that the file names.
        2. Tests that import the file or a name that it defines.
        3. Tests that import a file that imports it, and so on.

        Within a group those come first that have the largest share of their imported names from there. The share counts
        twice for each folder in common with the mirrored one.
        """
        distances: dict[str, int] = {}
        shares: Counter[str] = Counter()
        reached = {file: 1.0}
        for distance in range(1, steps + 1):
            farther: Counter[str] = Counter()
            for imported, share in reached.items():
                for importer, part in self.importers[imported].items():
                    farther[importer] += share * part
            for importer, share in farther.items():
                distances.setdefault(importer, distance)
                shares[importer] += share
            reached = farther

        named = [named_test(file), *self._named_in(file)]

        def order(test: str) -> tuple[int, int, float]:
            rank = named.index(test) if test in named else len(named)
            nearness = 2 ** common_folders(test, named[0]) * shares[test]
            return rank, distances.get(test, 0), -nearness

        candidates = {*distances, *named} & self.files
        return sorted(filter(is_test, candidates), key=order)

    def _named_in(self, file: str) -> list[str]:
        """Return the tests that a file names: `tests/runtime/kv/test_disk.py and test_pool.py` are of one folder."""
        tests = []
        folder = ""
        for path in re.findall(r"tests/[\w/]+\.py|(?<![\w/])test_\w+\.py", self._texts[file]):
            if "/" not in path:
                path = f"{folder}/{path}"
            folder = path.rpartition("/")[0]
            tests.append(path)
        return tests


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """Return pairs of a module and a name: ("headrace.runtime.errors", "UsageError")."""
    for match in _IMPORT.finditer(text):
        if match["source"]:
            names = re.sub(r"#.*", "", match["names"]).strip("()\n ")
            for name in names.split(","):
                if word := re.match(r"\s*(\w+)", name):
                    yield match["source"], word[1]
        elif match["module"]:
            yield match["module"], ""
        else:
            module, _, name = match["quoted"].rpartition(".")
            yield module, name


def is_test(file: str) -> bool:
    """Return whether pytest collects a file."""
    return file.startswith("tests/") and Path(file).name.startswith("test_")


def named_test(file: str) -> str:
    """Return the path of a module's own test: tests/app/chat/test_turn.py for app/chat/turn.py."""
    folder = f"tests/{Path(file).parent.as_posix()}"
    for mirrored, path in _MIRRORS.items():
        folder = re.sub(rf"^{mirrored}\b", path, folder)
    return f"{folder}/test_{Path(file).name}"


def common_folders(file: str, other: str) -> int:
    """Return the number of leading folders that two paths share."""
    folders = zip(Path(file).parts[:-1], Path(other).parts[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], folders))


def nearest(imports: Imports, files: Sequence[str], count: int = COUNT) -> list[str]:
    """Return up to `count` guards of each file: the nearest guard of each, then the second of each, and so on."""
    ranked = [imports.guards(file)[:count] for file in files]
    return list(dict.fromkeys(test for rank in zip_longest(*ranked) for test in rank if test is not None))


def module_of(path: Path) -> str | None:
    """Return the module that a path names, that of the kernels for a C++ file; None for other files."""
    path = path.resolve()
    if not path.is_file() or not path.is_relative_to(ROOT):
        return None
    file = path.relative_to(ROOT)
    if file.is_relative_to("runtime/native"):
        return _KERNELS
    if file.suffix != ".py" or file.parts[0] not in LAYERS:
        return None
    return file.as_posix()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the guards of the files of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.guards", description="Print the tests that guard modules.")
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="module of app, models or runtime, or C++ of the kernels"
    )
    parser.add_argument("--count", type=int, default=COUNT, metavar="N", help=f"tests of each file (default: {COUNT})")
    options = parser.parse_args(arguments)
    files = []
    for given in options.files:
        file = module_of(Path(given))
        if file is None:
            parser.error(f"{given}: no module of app, models or runtime")
        files.append(file)
    tests = nearest(Imports(), files, options.count)
    if not tests:  # pytest without arguments would run all tests
        parser.error("no test reaches these files by imports")
    print("\n".join(tests))
    return 0


if __name__ == "__main__":
    sys.exit(main())

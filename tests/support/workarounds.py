"""Entries of docs/workarounds.md, and those whose project is installed in another version than they name.

python -m tests.support.workarounds
"""

import re
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "workarounds.md"
_ENTRY = re.compile(r"^- `([\w/.]+)`: (.*(?:\n  .*)*)", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/.]+)(?:::(\w+))?`")


class Workaround(NamedTuple):
    """One entry of the page.

    file: the file with the workaround, below the root.
    upstream: issues, pull requests, or that there are none.
    project, seen_in: package and version in which the fault was seen.
    end: when the code goes.
    """

    file: str
    upstream: str
    project: str
    seen_in: str
    end: str

    @property
    def tests(self) -> list[tuple[str, str]]:
        """Tests that the end names: pairs of a file or folder, and a function or ""."""
        return _TEST.findall(self.end)


def workarounds() -> list[Workaround]:
    """Return all entries. Raises ValueError for one without its three facts."""
    entries = []
    for file, text in _ENTRY.findall(PAGE.read_text(encoding="utf-8")):
        facts = re.search(r"Upstream: (.+?)\s+Seen in: ([\w-]+) ([\d.]*\d)\b.*?\s+Goes: (.+)", text, re.DOTALL)
        if facts is None:
            raise ValueError(f"{PAGE.name}: {file}: needs Upstream, Seen in and Goes")
        entries.append(Workaround(file, *facts.groups()))
    return entries


def main() -> None:
    for entry in workarounds():
        installed = version(entry.project)
        if installed != entry.seen_in:
            print(f"{entry.file}: seen in {entry.project} {entry.seen_in}, installed {installed}\n  {entry.end}")


if __name__ == "__main__":
    main()

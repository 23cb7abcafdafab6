"""The list of deliberate faults (faults.toml): one changed text each, and the tests that have to fail."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True, slots=True)
class Fault:
    """`text`, which occurs once in `file`, becomes `replacement`; one of `tests` has to fail."""

    id: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def applied(self, root: Path = ROOT) -> str:
        """Return the file's content with the fault. Raises ValueError if `text` does not occur exactly once."""
        content = (root / self.file).read_text(encoding="utf-8")
        if (count := content.count(self.text)) != 1:
            raise ValueError(f"{self.id}: {self.text!r} occurs {count} times in {self.file}")
        return content.replace(self.text, self.replacement)


def faults() -> list[Fault]:
    """Return the whole list."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["fault"]
    return [Fault(row["id"], row["file"], row["text"], row["replacement"], tuple(row["tests"])) for row in rows]

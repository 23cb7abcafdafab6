"""Blocks of code in README and the guides."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
    for file in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
}


def blocks(page: str, language: str) -> list[str]:
    """Return a page's blocks in a language, such as `sh` or `python`. page: its path below the root."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", PAGES[page], flags=re.MULTILINE | re.DOTALL)

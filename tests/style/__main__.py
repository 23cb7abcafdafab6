"""Print the counts of the tree, and with --list every place they count."""

import sys
from dataclasses import fields
from pathlib import Path

from tests.style.counts import count

counts = count(Path(__file__).resolve().parents[2])
print(f"{counts.odd_per_1000:.1f} odd words in 1,000; {counts.docstrings} docstrings; {counts.lines} lines")
for field in fields(counts):
    if isinstance(places := getattr(counts, field.name), list):
        print(f"{len(places)} {field.name.replace('_', ' ')}")
        if "--list" in sys.argv:
            print("".join(f"  {place}\n" for place in places), end="")

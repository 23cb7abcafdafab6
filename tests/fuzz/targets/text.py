"""Output text: detokenizing, stop strings, terminals, Markdown."""

import random
import re
import unicodedata
from pathlib import Path
from typing import Any

from headrace.app.output.sanitise import Sanitiser, sanitise
from headrace.app.sessions.export import markdown_part
from headrace.models.text.stop_strings import StopMatcher
from headrace.models.text.tokenizer import Tokenizer
from tests.app.sessions.test_markdown_part import stays_a_part
from tests.fuzz.mutate import text
from tests.support.families import FAMILIES, write_family

_KEPT = re.compile("[\n\t]")


def cut(chance: random.Random, whole: str) -> list[str]:
    """Split a text into pieces of any size, empty ones included."""
    places = sorted(chance.randrange(len(whole) + 1) for _ in range(chance.randrange(9)))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


class Detokenizing:
    """Any ids, also outside the vocabulary: the pieces equal the whole."""

    def __init__(self, folder: Path) -> None:
        self._tokenizers = [Tokenizer.load(write_family(folder / name, name)) for name in FAMILIES]

    def make(self, chance: random.Random) -> tuple[int, list[int]]:
        which = chance.randrange(len(self._tokenizers))
        size = self._tokenizers[which].vocab_size
        ids = [
            chance.choice((chance.randrange(size), chance.randrange(min(size, 270)), size - 1 - chance.randrange(270)))
            for _ in range(chance.randrange(40))
        ]
        if chance.random() < 0.1:
            ids.append(size + chance.randrange(5000))
        return which, ids

    def run(self, given: tuple[int, list[int]]) -> None:
        which, ids = given
        tokenizer = self._tokenizers[which]
        stream = tokenizer.detokenizer()
        said = "".join(stream.add(each) for each in ids) + stream.finish()
        assert said == tokenizer.decode(ids), (said, tokenizer.decode(ids))
        said.encode()


class StopStrings:
    """Pieces of a text with full, partial and overlapping stop strings."""

    def __init__(self, folder: Path) -> None:
        pass

    def make(self, chance: random.Random) -> tuple[list[str], list[str]]:
        letters = chance.choice(("ab", "abc", "a\n", "é\u0301x"))
        whole = "".join(chance.choice(letters) for _ in range(chance.randrange(60)))
        stops = [
            "".join(chance.choice(letters) for _ in range(chance.randint(1, 6))) for _ in range(chance.randint(1, 4))
        ]
        return cut(chance, whole), stops

    def run(self, given: tuple[list[str], list[str]]) -> None:
        pieces, stops = given
        whole = "".join(pieces)
        matcher = StopMatcher(stops)
        said = ""
        stopped = False
        for piece in pieces:
            certain, stopped = matcher.feed(piece)
            said += certain
        rest, stopped = matcher.flush()
        said += rest
        found = [at for stop in stops if (at := whole.find(stop)) >= 0]
        assert said == whole[: min(found, default=len(whole))], (whole, stops, said)
        assert stopped == bool(found)


class TerminalText:
    """Any text in any pieces: no control sequences pass, and safe text is unchanged."""

    def __init__(self, folder: Path) -> None:
        pass

    def make(self, chance: random.Random) -> list[str]:
        return cut(chance, text(chance, words=("\x1b]0;x\x07", "\x1b[31m", "\x9b2J", "\r\n", "\u202egnp.exe")))

    def run(self, given: list[str]) -> None:
        stream = Sanitiser()
        safe = "".join(stream.feed(piece) for piece in given)
        assert safe == sanitise("".join(given)), safe
        assert sanitise(safe) == safe
        safe.encode()
        for char in _KEPT.sub("", safe):
            assert unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp"), ascii(char)
            assert char not in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


class Markdown:
    """Model output drawn in the chat, at once and streamed, and as part of an export."""

    _WORDS = (
        "```", "~~~", "```py\n", "**", "__", "`", "> ", "- ", "1. ", "# ", "|a|b|\n|-|-|\n", "[x](javascript:y)",
        "![", "](", "\n\n", "<b>", "&#0;", "&amp;", "    ", "\t", "---\n", "https://e.org/", "[^1]", "- [ ] ", "$$",
        "\\", "[/]", "[bold]", "<script>", "</details>", "<!--", "====\n", "## You\n", "`" * 5, "|"*40, ">"*40,
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        from headrace.app.tui.transcript import markdown_lines

        self._render: Any = markdown_lines.render

    def make(self, chance: random.Random) -> tuple[list[str], int]:
        whole = text(chance, chance.choice((10, 60, 200)), words=self._WORDS)
        if chance.random() < 0.02:
            # Time grows with the text: 10,000 rows of tables, 60 KB, take 3 s on a slow processor.
            whole = (chance.choice(self._WORDS) * chance.choice((500, 5000)))[:20_000]
        return cut(chance, whole), chance.choice((1, 2, 10, 80, 200))

    def run(self, given: tuple[list[str], int]) -> None:
        pieces, width = given
        part = markdown_part(sanitise("".join(pieces)).strip())
        if len(part) < 1000:  # markdown-it drops what is nested more than twenty times
            stays_a_part(part)
        for line in self._render(sanitise("".join(pieces)), width):
            assert "\x1b" not in line.plain

"""Mutations that all formats share: bytes, JSON values and text."""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
TEXTS = (
    "", " ", "x", "\0", "\n", "a\nb", "\x1b[2J", "\u202e", "\ud800", "\udfff\ud800", "\U000f0000", "é"*9, "../../x",
    "/", "<s>", "null", "NaN", "1e999", "-0", "__class__", "%s%s%n", "{0}", "{{ x }}", "<|im_end|>", "A"*300,
    "\ufeff", "\uff1c",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 16, 10**6, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5,
    1.0, -1.5, 1e-320, 1e300, -1e300, float("inf"), float("-inf"), float("nan"), [], {}, [[]], {"a": {}}, [None],
    [0]*9, *TEXTS,
)  # fmt: skip


def changed(content: bytes, kind: str, place: int, value: int) -> bytes:
    """Apply one change: a number of this type ("u8", "u32", "u64") written, or bytes "cut" or "grow"n."""
    width = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}.get(kind)
    if width is not None:
        return content[:place] + (value % 256**width).to_bytes(width, "little") + content[place + width :]
    return content[:place] + (content[place + value :] if kind == "cut" else bytes(value) + content[place:])


def mutated_bytes(
    chance: random.Random, content: bytes, *, before: int | None = None, words: Sequence[bytes] = ()
) -> bytes:
    """Apply one to four changes within the first `before` bytes. words: candidates to write."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        place = chance.randrange(min(before or len(content), len(content)) + 1)
        match chance.randrange(9):
            case 0:
                content = changed(content, "u8", place, chance.randrange(256))
            case 1 | 2:
                kind = chance.choice(("u8", "u16", "u32", "u64"))
                content = changed(content, kind, place, chance.choice(NUMBERS))
            case 3:
                content = changed(content, "cut", place, chance.randint(1, 64))
            case 4:
                content = changed(content, "grow", place, chance.randint(1, 64))
            case 5:
                content = content[:place]
            case 6:
                length = chance.randint(1, 64)
                source = chance.randrange(len(content) + 1)
                content = content[:place] + content[source : source + length] + content[place + length :]
            case 7:
                content = (
                    content[:place]
                    + bytes((content[place : place + 1] or b"\0")[0:1]) * chance.randint(2, 9)
                    + content[place:]
                )
                place = min(place, max(0, len(content) - 1))
                if content:
                    content = changed(content, "u8", place, content[place] ^ (1 << chance.randrange(8)))
            case _:
                content = content[:place] + (chance.choice(words) if words else chance.randbytes(4)) + content[place:]
    return content


def value(chance: random.Random, depth: int = 2) -> Any:
    """Return any JSON value, and some invalid ones."""
    if depth and chance.random() < 0.25:
        if chance.random() < 0.5:
            return [value(chance, depth - 1) for _ in range(chance.randrange(4))]
        return {chance.choice(TEXTS): value(chance, depth - 1) for _ in range(chance.randrange(4))}
    # A copy: what is put into one document must not be changed with it, in all that come after.
    return copy.deepcopy(chance.choice(VALUES)) if chance.random() < 0.8 else chance.randint(-20, 300)


def mutated_value(chance: random.Random, document: Any, *, changes: int | None = None) -> Any:
    """Replace, drop, double, rename or move one to three parts of a document."""
    document = copy.deepcopy(document)
    for _ in range(changes or chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            return value(chance)
        holder, key = chance.choice(places)
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                holder[key] = value(chance)
            case 4:
                del holder[key]
            case 5:
                holder[key] = _near(chance, holder[key])
            case 6:
                other, at = chance.choice(places)
                if (isinstance(other, dict) and at in other) or (isinstance(other, list) and at < len(other)):
                    holder[key] = copy.deepcopy(other[at])
            case 7:
                holder[key] = [holder[key]] if chance.random() < 0.5 else {str(key): holder[key]}
            case 8 if isinstance(holder, dict):
                holder[chance.choice((*TEXTS, *(str(known) for known in holder)))] = holder.pop(key)
            case _ if isinstance(holder, list):
                holder[key:key] = [copy.deepcopy(holder[key])] * chance.choice((1, 2, 50))
            case _:
                holder[key + "_" if isinstance(key, str) else key] = value(chance)
    return document


def _near(chance: random.Random, found: Any) -> Any:
    """Return a value of usually the same kind."""
    if isinstance(found, bool):
        return not found
    if isinstance(found, int):
        if abs(found) > 2**70:
            return found // 3
        return chance.choice(
            (found + 1, found - 1, -found, found * 2, found // 2, found << 32, float(found), str(found))
        )
    if isinstance(found, float):
        return chance.choice((-found, found * 1e9, found / 1e9, int(found) if abs(found) < 1e9 else 0, str(found)))
    if isinstance(found, str):
        return chance.choice(
            (found[:-1], found + "x", found * 2, found.upper(), [*found[:99]], found[::-1], text(chance))
        )
    if isinstance(found, list):
        return chance.choice(
            (found[:-1], found * 2, found[::-1], found[:1], {str(i): each for i, each in enumerate(found)})
        )
    return value(chance)


def _places(document: Any) -> Any:
    """Return every (container, key) of a document, few of long lists."""
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in list(keys)[:40]:
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])


def json_bytes(chance: random.Random, document: Any) -> bytes:
    """Encode a document as JSON, sometimes invalid."""
    try:
        written = json.dumps(document, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    except (ValueError, TypeError):
        written = b"{}"
    odd = chance.random()
    if odd < 0.1:
        words = [b"NaN", b'"a":1,"a":2,', b"[" * 2000, b"9" * 5000, b"\xff", b"\\ud800", b'"', b"}", b"1e999"]
        return mutated_bytes(chance, written, words=words)
    return b"\xef\xbb\xbf" + written if odd < 0.12 else written


_CHARACTERS = (
    "\x00\x07\x08\t\n\r\x1b\x7f\x80\x85\x9b\x9f\xad \u00a0\u034f\u061c\u180e\u200b\u200c\u200d\u200e\u200f"
    "\u2028\u2029\u202a\u202e"
    "\u2060\u2066\u2069\u206f\ufe0e\ufe0f\ufeff\ufff9\ufffb\ufffd\ud800\udbff\udc00\udfff\U000e0001\U000e0041\U000e007f\U000e0100"
    "\U000f0000\U00100000\U0010ffff\U0001d173\U0001f3f4\U0001f468\U0001f3fd\U0001f1eb\u2764abcdeXYZ019_-/\\|<>[](){}#*`~!.,:;&%$\"'"
    "éßſİıǅΣςक्षाسلامไทย한글\u1100\u1161\u11a8的中、。１＜｜＞ﬁ½"
)


def text(chance: random.Random, most: int = 40, words: Sequence[str] = ()) -> str:
    """Return difficult characters with words among them."""
    pieces = []
    for _ in range(chance.randrange(most)):
        kind = chance.random()
        if kind < 0.25 and words:
            pieces.append(chance.choice(words))
        elif kind < 0.85:
            pieces.append(chance.choice(_CHARACTERS))
        elif kind < 0.95:
            pieces.append(chance.choice(TEXTS))
        else:
            pieces.append(chr(chance.randrange(0x110000)) * chance.choice((1, 1, 1, 20)))
    return "".join(pieces)

"""What blocks hold, as chains of tokens: a block is found by the tokens in it and all those before.

Entries are named by token and by the phase that wrote them (`runtime.ops.Phase`): kernels give an entry other bits in
prefill than in decode, so an answer's entries are not what a prompt of the same tokens would have given. A search that
is to be the same as a cold start therefore ends at the first entry of an answer.

Every link has a key: a digest of the key before it, the tokens and the phases; the first key says whose entries they
are (weights, format, kernels). Keys name blocks on disk; here they only lead to a link, whose tokens are compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack

from headrace.runtime.ops import BLOCK


@dataclass(slots=True, eq=False)
class Link:
    """The block that follows `before`'s: up to BLOCK entries, those of `tokens`.

    answered: for each of them, whether a decode step wrote it (1) or a prefill (0). cold: how many of its first entries
    are as a cold prefill of all tokens gives them. blocks: in each layer group the block that holds them, None where
    that group has let go of it. before: None for the root, and for a link that was taken out.
    """

    key: bytes
    before: "Link | None"
    tokens: tuple[int, ...]
    answered: bytes
    cold: int
    blocks: list[int | None]
    after: dict[bytes, "Link"] = field(default_factory=dict)  # by key
    starting: dict[int, list["Link"]] = field(default_factory=dict)  # the same, by first token

    def common(self, tokens: Sequence[int], answers: bool) -> int:
        """How many of `tokens` it begins with; `answers`: also such as decode steps wrote."""
        most = min(len(tokens), len(self.tokens) if answers else self.cold)
        return next((i for i in range(most) if self.tokens[i] != tokens[i]), most)


class Chains:
    """All links that can be found, as a tree. `key` tells apart what must never be shared."""

    def __init__(self, key: bytes) -> None:
        self.root = Link(blake2b(key, digest_size=16).digest(), None, (), b"", 0, [])

    def find(self, tokens: Sequence[int], answers: bool) -> list[tuple[Link, int]]:
        """The longest way along `tokens`: links, and how many entries of each. All but the last are taken whole."""
        end, length, best = self.root, 0, (0, 0)
        level, done = [self.root], 0
        while level and done < len(tokens):
            rest, followed = tokens[done : done + BLOCK], []
            for link in (link for at in level for link in at.starting.get(rest[0], ())):
                common = link.common(rest, answers)
                if (done + common, link.cold) > best:
                    end, length, best = link, common, (done + common, link.cold)
                if common == BLOCK:
                    followed.append(link)
            level, done = followed, done + BLOCK
        way = []
        while end.before is not None:
            way.append((end, length))
            end, length = end.before, BLOCK
        return way[::-1]

    def add(self, before: Link, tokens: Sequence[int], answered: bytes, groups: int) -> Link:
        """The link of these entries after `before`. Raises ValueError after a block that is not full."""
        if before is not self.root and len(before.tokens) < BLOCK:
            raise ValueError("a block that is not full is the last of its chain")
        if not 1 <= len(tokens) <= BLOCK or len(answered) != len(tokens):
            raise ValueError(
                f"a block has 1 to {BLOCK} entries, each with its phase, not {len(tokens)}, {len(answered)}"
            )
        key = digest(before.key, tokens, answered)
        found = before.after.get(key)
        if found is not None:
            if found.tokens != tuple(tokens) or found.answered != answered:
                raise ValueError("two blocks of different tokens have one key")
            return found
        cold = answered.find(1) if before.cold == len(before.tokens) else 0
        link = Link(key, before, tuple(tokens), answered, len(tokens) if cold < 0 else cold, [None] * groups)
        before.after[key] = link
        before.starting.setdefault(tokens[0], []).append(link)
        return link

    def remove(self, link: Link) -> Iterator[Link]:
        """Take a link out, and all after it, which nobody could find any more: gives every one of them."""
        assert link.before is not None, "the root stays"
        del link.before.after[link.key]
        alike = link.before.starting[link.tokens[0]]
        alike.remove(link)
        if not alike:
            del link.before.starting[link.tokens[0]]
        link.before = None
        pending = [link]
        while pending:
            gone = pending.pop()
            for after in gone.after.values():
                after.before = None
                pending.append(after)
            gone.after, gone.starting = {}, {}
            yield gone


def digest(before: bytes, tokens: Sequence[int], answered: bytes) -> bytes:
    """The key of a block of `tokens` behind the one of key `before`."""
    return blake2b(pack(f"<{len(tokens)}q", *tokens) + answered, key=before, digest_size=16).digest()

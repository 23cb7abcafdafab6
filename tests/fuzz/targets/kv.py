"""K/V of conversations on disk, and the blocks that sequences hold."""

import random
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from headrace.runtime.kv.disk import DiskStore, StoredBlock, file_names
from headrace.runtime.ops import BLOCK
from tests.fuzz.mutate import mutated_bytes


class DiskFiles:
    """Files of the disk store with other bytes, also such whose digest was made to fit: what was put, or nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "blocks"
        self._store = DiskStore(self._folder, 1 << 30)
        tokens = tuple(range(BLOCK))
        self._block = StoredBlock(b"b" * 16, b"k" * 16, tokens, bytes(BLOCK), (bytes(range(256)), None, b"xyz"))
        ((self._place, _),) = file_names(b"root", tokens)
        assert self._store.put(self._place, self._block)
        self._file = self._folder / self._place.hex()
        self._content = self._file.read_bytes()

    def make(self, chance: random.Random) -> bytes:
        from hashlib import blake2b

        changed = mutated_bytes(chance, self._content, words=[b"headkv\0\3", b"\xff" * 8])
        if chance.random() < 0.7:  # of somebody who knows the format
            body = changed[:-16]
            return body + blake2b(body, digest_size=16).digest()
        return changed

    def run(self, given: bytes) -> None:
        self._file.write_bytes(given)
        found = self._store.get(self._place)
        self._store.has(self._place, b"k" * 16)
        if found is None:
            return
        assert len(found.tokens) == len(found.decode_written)
        assert self._store.put(self._place, found)
        assert self._store.get(self._place) == found


class BlockTables:
    """Programs of sequences that begin, append, commit, publish and take back, against a model of memory."""

    def __init__(self, folder: Path) -> None:
        from tests.runtime.kv.test_block_table import Machine

        self._machine = Machine
        self._settings = settings(
            max_examples=5,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )

    def make(self, chance: random.Random) -> int:
        return chance.getrandbits(32)

    def run(self, given: int) -> None:
        machine = type("Seeded", (self._machine,), {})
        run_state_machine_as_test(seed(given)(machine), settings=self._settings)

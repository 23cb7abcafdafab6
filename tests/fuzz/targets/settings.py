"""The user's files: settings and presets."""

import random
from pathlib import Path

import tomlkit

from headrace.app.config.presets import load_presets
from headrace.app.config.settings import default_text, load_settings
from headrace.runtime.errors import UsageError
from tests.fuzz.mutate import mutated_bytes, mutated_value, value

_PRESETS = {"brief": {"system": "Be brief.", "sampling": {"temperature": 0.2}}}
_WORDS = (
    b"[chat]\n",
    b"[sampling]\n",
    b"temperature = ",
    b"nan",
    b"inf",
    b'"""',
    b"[[a]]",
    b"1979-05-27",
    b"0x",
    b"9" * 5000,
    b"[" * 999,
    b"\xff",
    b"\0",
)


class SettingsFile:
    """settings.toml or presets.toml, as values and as bytes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "settings.toml"
        text = default_text()
        self._bytes = text.encode()
        self._values = tomlkit.parse(
            text.replace("\n# temperature", "\ntemperature").replace("\n# seed", "\nseed")
        ).unwrap()

    def make(self, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return mutated_bytes(chance, self._bytes, words=_WORDS)
        changed = mutated_value(chance, self._values if chance.random() < 0.8 else _PRESETS)
        if chance.random() < 0.5 and isinstance(changed, dict):
            section = changed.setdefault("sampling", {})
            if isinstance(section, dict):
                section[chance.choice(("temperature", "top_k", "seed", "top_p", "max_tokens"))] = value(chance, 0)
        try:
            return tomlkit.dumps(changed).encode("utf-8", "surrogatepass")
        except Exception:  # what TOML cannot say
            return mutated_bytes(chance, self._bytes, words=_WORDS)

    def run(self, given: bytes) -> None:
        self._path.write_bytes(given)
        try:
            load_settings(self._path)
        except UsageError:
            load_presets(self._path)

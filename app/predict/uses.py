"""Uses of recommended models: their labels, and a recommendation.

`app.predict.recommend` finds them in the catalog. Chat, commands and the messages of the engine's process show them,
so this module imports nothing heavy.

Guard: tests/app/predict/test_recommend.py.
"""

from collections.abc import Mapping

from msgspec import Struct

STAR = "★"
"""Mark of a recommended model."""
USES: Mapping[str, str] = {"chat": "best chat", "code": "best for code", "fastest": "fastest"}
"""Labels of the uses that models are recommended for; a test compares the names."""


class Recommendation(Struct, frozen=True):
    """One model of the catalog.

    download_bytes: of its files.
    tokens_per_second: predicted decode speed with `app.predict.DEFAULT_CONTEXT` tokens in the cache; None if it is not
        known yet.
    is_limit: the speed is the roofline, an upper bound; else the expected speed.
    installed: the files are in the store.
    """

    name: str
    download_bytes: int
    tokens_per_second: float | None
    is_limit: bool
    installed: bool = False


def legend(uses: Mapping[str, list[str]]) -> str:
    """Return the uses in one line: `★ best chat: qwen3.5-4b · fastest: lfm2.5-1.2b`; empty without any."""
    models = {use: name for name, its_uses in uses.items() for use in its_uses}
    parts = [f"{label}: {models[use]}" for use, label in USES.items() if use in models]
    if not parts:
        return ""
    return f"{STAR} {' · '.join(parts)}"

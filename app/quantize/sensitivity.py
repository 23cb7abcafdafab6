"""KL of a model with one part rounded, against the given weights, for each part; kept on disk as it is measured.

A part is rounded to its probe format, about 3 bits, and a text goes through the network. KL grows with the square of a
small change of the weights, so the KL of another format is the probe's times the ratio of their squared errors.
`quantize.py` measures all parts before it chooses; the cache lets an interrupted run go on.

Guard: tests/app/quantize/test_mixtures.py.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import mlx.core as mx
from msgspec import Struct

from headrace.app.output.progress import NumberedStages
from headrace.models.loading.bit_choice import PartFormat
from headrace.models.loading.divergence import Divergence, divergence
from headrace.models.loading.forcing import CHUNK, TeacherForcing
from headrace.models.loading.importance import record_importance
from headrace.models.loading.measurement_key import measurement_key
from headrace.models.loading.mixed_quantization import FORMATS, PlainModel, WeightGroup, squared_errors, trial
from headrace.models.network.decoder import Decoder
from headrace.runtime.config.files import read_cache, touch_cache, write_cache
from headrace.runtime.config.paths import cache_dir
from headrace.runtime.machine.memory import release_unused
from headrace.runtime.network import Network

_VERSION = 2  # of the measurement; a change makes stored ones void
_MAX_MODELS = 32  # with stored measurements, about 100 KB each
_FLOOR = 1e-9  # nats; the least KL of a probe, so that larger errors never look free


class Excerpt(Struct, frozen=True):
    """Tokens to feed, and the next token of each."""

    fed: Sequence[int]
    targets: Sequence[int]


class Reference:
    """Logits of the given weights for an excerpt, computed as they are compared.

    It keeps the last layer's output, T tokens by E, and the head: logits of 512 tokens and 262,144 entries would take
    512 MiB.
    """

    def __init__(self, decoder: Decoder, excerpt: Excerpt) -> None:
        self._excerpt = excerpt
        self._ends = decoder.without_layers()
        forced = _begun(decoder, excerpt)
        self._chunks = list(forced.score(excerpt.fed, "prefill", lambda x: x))  # (CHUNK, 1, E) each
        forced.end()

    def compare(self, network: Network) -> Divergence:
        """Return the divergence of another network's logits."""
        forced = _begun(network, self._excerpt)
        compared = Divergence()
        scored = 0
        for logits, last_layer in zip(forced.score(self._excerpt.fed, "prefill"), self._chunks, strict=True):
            targets = list(self._excerpt.targets[scored : scored + CHUNK])
            compared += divergence(self._ends.logits(last_layer), logits, mx.array(targets))
            scored += len(targets)
        forced.end()
        return compared


def importances_of(decoder: Decoder, excerpt: Excerpt) -> dict[str, mx.array]:
    """Return the importance of columns for the excerpt, by part."""

    def feed(recording: Decoder) -> None:
        forced = _begun(recording, excerpt)
        for _ in forced.score(excerpt.fed, "prefill"):
            pass
        forced.end()

    return record_importance(decoder, feed)


def _begun(network: Network, excerpt: Excerpt) -> TeacherForcing:
    forced = TeacherForcing(network, len(excerpt.fed))
    forced.begin([])
    return forced


class Sensitivities:
    """Measurements of one model, stored in the cache folder under a key of its files and the text."""

    def __init__(self, model: PlainModel, excerpt: Excerpt) -> None:
        self._model = model
        key = measurement_key(model.checkpoint, _VERSION, list(excerpt.fed), FORMATS)
        self._file = cache_dir() / "quantize" / f"{key}.json"
        touch_cache(self._file, _MAX_MODELS)
        self._measured = read_cache(self._file)

    def count(self, parts: Sequence[WeightGroup]) -> int:
        """Return how many parts have been measured."""
        return sum(_is_whole(self._measured.get(part.name), part) for part in parts)

    def measure(
        self,
        decoder: Decoder,
        importances: Mapping[str, mx.array],
        reference: Reference,
        parts: Sequence[WeightGroup],
        stages: NumberedStages,
    ) -> None:
        """Measure the parts that have not been, and store each at once."""
        for number, part in enumerate(parts, start=1):
            if _is_whole(self._measured.get(part.name), part):
                continue
            stages.begin(number, len(parts), part.name)
            importance = importances.get(part.name)
            errors = squared_errors(self._model, part, importance)
            kl = fmean(reference.compare(trial(self._model, decoder, part, importance)).kl)
            release_unused()
            self._measured[part.name] = {"kl": kl, "squared_errors": errors}
            write_cache(self._file, self._measured)

    def options(self, part: WeightGroup) -> list[PartFormat]:
        """Return the part's formats with their bytes and predicted KL."""
        row = self._measured[part.name]
        errors = dict(zip(part.formats, row["squared_errors"], strict=True))
        probe = max(errors[part.probe], 1e-30)  # a part that the probe's format stores exactly has no error
        kl = max(row["kl"], _FLOOR)
        return [PartFormat(groups, part.nbytes(groups), kl * error / probe) for groups, error in errors.items()]


def _is_whole(row: object, part: WeightGroup) -> bool:
    """Return whether a stored row is a measurement of the part, as a damaged file may not have it."""
    if not isinstance(row, dict):
        return False
    kl = row.get("kl")
    errors = row.get("squared_errors")
    if not isinstance(kl, float) or not isinstance(errors, list) or len(errors) != len(part.formats):
        return False
    return all(isinstance(error, float) for error in errors)

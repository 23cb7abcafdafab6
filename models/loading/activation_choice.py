"""Choice of 8-bit activations for prompts by their measured KL divergence, which is kept on disk for each model.

The networks of both widths share every weight. A text of the package goes through both, as a prompt, and the
predictions of the one with 8 bits are compared with those of the other.

Guard: tests/models/loading/test_activation_choice.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.loading.forcing import TeacherForcing
from headrace.models.loading.measurement_key import measurement_key
from headrace.models.network.activations import rounded_widths, unsupported, with_activations
from headrace.models.network.decoder import Decoder
from headrace.models.registry.progress import Progress
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime import ops
from headrace.runtime.config.files import read_cache, touch_cache, write_cache
from headrace.runtime.config.paths import ASSETS, cache_dir
from headrace.runtime.network import Network

MAX_KL = 0.001
"""Nats per token: the largest mean divergence from 16 bits at which "auto" takes 8."""
_FASTER_WIDTHS: dict[str | None, set[int]] = {"avx512": {2, 4, 8}, "avx2": {2, 4}, "neon": {2, 4}}
"""Bits of weights whose products with bytes are faster than those with 16-bit integers, by instruction set."""
_TOKENS = 256  # of the text, over which the divergence is the mean
_CHARACTERS = 8 * _TOKENS  # of the text: enough for as many tokens
_MAX_MODELS = 256  # with a stored divergence; the least recently used goes first
_VERSION = 1  # of the measurement and of the rounding; a change makes stored values void


def choose_activations(
    network: Network,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
    context: int,
    progress: Progress,
) -> tuple[Network, str | None]:
    """Return the network with 8-bit activations if they are faster and MAX_KL allows them, and a note for the user.

    network: with activations in 16 bits; returned as it is if they stay.
    checkpoint: files of its weights, by which the measurement is kept.
    context: the model's maximum, in tokens.
    progress: called while the divergence is measured, once for each model.
    The note is None if 8 bits were chosen by an earlier measurement.
    """
    # Without a measurement where 8 bits are of no use.
    reason = unsupported(network) or _no_gain(network)
    if reason is not None:
        return network, f"activations stay in 16 bits: {reason}"
    coarse = with_activations(network, 8)
    ids = tokenizer.encode_prompt(_text())[: min(_TOKENS, context)]
    if max(ids) >= network.vocab_size:
        return network, "activations stay in 16 bits: the tokenizer has ids outside the model's vocabulary"

    # The stored divergence, or a new one.
    key = measurement_key(checkpoint, _VERSION, list(ids))
    file = _cache_folder() / f"{key}.json"
    touch_cache(file, _MAX_MODELS)
    kl = read_cache(file).get("kl")
    note = None
    if not isinstance(kl, float):
        kl = _measured_kl(network, coarse, ids, lambda: progress("measuring 8-bit activations", 0, None))
        write_cache(file, {"kl": kl})
        note = f"activations in 8 bits: a measured KL divergence of {kl:.2g} nats, at most {MAX_KL}"
    if kl <= MAX_KL:
        return coarse, note
    return network, f"activations stay in 16 bits: 8 have a KL divergence of {kl:.2g} nats, over {MAX_KL}"


def _no_gain(network: Network) -> str | None:
    """Return why products with 8-bit activations are not faster than with 16-bit ones; None if they are."""
    assert isinstance(network, Decoder)  # `unsupported` has refused others
    instruction_set = ops.native.status().instruction_set
    widths = rounded_widths(network)
    if widths & _FASTER_WIDTHS.get(instruction_set, set()):
        return None
    bits = " and ".join(map(str, sorted(widths)))
    return f"8 are not faster with weights of {bits} bits on the {instruction_set} kernels"


def _measured_kl(fine: Network, coarse: Network, ids: Sequence[int], tick: Callable[[], None]) -> float:
    """Return the mean KL divergence of `coarse` from `fine` in nats, over a prompt of these tokens."""
    from headrace.models.loading.divergence import divergence  # late: imports numpy

    both = [TeacherForcing(network, len(ids), tick) for network in (fine, coarse)]
    for forced in both:
        forced.begin([])
    total = 0.0
    for reference, other in zip(*(forced.score(ids, "prefill") for forced in both), strict=True):
        no_targets = mx.zeros(reference.shape[0], mx.uint32)  # of a perplexity, which is not needed
        total += sum(divergence(reference, other, no_targets).kl)
    for forced in both:
        forced.end()
    return total / len(ids)


def _text() -> str:
    """Return the beginning of the package's text."""
    return (ASSETS / "quality_text.txt").read_text(encoding="utf-8")[:_CHARACTERS]


def _cache_folder() -> Path:
    return cache_dir() / "activations"

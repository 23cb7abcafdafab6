"""The lines of `headrace models show`: a model's format, sizes, costs and quality as (label, text).

Lines are made of a document of `app.model_info.model_report`, as `models show --json` prints it. A model that is not
installed has fewer keys, hence fewer lines. A new line reads a key there.

Guards: tests/app/cli/test_models.py; tests/app/quantize/test_quantize.py for the figures of a quantized copy.
"""

from headrace.app.model_info.chat_facts import chat_line
from headrace.app.model_info.kv_fits import NOTHING, fits_text
from headrace.app.output.document import Document
from headrace.app.quantize.figures import QuantizedHere
from headrace.runtime.config.typed import typed
from headrace.runtime.metrics.units import format_bytes, format_context, percent

_MAX_DIFFERING = 8  # modules in another format that `show` names; more would fill the screen

# Texts of `show` for the values of `sequences`, `speculates` and `draft_head` in `checkpoint_document`.
_SEQUENCES = {
    "batched": "several share each pass (`batch`, `run --samples`)",
    "turns": "several take turns, one pass each",
}
_SPECULATION = {
    True: "supported",
    False: "off: the cache cannot drop rejected draft tokens",
    None: "unknown: the model's architecture is not supported",
}
_HEAD = ", with a multi-token prediction head"


def fact_rows(document: Document) -> list[tuple[str, str]]:
    """Return (label, text) of a model. A label is "" in a line that belongs to the one above."""
    rows = [("Model", document["name"])]
    if not document["installed"]:
        rows += _missing_rows(document)
    rows += [("Origin", document["origin"]), ("Licence", document["licence"] or "not stated")]
    if "released" in document:
        rows.append(("Released", document["released"] + (", made for code" if document["use"] == "code" else "")))
    if document["installed"]:
        decoder = "headrace's own decoder"
        if document["decoder"] != "headrace":
            from headrace.models.mlx_lm.fixes import class_name  # late: other models need none of it

            decoder = class_name({"model_type": document["architecture"]})
        rows += [
            ("Directory", document["path"]),
            ("Architecture", f"{document['architecture']}, run by {decoder}"),
            ("Sequences", _SEQUENCES[document["sequences"]]),
            ("Speculation", _SPECULATION[document["speculates"]] + _HEAD * document["draft_head"]),
            ("Chat", chat_line(document["chat"])),
            ("On disk", format_bytes(document["disk_bytes"])),
        ]
    rows.append(("Context", f"{format_context(document['context'])} tokens"))
    rows += _quantization_rows(document)
    rows += _quality_rows(document.get("quantized_here"))
    rows.append(("Weights", format_bytes(document["weight_bytes"])))
    if document.get("bytes_per_step") is not None:
        rows.append(("Decode step", _step_text(document)))
    if document["kv_bytes_per_token"] is not None:
        rows.append(("KV cache", f"{format_bytes(document['kv_bytes_per_token'])} a token, in half precision"))
    if fits := fits_text(document["context_fits"], document["context"]):
        if fits != NOTHING:
            fits += " tokens of context"
        rows.append(("Fits now", fits))
    if document["memory_bytes"] is not None:
        context = format_context(document["memory_context"])
        rows.append(("Memory", f"{format_bytes(document['memory_bytes'])} with {context} tokens of context"))
    return rows


def _missing_rows(document: Document) -> list[tuple[str, str]]:
    if document.get("copy_bytes") == 0:
        return [("", "not in the store, and needs no copy there: it runs from its file")]
    if "copy_bytes" in document:
        pull = f"`headrace models pull {document['path']}` copies it"
        return [("", f"not in the store: {pull}"), ("Copy", format_bytes(document["copy_bytes"]))]
    pull = f"`headrace models pull {document['name']}` fetches it"
    size = "unknown"
    if document["download_bytes"] is not None:
        size = format_bytes(document["download_bytes"])
    return [("", f"not installed: {pull}"), ("Download", size)]


def _step_text(document: Document) -> str:
    weights = document["weight_bytes_per_step"]
    total = document["bytes_per_step"]
    context = format_context(document["memory_context"])
    return f"{format_bytes(weights)} of weights; {format_bytes(total)} in all after {context} tokens"


def _quantization_rows(document: Document) -> list[tuple[str, str]]:
    stated = document["quantization"]
    if isinstance(stated, str):
        return [("Format", stated)]
    formats: dict[str, int] = stated["formats"]
    rows = [("Format", "; ".join(f"{count} × {name}" for name, count in formats.items()) or "no matrices")]
    differing: dict[str, str] = stated["differing"]
    if len(differing) <= _MAX_DIFFERING:
        rows += [("", f"{module}: {name}") for module, name in differing.items()]
    if document["stored_format"]:
        rows.append(("Loading", document["stored_format"]))
    requantized = document["requantized"]
    if requantized:
        kinds = sorted({f"{row.get('type')} to {row.get('became')}" for row in requantized})
        rows.append(("Requantized", f"{len(requantized)} tensors have no exact form in MLX: {', '.join(kinds)}"))
    return rows


def _quality_rows(stored: object) -> list[tuple[str, str]]:
    """Return the figures that `headrace quantize` stored; nothing for a text or an object of another form."""
    try:
        quality = typed(QuantizedHere, stored)
    except ValueError:  # headrace.json of a folder may be anyone's
        return []
    top1 = percent(quality.top1_agreement.value, 1)
    text = f"{quality.kl.value:.4f} nats of KL from the given weights; most likely token equal in {top1}"
    rows = [("Quality", text), ("Bits a weight", f"{quality.bits_per_weight:.3f}")]
    speed = quality.predicted
    at_most = "at most " if speed.bound else ""
    rows += [
        ("Predicted", f"{at_most}{speed.tokens_per_second:.1f} tok/s on {speed.target} after {speed.context:,} tokens"),
        (
            "Measured",
            f"{quality.measured_tokens_per_second:.1f} tok/s when it was quantized, at the beginning of a context",
        ),
    ]
    return rows

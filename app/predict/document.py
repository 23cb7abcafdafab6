"""JSON documents of predictions; every view is made from these.

`headrace predict` and `headrace fit` print them as they are with --json, and through `view.py` without. One function
for each kind: `prediction`, `users_prediction`, `explanation`, `catalog_fit`.

Scripts read the keys, so none may be renamed. Fields of `Prediction`, `Operation` and other records are keys, too,
where `asdict` writes them.

Guard: tests/app/predict/test_predict.py reads the keys by name.
"""

from collections.abc import Sequence

from msgspec.structs import asdict

from headrace.app.output.document import Document
from headrace.app.predict.fit_store import MeasuredFit
from headrace.app.predict.measured import measured_speed
from headrace.app.predict.prediction import (
    Prediction,
    TargetMachine,
    largest_context,
    levers,
    max_sequences,
    predict,
    summarise_assumptions,
)
from headrace.app.predict.recommend import recommendations, uses_by_model
from headrace.models.cost.step_shape import Operation, StepShape, total
from headrace.models.registry.catalog import load_catalog
from headrace.runtime.machine.chips import table, without_vendor
from headrace.runtime.ops.kv_format import FLOAT16

_SPEEDS = ("roofline", "expected")  # fields of `Prediction` that are totals of all users
_NOTICEABLE = 0.005  # smaller gains round to 1.00


def prediction(name: str, shape: StepShape, targets: Sequence[TargetMachine], contexts: Sequence[int]) -> Document:
    """Predict one model on every target at every context, and the gain of each change on the first target."""
    first = targets[0]
    longest = max(contexts)
    rows = []
    for target in targets:
        predictions = []
        for context in contexts:
            measured = _measured(name, shape, target, context)
            predictions.append({**asdict(predict(shape, target, context)), "measured": measured})
        context_limit = largest_context(shape, target)
        rows.append({**_target(target), "largest_context": context_limit, "predictions": predictions})
    return {
        "model": described_model(name, shape),
        "contexts": list(contexts),
        "targets": rows,
        "levers": {
            "target": first.name,
            "context": longest,
            "as_is": _lever(shape, first, predict(shape, first, longest)),
            "changes": _improvements(shape, first, longest),
        },
        "assumptions": [*summarise_assumptions(targets, shape.kv_format), f"sizes from {shape.source}"],
    }


def users_prediction(
    name: str, shape: StepShape, targets: Sequence[TargetMachine], users: Sequence[int], context: int
) -> Document:
    """Predict one model for several users at a time, each with `context` tokens."""
    return {
        "model": described_model(name, shape),
        "context": context,
        "users": list(users),
        "targets": [
            {
                **_target(target),
                "compute_tflop_s": _tera(target.flops),
                "most_users": max_sequences(shape, target, context),
                "predictions": [_shared(predict(shape, target, context, count)) for count in users],
            }
            for target in targets
        ],
        "assumptions": [
            *summarise_assumptions(targets, shape.kv_format),
            "users decode together: a step reads the weights once and every user's K/V, for a token each",
            "users share no prefix",
            f"sizes from {shape.source}",
        ],
    }


def _shared(prediction: Prediction) -> Document:
    """Return a prediction with speeds in total and per user."""
    result = asdict(prediction)
    for key in _SPEEDS:
        speed = getattr(prediction, key)
        result[f"{key}_per_user"] = None
        if speed is not None:
            result[f"{key}_per_user"] = speed / prediction.batch
    return result


def catalog_fit(target: TargetMachine, context: int) -> Document:
    """Predict every catalog model on one target, smallest first."""
    uses = uses_by_model(recommendations(target))
    rows = []
    for entry in load_catalog().values():
        shape = entry.step_shape
        cached = min(context, shape.context_length - 1)
        rows.append(
            {
                "model": entry.name,
                "title": entry.title,
                "quantization": entry.quantization,
                "largest_context": largest_context(shape, target),
                "recommended_for": uses.get(entry.name, []),
                **asdict(predict(shape, target, cached)),
            }
        )
    return {
        "target": _target(target),
        "context": context,
        "models": rows,
        "assumptions": [*summarise_assumptions([target], FLOAT16), "sizes from the catalog"],
    }


def explanation(name: str, shape: StepShape, *, past: int, prefill: int) -> Document:
    """List every read of a decode step with `past` cached entries, and of a prefill of `prefill` tokens."""
    return {
        "model": described_model(name, shape),
        "past": past,
        "prefill_tokens": prefill,
        "step": _costs(shape.step(past)),
        "prefill": _costs(shape.prefill(prefill)),
    }


def known_chips() -> list[Document]:
    """Return the chip table with sources."""
    return [
        {
            "name": without_vendor(chip.name),
            "gpu_cores": list(chip.gpu_cores),
            "memory_gb": list(chip.memory_gb),
            "max_memory_gb": chip.max_memory_gb,
            "bandwidth_gb_s": chip.bandwidth / 1e9,
            "fp16_tflops": _tera(chip.fp16_flops),
            "source": chip.source,
        }
        for chip in table()
    ]


def _costs(rows: Sequence[Operation]) -> Document:
    nbytes, flops = total(rows)
    return {
        "operations": [{**asdict(row), "intensity": row.intensity} for row in rows],
        "total_bytes": nbytes,
        "total_flops": flops,
        "intensity": flops / nbytes,
    }


def described_model(name: str, shape: StepShape) -> Document:
    """Return the sizes of a model."""
    cost = shape.cost
    return {
        "name": name,
        "source": shape.source,
        "layers": shape.layers,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "context_length": shape.context_length,
        "parameters": shape.parameters,
        "weight_bytes": shape.resident_bytes,
        "weight_bytes_per_step": cost.weight_bytes,
        "kv_format": shape.kv_format.name,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
    }


def _target(target: TargetMachine) -> Document:
    return {
        "name": target.name,
        "bandwidth_gb_s": target.bandwidth / 1e9,
        "bandwidth_is_measured": target.measured,
        "usable_memory_bytes": target.memory,
        "fit": _fit(target.fit),
    }


def _tera(flops: float | None) -> float | None:
    return flops / 1e12 if flops else None


def _measured(name: str, shape: StepShape, target: TargetMachine, context: int) -> Document | None:
    """Return the measured speed of exactly this model, chip and context, with K/V in half precision."""
    if shape.kv_format.packed:
        return None
    speed = measured_speed(name, target, context)
    return None if speed is None else asdict(speed)


def _fit(fit: MeasuredFit | None) -> Document | None:
    if fit is None:
        return None
    return {
        "fixed_ms": fit.fixed_s * 1e3,
        "bandwidth_gb_s": fit.bytes_per_second / 1e9,
        "created": fit.created,
        "command": fit.command,
        "quiet": fit.quiet,
    }


def _improvements(shape: StepShape, target: TargetMachine, context: int) -> list[Document]:
    """Return the changes that fit and make it faster, or make it fit; `gain` is the speed-up, None in that case."""
    as_is = predict(shape, target, context)
    improvements = []
    for lever in levers(shape):
        changed = predict(lever.shape, target, context, lever.batch)
        if changed.fits is False:
            continue
        gain = None
        if as_is.fits is not False:
            gain = changed.speed / as_is.speed
            if gain <= 1 + _NOTICEABLE:
                continue
        improvements.append({"name": lever.name, "gain": gain, **_lever(lever.shape, target, changed)})
    return improvements


def _lever(shape: StepShape, target: TargetMachine, prediction: Prediction) -> Document:
    """Return what a shape, as it is or changed, takes on a target."""
    return {
        "memory": prediction.memory,
        "fits": prediction.fits,
        "step_bytes": prediction.step_bytes,
        "roofline": prediction.roofline,
        "expected": prediction.expected,
        "largest_context": largest_context(shape, target),
    }

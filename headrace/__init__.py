"""headrace: quantized language models on your own machine, with the decode loop in view.

    from headrace import load

    for part in load("smollm2-135m").chat("Why is the sky blue?", max_tokens=100):
        print(part.text, end="", flush=True)

`__all__` is the public API; everything else may change. Each name is imported on first use, so that `import headrace`
by itself costs nothing.

The package's parts stand at the top of the repository (`app/`, `models/`, `runtime/`, `assets/`). Links beside this
file make them `headrace.app` and so on, in the source tree as in a wheel.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.app.api import Model, load, predict
    from headrace.app.predict.prediction import Prediction
    from headrace.models.text.answer import Completed, TextChunk
    from headrace.runtime.engine.request import CancelFlag
    from headrace.runtime.errors import HeadraceError
    from headrace.runtime.metrics.telemetry import StepRecord, Summary
    from headrace.runtime.sampling.params import SamplingParams

__all__ = [
    "CancelFlag",
    "Completed",
    "HeadraceError",
    "Model",
    "Prediction",
    "SamplingParams",
    "StepRecord",
    "Summary",
    "TextChunk",
    "load",
    "predict",
]

_HOMES = {
    "app.api": ("Model", "load", "predict"),
    "app.predict.prediction": ("Prediction",),
    "models.text.answer": ("Completed", "TextChunk"),
    "runtime.errors": ("HeadraceError",),
    "runtime.engine.request": ("CancelFlag",),
    "runtime.sampling.params": ("SamplingParams",),
    "runtime.metrics.telemetry": ("StepRecord", "Summary"),
}


def __getattr__(name: str) -> object:
    """Import a public name from its module (PEP 562)."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

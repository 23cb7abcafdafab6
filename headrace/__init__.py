"""headrace: quantized language models on your own machine, with the decode loop in view.

    from headrace import load

    with load("smollm2-135m") as model:
        print(model.generate("Why is the sky blue?", max_tokens=100))

`__all__` and `__version__` are the public API; everything else may change. Each name is imported on first use, so that
`import headrace` by itself costs nothing.

The package's parts stand at the top of the repository (`app/`, `models/`, `runtime/`, `assets/`). Links beside this
file make them `headrace.app` and so on, in the source tree as in a wheel.

Guard: tests/test_api.py.
"""

TYPE_CHECKING = False  # as type checkers know it; importing `typing` takes milliseconds

if TYPE_CHECKING:
    from headrace.app.answer.answer_stream import AnswerStream
    from headrace.app.answer.generation import Generation
    from headrace.app.api import Model, load, predict
    from headrace.app.predict.prediction import Prediction
    from headrace.models.text.events import Completed, TextChunk
    from headrace.runtime.engine.request import CancelFlag
    from headrace.runtime.errors import (
        CheckpointError,
        ContextLimitError,
        EngineError,
        FetchError,
        HeadraceError,
        ModelNotFoundError,
        NotEnoughMemoryError,
        UnsupportedModelError,
        UsageError,
    )
    from headrace.runtime.metrics.telemetry import StepRecord, Summary
    from headrace.runtime.sampling.params import SamplingParams

    __version__: str

__all__ = [
    "AnswerStream",
    "CancelFlag",
    "CheckpointError",
    "Completed",
    "ContextLimitError",
    "EngineError",
    "FetchError",
    "Generation",
    "HeadraceError",
    "Model",
    "ModelNotFoundError",
    "NotEnoughMemoryError",
    "Prediction",
    "SamplingParams",
    "StepRecord",
    "Summary",
    "TextChunk",
    "UnsupportedModelError",
    "UsageError",
    "load",
    "predict",
]

_HOMES = {
    "app.answer.answer_stream": ("AnswerStream",),
    "app.answer.generation": ("Generation",),
    "app.api": ("Model", "load", "predict"),
    "app.predict.prediction": ("Prediction",),
    "models.text.events": ("Completed", "TextChunk"),
    "runtime.engine.request": ("CancelFlag",),
    "runtime.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "runtime.metrics.telemetry": ("StepRecord", "Summary"),
    "runtime.sampling.params": ("SamplingParams",),
}


def __getattr__(name: str) -> object:
    """Import a public name from its module (PEP 562)."""
    from importlib import import_module

    if name == "__version__":
        return _version()
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headrace")
    except PackageNotFoundError:  # imported from a clone that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

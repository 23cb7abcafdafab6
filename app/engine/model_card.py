"""The loaded model and its machine, as the chat shows them.

`EngineHost.card` fills it and `Ready` carries it; `telemetry.py` writes it for other machines. A new field is set in
`EngineHost.card`, and has a default or a value in `telemetry._read_card`.

Guard: tests/app/engine/test_client.py.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:  # the chat's first frame does not import them
    from headrace.app.predict.uses import Recommendation
    from headrace.runtime.machine.hardware import Machine
    from headrace.runtime.machine.memory import MemoryBudget
    from headrace.runtime.machine.peaks import Peak
    from headrace.runtime.metrics.cost import StepCost


class ModelCard(Struct, frozen=True):
    """Facts of a loaded model that do not change while it is loaded, but for what is measured later.

    name: as it is shown, without a path.
    path, origin, licence: of its files.
    kind: "headrace" or "mlx-lm", the decoder's origin.
    context_limit: tokens of prompt and answer together.
    weight_bytes: of the checkpoint, as loaded.
    cost: of a decode step.
    generation_defaults: generation_config.json.
    thinks: the chat template has <think> sections.
    thinking_levels: it takes levels of thinking.
    load_s: seconds that fetching and loading took.
    peak, compute_flops: None until measured (`PeakMeasured`).
    budget: memory available to it, when it was loaded.
    kernels: see `ops.describe`.
    spare_cpus: not used for decoding.
    active_memory_bytes: MLX's after loading.
    notes: lines for the user.
    kv: name of the K/V format; None: that of mlx-lm's classes.
    activations: bits of prompts' activations.
    ranks: a line per rank, if several machines share the model.
    is_sample: the default model, which is there to try the program with.
    recommended: the model to use in its place; None until it is known (`Recommended`).
    """

    name: str
    path: str
    origin: str
    licence: str | None
    kind: str
    context_limit: int
    weight_bytes: int
    cost: "StepCost"
    generation_defaults: Mapping[str, object]
    thinks: bool
    load_s: float
    machine: "Machine"
    peak: "Peak | None"
    budget: "MemoryBudget | None"
    kernels: Mapping[str, str]
    spare_cpus: int
    active_memory_bytes: int
    notes: tuple[str, ...] = ()
    kv: str | None = None
    activations: int = 16
    compute_flops: float | None = None
    thinking_levels: bool = False
    ranks: tuple[str, ...] = ()
    is_sample: bool = False
    recommended: "Recommendation | None" = None

    @property
    def kv_bytes_per_token(self) -> int:
        return self.cost.kv_bytes_per_token

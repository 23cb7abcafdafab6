"""Other implementations on the same weights (`--vs`). A peer that cannot be opened becomes a note."""

import hashlib
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from headrace.app.bench.measure.child import ChildProcess
from headrace.app.bench.measure.kv_formats import openvino_kv_types, peer_kv_type
from headrace.app.bench.measure.llama_bench import LlamaBench
from headrace.app.bench.measure.pair import questions
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Backend
from headrace.models.gguf.container import open_container
from headrace.models.loading.load import LoadedModel
from headrace.models.registry.progress import Progress, silent
from headrace.runtime.errors import EngineError, HeadraceError

Engine = Literal["mlx-lm", "llama.cpp", "openvino"]
CHILDREN = Path(__file__).parent / "children"


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer to compare with.

    python: its interpreter (None: ours, or llama-bench for llama.cpp). gguf: the model file of llama.cpp and openvino.
    kv: our K/V format, mapped to theirs.
    """

    engine: Engine
    python: str | None = None
    gguf: str | None = None
    kv: str = "f16"


def open_peers(
    peers: Sequence[Peer],
    loaded: Sequence[LoadedModel],
    tests: Sequence[Test],
    threads: int,
    stack: ExitStack,
    progress: Progress = silent,
) -> tuple[list[Backend], list[str]]:
    """Return the opened backends and a note about every peer. mlx-lm takes every model, the others the first.

    threads: told to every peer for prompts and decoding; its `setup` holds the numbers it uses. `stack` closes the
    backends, also when opening another is interrupted. Raises EngineError if no requested peer opens.
    """
    backends: list[Backend] = []
    notes: list[str] = []
    for peer in peers:
        models = loaded if peer.engine == "mlx-lm" else loaded[:1]
        for model in models:
            progress(f"starting {peer.engine}", 0, None)
            try:
                backend, note = _open(peer, model, tests, threads)
            except (EngineError, OSError) as error:
                notes.append(f"{peer.engine} is left out: {error}")
                continue
            stack.callback(backend.close)
            backends.append(backend)
            notes.append(note)
    if peers and not backends:
        raise EngineError(f"nothing to compare with: {'; '.join(notes)}")
    return backends, notes


def _open(peer: Peer, model: LoadedModel, tests: Sequence[Test], threads: int) -> tuple[Backend, str]:
    if peer.engine == "mlx-lm":
        script = str(CHILDREN / "mlx_lm_child.py")
        command = [peer.python or sys.executable, script, str(model.checkpoint.path)]
        # MLX's only thread setting on a CPU: its linear algebra library's.
        variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
        child = ChildProcess("mlx-lm", model.name, command, variables, threads=threads)
        return child, f"mlx-lm {child.setup.version} reads the same directory as headrace"
    gguf = peer.gguf
    if gguf is None:
        raise no_gguf()
    same = _same_weights(gguf, model)
    if peer.engine == "openvino":
        room = max(test.tokens for test in tests), max(test.batch for test in tests), threads
        return open_openvino(
            peer, gguf, model.name, room
        ), f"OpenVINO GenAI's own reader of GGUF, {same}{rounded(gguf)}"
    kind = peer_kv_type(peer.kv)
    if peer.python is not None:
        script = str(CHILDREN / "llama_cpp_child.py")
        most = str(max(test.tokens for test in tests))
        command = [peer.python, script, gguf, most, str(threads), kind]
        asked = questions(model, tests)
        child = ChildProcess("llama.cpp", model.name, command, threads=threads, tunes=True, questions=asked)
        lookup = ", prompt lookup decoding with 2 or 10 draft tokens, the faster for each workload" if asked else ""
        return child, f"llama.cpp through llama-cpp-python {child.setup.version}, {same}{lookup}"
    program = shutil.which("llama-bench")
    if program is None:
        raise EngineError(
            "no llama-bench on the PATH; install it, or name a Python that has llama-cpp-python with --llama-python"
        )
    return LlamaBench(model.name, program, gguf, threads, kind), f"llama.cpp through {program}, {same}"


def no_gguf() -> EngineError:
    return EngineError("no GGUF file of the model; give -m FILE.gguf or --llama-model FILE.gguf")


def open_openvino(peer: Peer, gguf: str, model: str, numbers: tuple[int, int, int]) -> ChildProcess:
    """Start OpenVINO's process. numbers: tokens of a sequence, sequences, threads."""
    scratch = TemporaryDirectory(prefix="headrace-openvino-")  # of its converted model
    try:
        script = str(CHILDREN / "openvino_child.py")
        kinds = ",".join(openvino_kv_types(peer.kv))
        command = [peer.python or sys.executable, script, gguf, scratch.name, *map(str, numbers), kinds]
        return ChildProcess("openvino", model, command, threads=numbers[-1], tunes=True, scratch=scratch)
    except BaseException:
        scratch.cleanup()
        raise


def rounded(gguf: str) -> str:
    """Return a remark if OpenVINO's reader changes weights: it keeps the minimum of a Q4_1 group in whole steps."""
    try:
        kinds = {tensor.type for tensor in open_container(Path(gguf)).tensors.values()}
    except (HeadraceError, OSError):
        return ""  # the peer says why
    return "; openvino rounds the minima of Q4_1 groups to whole steps" if "Q4_1" in kinds else ""


def _same_weights(gguf: str, model: LoadedModel) -> str:
    """Return whether headrace's model was converted from this very GGUF file."""
    known = (model.checkpoint.origin or {}).get("sha256")
    with Path(gguf).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = Path(gguf).name
    if known == digest:
        return f"the same weights ({name}, sha256 {digest[:12]})"
    return f"possibly other weights ({name}, sha256 {digest[:12]})"

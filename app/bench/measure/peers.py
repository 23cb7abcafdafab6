"""Other implementations on the same weights (`--vs`): found, started, and described in a note.

A peer that cannot be opened becomes a note, too. A new peer is a function in `OPENERS` that returns a `sample.Backend`,
a choice of --vs in `app/cli/bench/options.py`, its K/V formats in `kv_formats.check_formats`, and, if it needs its own
interpreter, a program in `children/`.

Guards: tests/app/bench/measure/test_peers.py and test_kv_formats.py.
"""

import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from headrace.app.bench.measure.child_process import ChildProcess
from headrace.app.bench.measure.kv_formats import peer_kv_type
from headrace.app.bench.measure.llama_bench import LlamaBench
from headrace.app.bench.measure.pair import questions
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Backend
from headrace.models.loading.load import LoadedModel
from headrace.models.registry.progress import Progress, silent
from headrace.runtime.errors import EngineError

CHILDREN = Path(__file__).parent / "children"


class Peer(Struct, frozen=True):
    """A peer to compare with.

    engine: its name in `OPENERS`.
    python: its interpreter; None: ours, or llama-bench for llama.cpp.
    gguf: the model file of llama.cpp, which needs one.
    kv: our K/V format, mapped to theirs.
    """

    engine: str
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

    peers: those asked for.
    loaded: headrace's models.
    tests: of the run; a child process allocates memory for the longest.
    threads: told to every peer for prompts and decoding; its `setup` has the numbers that it uses.
    stack: closes the backends, also when opening another is interrupted.
    progress: names the peer that is starting.

    Raises EngineError if no requested peer opens.
    """
    backends: list[Backend] = []
    notes: list[str] = []
    for peer in peers:
        models = loaded if peer.engine == "mlx-lm" else loaded[:1]
        for model in models:
            progress(f"starting {peer.engine}", 0, None)
            try:
                backend, note = OPENERS[peer.engine](peer, model, tests, threads)
            except (EngineError, OSError) as error:
                notes.append(f"{peer.engine} is left out: {error}")
                continue
            stack.callback(backend.close)
            backends.append(backend)
            notes.append(note)
    if peers and not backends:
        raise EngineError(f"nothing to compare with: {'; '.join(notes)}")
    return backends, notes


def _open_mlx_lm(peer: Peer, model: LoadedModel, _: Sequence[Test], threads: int) -> tuple[Backend, str]:
    script = str(CHILDREN / "mlx_lm_child.py")
    command = [peer.python or sys.executable, script, str(model.checkpoint.path)]
    # MLX's only thread setting on a CPU: its linear algebra library's.
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    child = ChildProcess("mlx-lm", model.name, command, variables, threads=threads)
    return child, f"mlx-lm {child.setup.version} reads the same directory as headrace"


def _open_llama_cpp(peer: Peer, model: LoadedModel, tests: Sequence[Test], threads: int) -> tuple[Backend, str]:
    gguf = peer.gguf
    if gguf is None:
        raise EngineError("no GGUF file of the model; give -m FILE.gguf or --llama-model FILE.gguf")
    same = same_weights(gguf, model)
    kind = peer_kv_type(peer.kv)
    if peer.python is not None:
        script = str(CHILDREN / "llama_cpp_child.py")
        max_tokens = str(max(test.tokens for test in tests))
        command = [peer.python, script, gguf, max_tokens, str(threads), kind]
        asked = questions(model, tests)
        child = ChildProcess("llama.cpp", model.name, command, threads=threads, tunes=True, questions=asked)
        note = f"llama.cpp through llama-cpp-python {child.setup.version}, {same}"
        if asked:
            note += ", prompt lookup decoding with 2 or 10 draft tokens, the faster for each workload"
        return child, note
    program = shutil.which("llama-bench")
    if program is None:
        raise EngineError(
            "no llama-bench on the PATH; install it, or name a Python that has llama-cpp-python with --llama-python"
        )
    return LlamaBench(model.name, program, gguf, threads, kind), f"llama.cpp through {program}, {same}"


OPENERS: dict[str, Callable[[Peer, LoadedModel, Sequence[Test], int], tuple[Backend, str]]] = {
    "mlx-lm": _open_mlx_lm,
    "llama.cpp": _open_llama_cpp,
}
"""Functions that start a peer for a model, tests and a number of threads; they return it with a note."""


def same_weights(gguf: str, model: LoadedModel) -> str:
    """Return in words whether headrace's model was converted from this very GGUF file."""
    known = (model.checkpoint.origin or {}).get("sha256")
    with Path(gguf).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = Path(gguf).name
    if known == digest:
        return f"the same weights ({name}, sha256 {digest[:12]})"
    return f"possibly other weights ({name}, sha256 {digest[:12]})"

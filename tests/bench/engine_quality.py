"""Divergence of other engines' logits from float32, on the same weights and text: the table of docs/benchmarks.md.

    python -m tests.bench.engine_quality FILE.gguf --llama-python PYTHON --ik-build FOLDER --openvino-python PYTHON

The reference is the same weights in float32 throughout (`HEADRACE_EXACT`), activations and K/V included; headrace
itself is one of the rows. Each engine runs at its default settings: llama.cpp and ik_llama.cpp with flash attention and
K/V in half precision; OpenVINO's converted model by its own runtime, since GenAI gives no logits, and once more in
float32.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from headrace.app.bench.measure.child_process import ChildProcess
from headrace.app.bench.measure.open_engines import use_threads
from headrace.app.bench.measure.peers import Peer
from headrace.app.bench.measure.setup import EngineSetup, check_threads
from headrace.app.bench.quality import show
from headrace.app.bench.quality.quality_run import (
    QualityDocument,
    QualityOptions,
    Variant,
    chosen_passages,
    document,
    load,
    measure,
)
from headrace.app.bench.quality.text import read_text
from headrace.app.output.document import json_text
from headrace.models.loading.forcing import CHUNK
from headrace.runtime import ops
from headrace.runtime.config import environment
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.machine.hardware import machine
from headrace.runtime.ops import Phase
from tests.bench.vs_openvino import OpenVINOProcess, rounded

HERE = Path(__file__).parent


class PeerLogits:
    """A peer's logits, in place of those of a network.

    width: logits in a row, the vocabulary; a peer's padding is cut off. exact: in float32 throughout.
    """

    def __init__(self, child: ChildProcess, width: int, file: Path, *, exact: bool = False) -> None:
        self.name = f"{child.engine} f32" if exact else child.engine
        self.setup = replace(child.setup, engine=self.name)
        self.seconds = 0.0  # of scored passes, by its own clock
        self._child = child
        self._width = width
        self._file = file
        self._how = {"exact": True} if exact else {}
        self._context: Sequence[int] = ()
        self._fed = False

    def begin(self, context: Sequence[int]) -> None:
        """Drop everything and feed `context`."""
        settings = self._child.ask({"context": list(context), **self._how})["settings"]
        self.setup = replace(self.setup, settings=settings)
        self._context = context
        self._fed = False

    def score(self, fed: Sequence[int], phase: Phase) -> Iterator[mx.array]:
        """Feed tokens after the context, one by one or in chunks; yield logits (T, V), CHUNK rows at a time."""
        if self._fed:
            self.begin(self._context)
        self._fed = True
        pieces = 1 if phase == "decode" else CHUNK
        for at in range(0, len(fed), CHUNK):
            piece = list(fed[at : at + CHUNK])
            reply = self._child.ask({"feed": piece, "pieces": pieces, "file": str(self._file), **self._how})
            self.seconds += reply["seconds"]
            logits = np.fromfile(self._file, np.float32).reshape(len(piece), -1)
            if logits.shape[1] < self._width:
                raise EngineError(f"{self.name}: {logits.shape[1]:,} logits a token, but {self._width:,} in headrace")
            yield mx.array(logits[:, : self._width])

    def end(self) -> None:
        """Do nothing: the process ends with the run."""


def compare(arguments: argparse.Namespace) -> QualityDocument:
    """Measure all engines. Raises UsageError without headrace's CPU kernels, EngineError if a peer fails."""
    if ops.select() is not ops.native:
        raise UsageError("float32 throughout takes headrace's own CPU kernels", "`headrace doctor` shows why not")
    if arguments.threads is not None:
        use_threads(arguments.threads)
    options = QualityOptions(model=arguments.model or arguments.gguf, depths=arguments.depths, scored=arguments.scored)
    reference = load(options.model, options.force)
    with patch.dict(os.environ, {environment.EXACT: "1"}):
        exact = load(options.model, options.force)
    notes = ["reference: the same weights in float32 throughout, activations and K/V included"]
    found = chosen_passages(read_text(None), options, [reference], notes)
    limit = max(len(passage.context) + len(passage.fed) for passage in found.values())
    threads = ops.native.status().threads or machine().usable_cores
    width = reference.network.vocab_size
    variants = [Variant("headrace", "engine", reference.network)]
    with ExitStack() as stack:
        peers: list[PeerLogits] = []
        if arguments.llama_python is not None:
            script = str(HERE / "llama_cpp_logits.py")
            command = [arguments.llama_python, script, arguments.gguf, str(limit), str(threads)]
            child = opened("llama.cpp", lambda: ChildProcess("llama.cpp", reference.name, command, threads=threads))
            peers += scores(child, width, [False], stack)
        if arguments.ik_build is not None:
            script = str(HERE / "llama_cpp_logits.py")
            command = [sys.executable, script, arguments.gguf, str(limit), str(threads), arguments.ik_build]
            name = "ik_llama.cpp"
            child = opened(name, lambda: ChildProcess(name, reference.name, command, threads=threads))
            peers += scores(child, width, [False], stack)
        if arguments.openvino_python is not None:
            peer = Peer("openvino", arguments.openvino_python, arguments.gguf)
            child = opened("openvino", lambda: OpenVINOProcess(peer, reference.name, (limit, 1, threads)))
            peers += scores(child, width, [False, True], stack)
            notes += rounded(arguments.gguf)
        check_threads([EngineSetup("headrace", reference.name, threads=threads), *(one.setup for one in peers)], None)
        variants += [Variant(one.name, "engine", None, one) for one in peers]
        interrupted = measure(exact.network, variants, found)
    compared = document(reference, [], options, variants, notes, interrupted=interrupted)
    return replace(compared, engines=[one.setup for one in peers])


def opened(engine: str, start: Callable[[], ChildProcess]) -> ChildProcess:
    try:
        return start()
    except OSError as error:
        raise EngineError(f"{engine}: {error}") from None


def scores(child: ChildProcess, width: int, kinds: Sequence[bool], stack: ExitStack) -> list[PeerLogits]:
    """Return the logits of a child, for each of `kinds`: in float32 throughout or not. `stack` closes it."""
    stack.callback(child.close)
    file = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-logits-")), "logits")
    return [PeerLogits(child, width, file, exact=exact) for exact in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", help="file that all engines read")
    parser.add_argument("-m", "--model", help="the same weights for headrace [the file]")
    parser.add_argument("--llama-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--ik-build", help="folder of a build of ik_llama.cpp with shared libraries")
    parser.add_argument("--openvino-python", help="interpreter that has openvino-genai")
    parser.add_argument("-d", "--depths", type=numbers, help="tokens in the cache before the scored ones, as 0,2048")
    parser.add_argument("-n", "--scored", type=int, default=512, help="tokens to score [512]")
    parser.add_argument("--threads", type=int, help="CPU threads of every engine")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    compared = compare(arguments)
    print(json_text(compared) if arguments.json else show.markdown(compared))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()

"""Logits of other engines on the same weights (`--quality --vs`), from their child processes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np

from headrace.app.bench.measure.child import ChildProcess
from headrace.app.bench.measure.peers import CHILDREN, Peer, no_gguf, open_openvino
from headrace.app.bench.quality.forcing import CHUNK
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.ops import Phase


class PeerLogits:
    """A peer in place of `Forced`.

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
        """Feed tokens behind the context, one by one or in chunks; yield logits (T, V), CHUNK rows at a time."""
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


def check_peers(peers: Sequence[Peer]) -> None:
    """Raise UsageError for peers without logits."""
    for peer in peers:
        if peer.engine == "mlx-lm":
            raise UsageError("--quality has no logits of mlx-lm", "--vs takes llama.cpp or openvino here")
        if peer.engine == "llama.cpp" and peer.python is None:
            raise UsageError("llama-bench gives no logits", "--llama-python PYTHON does")


def open_peer(peer: Peer, model: str, limit: int, threads: int, width: int, stack: ExitStack) -> list[PeerLogits]:
    """Start a peer for at most `limit` tokens; `stack` closes it. openvino also gives logits in float32.

    Raises EngineError if it fails.
    """
    if peer.gguf is None:
        raise no_gguf()
    try:
        if peer.engine == "openvino":
            child = open_openvino(peer, peer.gguf, model, (limit, 1, threads))
        else:
            script = str(CHILDREN / "llama_cpp_logits.py")
            command = [str(peer.python), script, peer.gguf, str(limit), str(threads)]
            child = ChildProcess(peer.engine, model, command, threads=threads)
    except OSError as error:
        raise EngineError(f"{peer.engine}: {error}") from None
    stack.callback(child.close)
    file = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-logits-")), "logits")
    kinds = (False, True) if peer.engine == "openvino" else (False,)
    return [PeerLogits(child, width, file, exact=exact) for exact in kinds]

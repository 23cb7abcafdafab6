"""Logits of llama.cpp through llama-cpp-python, or of ik_llama.cpp through its library.

    python llama_cpp_logits.py MODEL.gguf CONTEXT THREADS [BUILD]

BUILD: folder of a build of ik_llama.cpp with shared libraries.
One sequence, K/V in float16, flash attention, llama.cpp's default batch. Protocol: `app.bench.measure.children`.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# llama.cpp's defaults, in tokens
BATCH = 2048
UBATCH = 512


class Logits:
    """One context; every row of a pass gives logits."""

    def __init__(self, library: Any, path: str, context: int, threads: int) -> None:
        self._library = library
        self._llama = library.Llama(
            path, n_ctx=context, n_batch=BATCH, n_ubatch=UBATCH, n_threads=threads, n_threads_batch=threads,
            n_gpu_layers=-1, flash_attn=True, verbose=False,
        )  # fmt: skip
        self._ctx = self._llama._ctx.ctx
        self._memory = library.llama_get_memory(self._ctx)
        self._batch = library.llama_batch_init(BATCH, 0, 1)
        self._length = 0

    def setup(self) -> dict[str, Any]:
        library = self._library
        ctx = self._ctx
        return {
            "threads": library.llama_n_threads(ctx),
            "threads_batch": library.llama_n_threads_batch(ctx),
            "settings": {"flash_attention": "on", "kv_type": "f16"},
        }

    def begin(self, context: list[int]) -> None:
        """Drop everything and feed `context`."""
        self._library.llama_memory_clear(self._memory, True)
        self._length = 0
        for _ in self._passes(context, BATCH, every=False):
            pass

    def feed(self, tokens: list[int], pieces: int, file: str) -> float:
        """Feed tokens in pieces of so many; write float32 logits (T, V) to `file`. Return the seconds of the passes."""
        import numpy

        seconds = 0.0
        width = self._llama.n_vocab()
        with Path(file).open("wb") as out:
            for took, count in self._passes(tokens, pieces, every=True):
                seconds += took
                rows = self._library.llama_get_logits(self._ctx)
                numpy.ctypeslib.as_array(rows, (count, width)).astype(numpy.float32).tofile(out)
        return seconds

    def _passes(self, tokens: list[int], size: int, *, every: bool) -> Iterator[tuple[float, int]]:
        """Feed tokens in pieces; yield (seconds, rows) of each. every: logits of all rows, else of the last."""
        library = self._library
        batch = self._batch
        for at in range(0, len(tokens), size):
            piece = tokens[at : at + size]
            batch.n_tokens = len(piece)
            for row, token in enumerate(piece):
                batch.token[row] = token
                batch.pos[row] = self._length + row
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = 0
                batch.logits[row] = every or row == len(piece) - 1
            began = time.perf_counter()
            if library.llama_decode(self._ctx, batch) != 0:
                raise RuntimeError("llama_decode failed")
            library.llama_synchronize(self._ctx)
            took = time.perf_counter() - began
            self._length += len(piece)
            yield took, len(piece)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the library's prints off the protocol's stream

    path, context, threads, *build = sys.argv[1:]
    if build:
        from ik_llama import IkLlama  # next to this file

        library = IkLlama(Path(build[0]))
    else:
        import llama_cpp

        library = llama_cpp

    peer = Logits(library, path, int(context), int(threads))
    print(json.dumps({"ready": library.__version__, **peer.setup()}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if "context" in asked:
                peer.begin(asked["context"])
                reply = {"settings": peer.setup()["settings"]}
            else:
                reply = {"seconds": peer.feed(asked["feed"], asked["pieces"], asked["file"])}
        except Exception as error:
            reply = {"error": repr(error)}
        print(json.dumps(reply), file=answers, flush=True)


main()

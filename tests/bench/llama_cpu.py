"""Child of `tests.bench.cpu_pairs` that runs llama.cpp, in an interpreter that has llama-cpp-python.

    PYTHON llama_cpu.py FILE.gguf THREADS     reads lines "decode SEQUENCES TOKENS" or "prefill 1 TOKENS"

Answers every line with CPU seconds per token.
"""

import importlib
import resource
import sys
from collections.abc import Sequence
from typing import Any

llama: Any = importlib.import_module("llama_cpp")
_CONTEXT = 8192  # tokens, of all sequences together
_CHUNK = 512  # tokens of a batch and of a micro-batch


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Context:
    """A context of `sequences`, all at the same length."""

    def __init__(self, model: Any, threads: int, sequences: int) -> None:
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = _CONTEXT
        parameters.n_batch = _CHUNK
        parameters.n_ubatch = _CHUNK
        parameters.n_threads = threads
        parameters.n_threads_batch = threads
        parameters.n_seq_max = sequences
        self._context = llama.llama_init_from_model(model, parameters)
        self._sequences = sequences
        self._length = 0

    def feed(self, tokens: Sequence[int]) -> None:
        """Give every sequence the tokens, and compute the logits behind the last one."""
        batch = llama.llama_batch_init(len(tokens) * self._sequences, 0, 1)
        for sequence in range(self._sequences):
            for place, token in enumerate(tokens):
                i = batch.n_tokens
                batch.token[i] = token
                batch.pos[i] = self._length + place
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = place == len(tokens) - 1
                batch.n_tokens += 1
        if llama.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        llama.llama_synchronize(self._context)
        llama.llama_batch_free(batch)
        self._length += len(tokens)

    def close(self) -> None:
        llama.llama_free(self._context)


def main() -> None:
    path = sys.argv[1]
    threads = int(sys.argv[2])
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    for line in sys.stdin:
        kind, *numbers = line.split()
        sequences, count = map(int, numbers)
        context = Context(model, threads, sequences)
        if kind == "decode":
            context.feed([5, 6, 7])  # a short prompt
            feeds = [[10 + i] for i in range(count)]
        else:
            feeds = [[1 + i % 1000 for i in range(count)]]
        began = cpu_seconds()
        for tokens in feeds:
            context.feed(tokens)
        print((cpu_seconds() - began) / count / sequences, flush=True)
        context.close()


if __name__ == "__main__":
    main()

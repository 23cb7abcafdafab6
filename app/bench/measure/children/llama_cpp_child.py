"""llama.cpp through llama-cpp-python. Usage: python llama_cpp_child.py MODEL.gguf CONTEXT THREADS KV_TYPE

- Sampling: greedy, by llama.cpp's own sampler. Workloads: the binding's sampler, with a temperature.
- Threads: THREADS for prompts and decoding. By default the binding decodes on half of the cores.
- Flash attention: on or off, the faster for each test. K/V in 8 bits (KV_TYPE q8_0, else f16) needs it, and a model
  without attention has nothing to choose.
- Batches and micro-batches: those of llama.cpp's own programs. Workloads: batches at least as long as the context.
- Several sequences: one `llama_decode` per step for all, as in llama.cpp's server.
- Speculation: workloads use the binding's prompt lookup decoding, with the faster of two draft lengths.

Protocol: `app.bench.measure.children`.
Guards: tests/app/bench/measure/test_kv_formats.py, with a library of the same functions in place of llama.cpp.
"""

import json
import os
import random
import sys
import time
from functools import partial
from itertools import pairwise
from typing import Any

KV_TYPES = {"f16": 1, "q8_0": 8}  # ggml's type numbers
BATCH = 2048  # llama.cpp's default batch, in tokens
UBATCH = 512  # and micro-batch
DRAFT_LENGTHS = (2, 10)  # of prompt lookup decoding: its documentation's for CPUs, and its default


class Tuned:
    """A model with and without flash attention; each test uses the one that was faster in tuning.

    Without attention (Mamba, RWKV) there is one: a second would double a warm-up that may take minutes.

    library: the module `llama_cpp`.
    path: of the GGUF file.
    context: tokens of a sequence at most.
    threads: for prompts and decoding.
    kv: name of the K/V's type, in `KV_TYPES`.
    """

    def __init__(self, library: Any, path: str, context: int, threads: int, kv: str) -> None:
        self._library = library
        self._kv = kv
        flashes = (True, False) if kv == "f16" else (True,)
        first = LlamaCpp(library, path, context, threads, KV_TYPES[kv], flash=flashes[0])
        if library.llama_model_is_recurrent(first.model):
            flashes = flashes[:1]
        others = [LlamaCpp(library, path, context, threads, KV_TYPES[kv], flash=flash) for flash in flashes[1:]]
        self._models = [first, *others]
        self._parallel: dict[tuple[LlamaCpp, int], Parallel] = {}  # by model and number of sequences
        self._fastest: dict[tuple[int, int, int, int], LlamaCpp] = {}  # by test
        self._open_lookup = partial(Lookup, library, path, context, threads, KV_TYPES[kv], flashes)
        self._lookup: Lookup | None = None

    def setup(self) -> dict[str, Any]:
        """Return the contexts' own settings; memory mapping is llama.cpp's default."""
        library = self._library
        ctx = self._models[0].ctx
        return {
            "threads": min(library.llama_n_threads(model.ctx) for model in self._models),
            "threads_batch": min(library.llama_n_threads_batch(model.ctx) for model in self._models),
            "settings": {
                "flash_attention": "on or off, the faster for each test" if len(self._models) > 1 else "on",
                "batch": library.llama_n_batch(ctx),
                "ubatch": library.llama_n_ubatch(ctx),
                "kv_type": self._kv,
                "mmap": True,
            },
        }

    def measure(self, prompt: int, generate: int, depth: int, batch: int = 1, tune: bool = False) -> dict[str, Any]:
        """Return the times of one test; see `LlamaCpp.measure`.

        batch: sequences that decode at once; with several, no prompt is measured.
        tune: measure with and without flash attention, and keep to the faster of them.
        """
        test = (prompt, generate, depth, batch)
        if not tune:
            return self._run(self._fastest.get(test, self._models[0]), *test)
        results = []
        seconds = []
        for model in self._models:
            # Fills the cache up to `depth` and warms up, with few tokens: only the second run counts.
            self._run(model, min(prompt, 16), min(generate, 4), depth, batch)
            result = self._run(model, *test)
            measured_s = sum(result["latencies_s"])
            if prompt:
                measured_s += result["prefill_s"]
            seconds.append(measured_s)
            results.append(result)
        fastest = seconds.index(min(seconds))
        self._fastest[test] = self._models[fastest]
        return results[fastest]

    def _run(self, model: "LlamaCpp", prompt: int, generate: int, depth: int, batch: int) -> dict[str, Any]:
        if batch == 1:
            return model.measure(prompt, generate, depth)
        if (model, batch) not in self._parallel:
            self._parallel[model, batch] = Parallel(self._library, model, batch)
        return self._parallel[model, batch].measure(generate, depth)

    def answer(self, tokens: list[int], generate: int, stop: list[int], **how: Any) -> dict[str, Any]:
        """Return clock readings of a whole answer with prompt lookup decoding; see `Lookup.measure`."""
        if self._lookup is None:
            self._lookup = self._open_lookup()
        return self._lookup.measure(tokens, generate, frozenset(stop), **how)


class Lookup:
    """Workloads, each with the draft length and attention that were fastest in tuning.

    library, path, context, threads: see `Tuned`.
    kv: ggml's number of the K/V's type.
    flashes: whether to use flash attention; both are tuned.
    """

    def __init__(self, library: Any, path: str, context: int, threads: int, kv: int, flashes: tuple[bool, ...]) -> None:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        # `_run` sets `draft_model` again, but one that is given here makes the binding compute the logits of all
        # tokens, by which draft tokens are verified. The binding keeps them in an array of `n_batch` rows, by position,
        # so a batch has to be as long as the context.
        models = [
            library.Llama(
                path, n_ctx=context, n_batch=max(BATCH, context), n_ubatch=UBATCH, n_threads=threads,
                n_threads_batch=threads, n_gpu_layers=-1, flash_attn=flash, verbose=False,
                type_k=kv, type_v=kv, draft_model=LlamaPromptLookupDecoding(),
            )
            for flash in flashes
        ]  # fmt: skip
        lookups = [LlamaPromptLookupDecoding(num_pred_tokens=length) for length in DRAFT_LENGTHS]
        self._variants = [(model, lookup) for model in models for lookup in lookups]
        self._fastest: dict[tuple[tuple[int, ...], float], tuple[Any, Any]] = {}  # by prompt and temperature

    def measure(
        self, tokens: list[int], generate: int, stop: frozenset[int], temperature: float = 0.0, tune: bool = False
    ) -> dict[str, Any]:
        """Return clock readings of the answer's tokens.

        tokens: the prompt.
        generate: tokens at most.
        stop: tokens that end the answer.
        temperature: 0 is greedy.
        tune: measure all variants, and keep to the fastest.
        """
        test = (tuple(tokens), temperature)
        if not tune:
            model, lookup = self._fastest.get(test, self._variants[0])
            return self._run(model, lookup, tokens, generate, stop, temperature)
        results = []
        seconds = []
        for model, lookup in self._variants:
            result = self._run(model, lookup, tokens, generate, stop, temperature)
            seconds.append(sum(result["latencies_s"]))
            results.append(result)
        fastest = seconds.index(min(seconds))
        self._fastest[test] = self._variants[fastest]
        return results[fastest]

    def _run(
        self, model: Any, lookup: Any, tokens: list[int], generate: int, stop: frozenset[int], temperature: float
    ) -> dict[str, Any]:
        model.draft_model = lookup
        began = time.perf_counter()
        arrivals: list[float] = []
        for token in model.generate(tokens, top_k=0, top_p=1.0, min_p=0.0, temp=temperature):
            arrivals.append(time.perf_counter())
            if token in stop or len(arrivals) == generate:
                break
        return {
            "prefill_s": arrivals[0] - began,
            "first_step_s": 0.0,
            "latencies_s": [b - a for a, b in pairwise(arrivals)],
            "prompt_tokens": len(tokens),
        }


class LlamaCpp:
    """One context and one sequence. The cache has a prefix of one random text, for all depths.

    library, path, context, threads: see `Tuned`.
    kv: ggml's number of the K/V's type.
    flash: use flash attention.
    """

    def __init__(self, library: Any, path: str, context: int, threads: int, kv: int, *, flash: bool) -> None:
        self._library = library
        self._llama = library.Llama(
            path, n_ctx=context, n_batch=BATCH, n_ubatch=UBATCH, n_threads=threads, n_threads_batch=threads,
            n_gpu_layers=-1, flash_attn=flash, type_k=kv, type_v=kv, verbose=False,
        )  # fmt: skip
        # Pointers of the C library, for the functions that the binding does not wrap. Private in llama-cpp-python 0.3:
        # a version without them fails here, and the bench names the peer and this error.
        self.model = self._llama._model.model
        self.ctx = self._llama._ctx.ctx
        self._memory = library.llama_get_memory(self.ctx)
        self._sampler = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        library.llama_sampler_chain_add(self._sampler, library.llama_sampler_init_greedy())
        self._draw = random.Random(1)
        self._base = self._random_tokens(context)
        self._num_cached = 0

    def measure(self, prompt: int, generate: int, depth: int) -> dict[str, Any]:
        """Return times of `prompt` tokens (0: one) fed after `depth` others, then `generate` tokens (0: one) chosen."""
        library = self._library
        ctx = self.ctx
        self._fill(depth)
        tokens = self._random_tokens(max(1, prompt))
        library.llama_perf_context_reset(ctx)
        began = time.perf_counter()
        self._feed(tokens)
        token = self._choose()
        arrivals = [time.perf_counter()]
        for _ in range(generate - 1):
            self._feed([token])
            token = self._choose()
            arrivals.append(time.perf_counter())
        performance = library.llama_perf_context(ctx)
        own_speed = None
        if generate and not prompt and performance.t_eval_ms > 0:
            own_speed = performance.n_eval / performance.t_eval_ms * 1e3
        elif prompt and not generate and performance.t_p_eval_ms > 0:
            own_speed = performance.n_p_eval / performance.t_p_eval_ms * 1e3
        return {
            "prefill_s": arrivals[0] - began,
            "first_step_s": 0.0,
            "latencies_s": [b - a for a, b in pairwise(arrivals)],
            "own_tokens_per_second": own_speed,
        }

    def _random_tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._llama.n_vocab()) for _ in range(count)]

    def _fill(self, depth: int) -> None:
        """Leave exactly the first `depth` tokens of the random text in the cache."""
        self._num_cached = trim_sequence(self._library, self._memory, 0, min(self._num_cached, depth))
        if self._num_cached < depth:
            self._feed(self._base[self._num_cached : depth])
            self._num_cached = depth
        self._library.llama_synchronize(self.ctx)

    def _feed(self, tokens: list[int]) -> None:
        library = self._library
        for start in range(0, len(tokens), BATCH):
            chunk = tokens[start : start + BATCH]
            array = (library.llama_token * len(chunk))(*chunk)
            if library.llama_decode(self.ctx, library.llama_batch_get_one(array, len(chunk))) != 0:
                raise RuntimeError("llama_decode failed")

    def _choose(self) -> int:
        return int(self._library.llama_sampler_sample(self._sampler, self.ctx, -1))


def trim_sequence(library: Any, memory: Any, sequence: int, length: int) -> int:
    """Remove the entries past `length` of a sequence, and return how many stay: 0 with recurrent state.

    library: llama.cpp's functions.
    memory: of a context.
    sequence: its number there.
    length: entries to keep.
    """
    if library.llama_memory_seq_rm(memory, sequence, length, -1):
        return length
    library.llama_memory_seq_rm(memory, sequence, -1, -1)
    return 0


class Parallel:
    """Several sequences that decode together, with another context's model and settings."""

    def __init__(self, library: Any, model: LlamaCpp, sequences: int) -> None:
        self._library = library
        self._llama = model._llama
        params = type(self._llama.context_params).from_buffer_copy(self._llama.context_params)
        params.n_seq_max = sequences
        params.n_ctx = sequences * self._llama.n_ctx()
        params.kv_unified = False
        self._ctx = library.llama_init_from_model(model.model, params)
        if not self._ctx:
            raise RuntimeError(f"no context for {sequences} sequences")
        self._memory = library.llama_get_memory(self._ctx)
        self._sampler = model._sampler
        self._batch = library.llama_batch_init(max(BATCH, sequences), 0, 1)
        self._draw = random.Random(2)
        self._bases = [self._random_tokens(self._llama.n_ctx()) for _ in range(sequences)]
        self._num_cached = 0

    def measure(self, generate: int, depth: int) -> dict[str, Any]:
        """Return times of `generate` tokens per sequence after `depth` cached tokens and one fed."""
        self._fill(depth)
        chosen = self._step(self._random_tokens(len(self._bases)), depth)
        arrivals = [time.perf_counter()]
        for position in range(depth + 1, depth + generate):
            chosen = self._step(chosen, position)
            arrivals.append(time.perf_counter())
        return {
            "prefill_s": 0.0,
            "first_step_s": None,
            "latencies_s": [b - a for a, b in pairwise(arrivals)],
            "own_tokens_per_second": None,
        }

    def _random_tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._llama.n_vocab()) for _ in range(count)]

    def _fill(self, depth: int) -> None:
        """Leave exactly the first `depth` tokens of its random text in the cache of each sequence."""
        length = min(self._num_cached, depth)
        for sequence, base in enumerate(self._bases):
            num_cached = trim_sequence(self._library, self._memory, sequence, length)
            for start in range(num_cached, depth, BATCH):
                chunk = base[start : min(depth, start + BATCH)]
                self._decode([(token, position, sequence) for position, token in enumerate(chunk, start)])
        self._num_cached = depth
        self._library.llama_synchronize(self._ctx)

    def _step(self, tokens: list[int], position: int) -> list[int]:
        """Feed one token per sequence and return the next ones."""
        self._decode([(token, position, sequence) for sequence, token in enumerate(tokens)], every=True)
        sample = self._library.llama_sampler_sample
        return [int(sample(self._sampler, self._ctx, row)) for row in range(len(tokens))]

    def _decode(self, rows: list[tuple[int, int, int]], *, every: bool = False) -> None:
        """Decode rows of (token, position, sequence). every: compute logits of all rows, else of the last."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = every or row == len(rows) - 1
        if self._library.llama_decode(self._ctx, batch) != 0:
            raise RuntimeError("llama_decode failed")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the library's prints off the protocol's stream

    import llama_cpp

    peer = Tuned(llama_cpp, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    print(json.dumps({"ready": llama_cpp.__version__, **peer.setup()}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if "tokens" in asked:
                reply: dict[str, Any] = peer.answer(**asked)
            else:
                reply = peer.measure(**asked)
        except Exception as error:  # the parent reports it, and other tests go on
            reply = {"error": repr(error)}
        print(json.dumps(reply), file=answers, flush=True)


main()

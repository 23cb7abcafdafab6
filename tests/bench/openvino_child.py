"""OpenVINO GenAI. Usage: python openvino_child.py MODEL.gguf FOLDER CONTEXT SEQUENCES THREADS KV_TYPES

Its GGUF reader converts the model once, into FOLDER. Requests go through its continuous batching pipeline, a token per
step, with prefix caching; a single sequence also through its pipeline without paged attention, which keeps no prefix.
Tokens are chosen greedily. Each test uses the fastest value of each of `CHOICES`, found one setting after the other;
KV_TYPES (comma-separated) limits those of K/V. Logits are those of the converted model without a pipeline.
Protocol: `app.bench.measure.children`.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

Way = dict[str, Any]
"""A value of each setting."""
KV = "KV_CACHE_PRECISION"
ATTENTION = "ATTENTION_BACKEND"
THREADS = "INFERENCE_NUM_THREADS"
CHOICES: dict[str, tuple[Any, ...]] = {
    KV: ("u8", "f16"),
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": (32, 0),
    "INFERENCE_PRECISION_HINT": ("bf16", "f32"),
    ATTENTION: ("PA", "SDPA"),
}
"""Values to choose from; on CPUs with bfloat16 the first ones are its defaults."""
BLOCK = 32  # tokens of a K/V block of its CPU plugin


class Converted:
    """The converted model, and pipelines over it by their settings. room: tokens of K/V of a pipeline."""

    def __init__(self, gguf: str, folder: str, room: int, threads: int, kinds: list[str]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.genai = openvino_genai
        self._openvino, self._numpy, self._core = openvino, numpy, openvino.Core()
        self.folder = folder
        self.room = room
        self._threads = threads
        half = "BF16" in self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self.choices = {**CHOICES, KV: tuple(kinds), **({} if half else {"INFERENCE_PRECISION_HINT": ("f32",)})}
        link = Path(folder, "model.gguf")  # the converted files go beside it
        link.symlink_to(Path(gguf).absolute())
        openvino_genai.LLMPipeline(str(link), "CPU", **{THREADS: threads}, enable_save_ov_model=True)

    @property
    def defaults(self) -> Way:
        return {name: values[0] for name, values in self.choices.items()}

    def compiled(self, way: Way) -> Any:
        """Return the model compiled with the settings of a pipeline."""
        model = self._core.read_model(str(Path(self.folder, "openvino_model.xml")))
        return self._core.compile_model(model, "CPU", self.properties(way))

    def properties(self, way: Way) -> dict[str, Any]:
        """Return the settings of the device."""
        return {THREADS: self._threads, **{name: value for name, value in way.items() if name != ATTENTION}}

    def generation(self, count: int) -> Any:
        """Return its options for `count` greedy tokens without an early end."""
        return self.genai.GenerationConfig(
            max_new_tokens=count, ignore_eos=True, do_sample=False, apply_chat_template=False
        )

    def ids(self, tokens: list[int]) -> Any:
        return self._openvino.Tensor(self._numpy.array([tokens], self._numpy.int64))


class Paged:
    """Its continuous batching pipeline, step by step."""

    def __init__(self, model: Converted, way: Way) -> None:
        scheduler = model.genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = model.room  # whole prompts, as its simple pipeline has it
        scheduler.num_kv_blocks = -(-model.room // BLOCK)
        self._model = model
        self._number = 0
        self._pipeline = model.genai.ContinuousBatchingPipeline(model.folder, scheduler, "CPU", model.properties(way))

    def keep(self, prefixes: list[list[int]]) -> None:
        """Put prefixes into the cache."""
        for prefix in filter(None, prefixes):
            self.arrivals([prefix], 1)

    def arrivals(self, prompts: list[list[int]], count: int) -> list[float]:
        """Generate `count` tokens for each prompt; return the time after each step."""
        handles = []
        for prompt in prompts:
            self._number += 1
            options = self._model.generation(count)
            handles.append(self._pipeline.add_request(self._number, self._model.ids(prompt), options))
        arrivals: list[float] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            arrivals.append(time.perf_counter())
        given = [len(output.generated_ids) for handle in handles for output in handle.read_all()]
        if len(arrivals) != count or given != [count] * len(prompts):
            raise RuntimeError(f"{given} tokens in {len(arrivals)} steps instead of {count} each")
        return arrivals


class Contiguous:
    """Its pipeline without paged attention, for one sequence."""

    def __init__(self, model: Converted, way: Way) -> None:
        self._model = model
        self._pipeline = model.genai.LLMPipeline(
            model.folder, "CPU", **model.properties(way), **{ATTENTION: way[ATTENTION]}
        )

    def keep(self, prefixes: list[list[int]]) -> None:
        """Do nothing: every request feeds its whole prompt."""

    def arrivals(self, prompts: list[list[int]], count: int) -> list[float]:
        """Generate `count` tokens for the only prompt; return the time after each."""
        genai = self._model.genai
        arrivals = list[float]()

        class Clock(genai.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, _: Any) -> Any:
                arrivals.append(time.perf_counter())
                return genai.StreamingStatus.RUNNING

            def end(self) -> None: ...

        (prompt,) = prompts
        self._pipeline.generate(self._model.ids(prompt), self._model.generation(count), Clock())
        if len(arrivals) != count:
            raise RuntimeError(f"{len(arrivals)} tokens instead of {count}")
        return arrivals


class Tuned:
    """Measures tests, each with the settings that were fastest in tuning."""

    def __init__(self, model: Converted) -> None:
        self._model = model
        self._open: dict[tuple[Any, ...], Paged | Contiguous] = {}
        self._best: dict[tuple[int, int, int, int], Way] = {}
        self._draw = random.Random(1)
        self._vocabulary = len(model.genai.Tokenizer(model.folder).get_vocab())
        self._bases: list[list[int]] = []

    def setup(self) -> dict[str, Any]:
        """Return the threads of the compiled model, by its own account."""
        threads = self._model.compiled(self._model.defaults).get_property(THREADS)
        chosen = {name: f"{' or '.join(map(str, values))}" for name, values in self._model.choices.items()}
        return {"threads": threads, "threads_batch": threads, "settings": chosen}

    def measure(self, prompt: int, generate: int, depth: int, batch: int = 1, tune: bool = False) -> dict[str, Any]:
        """Return times of `prompt` tokens (0: one) fed after `depth` others, then `generate` tokens (0: one) chosen."""
        test = (prompt, generate, depth, batch)
        if not tune:
            self._keep_open(self._best.values())
            return self._run(self._best.get(test, self._model.defaults), *test)
        tried = self._tune(test)
        _, way, found = min(tried, key=lambda one: one[0])
        self._best[test] = way
        return {**found, "chosen": way}

    def _tune(self, test: tuple[int, int, int, int]) -> list[tuple[float, Way, dict[str, Any]]]:
        """Return (seconds, settings, result) of all settings tried: each setting varied at the best of those before."""
        prompt, _, depth, batch = test
        tried = [self._timed(self._model.defaults, test)]
        for name, values in self._model.choices.items():
            if name == ATTENTION and (batch > 1 or (prompt and depth)):
                continue  # takes one sequence, and cannot begin behind a prefix
            best = min(tried, key=lambda one: one[0])[1]
            tried += [self._timed({**best, name: value}, test) for value in values if value != best[name]]
        return tried

    def _timed(self, way: Way, test: tuple[int, int, int, int]) -> tuple[float, Way, dict[str, Any]]:
        prompt, generate, depth, batch = test
        self._run(way, min(prompt, 16), min(generate, 4), depth, batch)  # warms up
        found = self._run(way, *test)
        return found["prefill_s"] * bool(prompt) + sum(found["latencies_s"]), way, found

    def _run(self, way: Way, prompt: int, generate: int, depth: int, batch: int) -> dict[str, Any]:
        pipeline = self._pipeline(way)
        while len(self._bases) < batch:
            self._bases.append([])
        for base in self._bases[:batch]:
            base += self._tokens(depth - len(base))
        prefixes = [base[:depth] for base in self._bases[:batch]]
        pipeline.keep(prefixes)
        prompts = [[*prefix, *self._tokens(prompt or 1)] for prefix in prefixes]
        began = time.perf_counter()
        arrivals = pipeline.arrivals(prompts, generate or 1)
        return {
            "prefill_s": arrivals[0] - began if batch == 1 else 0.0,
            "first_step_s": 0.0 if batch == 1 else None,
            "latencies_s": [b - a for a, b in pairwise(arrivals)],
            "own_tokens_per_second": None,
        }

    def _pipeline(self, way: Way) -> Paged | Contiguous:
        key = tuple(way.values())
        if key not in self._open:
            self._open[key] = (Contiguous if way[ATTENTION] == "SDPA" else Paged)(self._model, way)
        return self._open[key]

    def _keep_open(self, ways: Any) -> None:
        """Close the pipelines that no test chose."""
        chosen = {tuple(way.values()) for way in ways}
        for key in self._open.keys() - chosen:
            del self._open[key]

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocabulary) for _ in range(count)]


class Logits:
    """Logits of given tokens by the compiled model. exact: float32 throughout, instead of the default settings."""

    def __init__(self, model: Converted, *, exact: bool) -> None:
        import numpy

        self._numpy = numpy
        way = dict(zip(CHOICES, ("f32", 0, "f32", "SDPA"), strict=True)) if exact else model.defaults
        compiled = model.compiled(way)
        used = {name: compiled.get_property(name) for name in model.properties(way) if name != THREADS}
        self.settings = {name: getattr(value, "to_string", value.__str__)() for name, value in used.items()}
        self._request = compiled.create_infer_request()
        self._length = 0

    def begin(self, context: list[int]) -> None:
        """Drop everything and feed `context`."""
        self._request.reset_state()
        self._length = 0
        for _ in self._pieces(context, 128):
            pass

    def feed(self, tokens: list[int], pieces: int, file: str) -> float:
        """Feed tokens in pieces of so many; write float32 logits (T, V) to `file`. Return the seconds of the passes."""
        seconds = 0.0
        with Path(file).open("wb") as out:
            for took, logits in self._pieces(tokens, pieces):
                seconds += took
                logits.tofile(out)
        return seconds

    def _pieces(self, tokens: list[int], size: int) -> Iterator[tuple[float, Any]]:
        numpy = self._numpy
        for at in range(0, len(tokens), size):
            piece = numpy.array([tokens[at : at + size]], numpy.int64)
            length = self._length + piece.shape[1]
            inputs = {
                "input_ids": piece,
                "attention_mask": numpy.ones((1, length), numpy.int64),
                "position_ids": numpy.arange(self._length, length)[None],
                "beam_idx": numpy.zeros(1, numpy.int32),
            }
            began = time.perf_counter()
            logits = self._request.infer(inputs)["logits"]
            took = time.perf_counter() - began
            self._length = length
            yield took, logits[0]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the library's prints off the protocol's stream

    def answer(reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=answers, flush=True)

    try:
        from importlib.metadata import version

        gguf, folder, context, sequences, threads, kinds = sys.argv[1:]
        room = int(context) * (int(sequences) + 1)  # prefixes, and a request beside them
        model = Converted(gguf, folder, room, int(threads), kinds.split(","))
        peer = Tuned(model)
        logits = dict[bool, Logits]()
        answer({"ready": version("openvino-genai"), **peer.setup()})
    except Exception as error:
        answer({"error": " ".join(str(error).split())[:300]})
        return
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            exact = asked.pop("exact", False)
            if "context" in asked:
                if exact not in logits:
                    logits[exact] = Logits(model, exact=exact)
                logits[exact].begin(**asked)
                answer({"settings": logits[exact].settings})
            elif "feed" in asked:
                answer({"seconds": logits[exact].feed(asked["feed"], asked["pieces"], asked["file"])})
            else:
                answer(peer.measure(**asked))
        except Exception as error:
            answer({"error": repr(error)[:300]})


main()

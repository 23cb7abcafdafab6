"""ik_llama.cpp and llama.cpp beside headrace on the same GGUF file, in the same rounds: a table of docs/benchmarks.md.

    python -m tests.bench.vs_ik_llama FILE.gguf BUILD --llama-python PYTHON -p 512 -n 64 -d 0,2048 --threads 2 -r 6

BUILD is the build folder of ik_llama.cpp, with `llama-sweep-bench` and `llama-batched-bench`. A sweep measures prompts
and decoding at all depths in one process, so a round has one sweep. Weights are repacked while they load or not,
whichever was faster for a test when it warmed up. `--batch` sequences decode from an empty cache.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from headrace.app.bench.measure import peers
from headrace.app.bench.measure.open_engines import MeasureOptions
from headrace.app.bench.measure.peers import Peer, same_weights
from headrace.app.bench.measure.plan import Test, parse_counts, plan
from headrace.app.bench.measure.records import RunDocument
from headrace.app.bench.measure.run import run
from headrace.app.bench.measure.sample import Backend, Sample
from headrace.app.bench.measure.setup import EngineSetup
from headrace.app.bench.show import formats
from headrace.app.bench.show.live import live_view
from headrace.app.output.document import json_text
from headrace.models.loading.load import LoadedModel
from headrace.runtime.errors import EngineError, UsageError
from tests.bench.ik_llama import commit_of

ENGINE = "ik_llama.cpp"
_REPACKED = (False, True)
_BATCH_TOKENS = 48  # that each of several sequences decodes
_ROOM = 64  # entries of a sequence's cache beyond its tokens


class IkLlamaBench:
    """ik_llama.cpp's own benchmarks as a backend.

    A depth must be a multiple of the prompt's length, since a sweep fills the cache in such chunks.
    """

    engine = ENGINE

    def __init__(self, model: str, build: Path, gguf: str, tests: Sequence[Test], threads: int) -> None:
        self.model = model
        self._programs = build / "bin"
        self._options = ["-m", gguf, "-t", str(threads), "-tb", str(threads)]
        self._tests = [test for test in tests if test.batch == 1]
        self._repacked: dict[Test, bool] = {}  # the faster way for each test
        self._samples: dict[Test, list[Sample]] = {test: [] for test in tests}
        self.setup = EngineSetup(
            engine=ENGINE,
            model=model,
            version=commit_of(build),
            threads=threads,
            threads_batch=threads,
            threads_told=threads,
            settings={"flash_attention": "on", "repacked": "on or off, the faster for each test"},
        )

    def warm_up(self, test: Test) -> None:
        """Choose the faster way. The first test of a sweep chooses for all of them."""
        if test in self._repacked:
            return
        ways = [dict(self._run(test, repacked)) for repacked in _REPACKED]
        for found in ways[0]:
            speeds = [way[found].tokens_per_second(found) for way in ways]
            self._repacked[found] = _REPACKED[speeds.index(max(speeds))]
            named = {f"{found.label} with": "repacked weights" if self._repacked[found] else "weights as in the file"}
            self.setup = replace(self.setup, settings={**self.setup.settings, **named})

    def measure(self, test: Test) -> Sample:
        """Return a sample of the test; a sweep leaves samples of the others for their turn in the round."""
        if not self._samples[test]:
            repacked = self._repacked[test]
            for found, sample in self._run(test, repacked):
                if self._repacked[found] == repacked:
                    self._samples[found] = [sample]
        return self._samples[test].pop()

    def close(self) -> None:
        """Do nothing: no process is kept."""

    def _run(self, test: Test, repacked: bool) -> Iterator[tuple[Test, Sample]]:
        """Run the program for a test, and yield the sample of each test that it measured."""
        if test.batch > 1:
            yield test, self._several(test, repacked)
            return
        depths = sorted({each.depth for each in self._tests})
        chunk = max(each.prompt for each in self._tests)
        generate = max(each.generate for each in self._tests)
        stride = max(1, depths[-1] // chunk)
        command = [
            "llama-sweep-bench", *self._options, "-c", str(depths[-1] + chunk), "-ub", str(chunk), "-n", str(generate),
            "--sweep-stride", str(stride), "-wb", "--output-format", "jsonl",
        ]  # fmt: skip
        rows = [json.loads(line) for line in self._lines(command, repacked) if line.startswith("{")]
        by_depth = {row["n_kv"]: row for row in rows}
        for each in self._tests:
            row: dict[str, Any] = by_depth[each.depth]
            if each.kind == "prefill":
                yield each, Sample(row["t_pp"], 0.0, [])
            else:
                yield each, Sample(0.0, None, [row["t_tg"] / generate] * generate)

    def _several(self, test: Test, repacked: bool) -> Sample:
        """Return the sample of sequences that decode together, after one token each."""
        context = test.batch * (test.generate + _ROOM)
        command = [
            "llama-batched-bench", *self._options, "-c", str(context), "-npp", "1", "-ntg", str(test.generate),
            "-npl", str(test.batch),
        ]  # fmt: skip
        # | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | ...
        rows = [line.split("|") for line in self._lines(command, repacked) if line.startswith("|")]
        seconds = float(rows[-1][7])
        return Sample(0.0, None, [seconds / test.generate] * test.generate)

    def _lines(self, command: Sequence[str], repacked: bool) -> list[str]:
        """Return the lines that a program printed. Raises EngineError if it fails."""
        program = self._programs / command[0]
        more = ["-rtr"] if repacked else []
        with TemporaryDirectory(prefix="headrace-ik-llama-") as scratch:  # of its logs
            try:
                done = subprocess.run(
                    [program, *command[1:], *more], cwd=scratch, capture_output=True, text=True, check=True
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise EngineError(f"{command[0]} failed: {error!r:.200}") from error
        return [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines()]


def _open(build: Path, peer: Peer, model: LoadedModel, tests: Sequence[Test], threads: int) -> tuple[Backend, str]:
    gguf = str(peer.gguf)
    return IkLlamaBench(model.name, build, gguf, tests, threads), f"{ENGINE}, {same_weights(gguf, model)}"


def compare(arguments: argparse.Namespace) -> RunDocument:
    """Measure all three. Raises UsageError for numbers that a sweep does not have."""
    prompts = parse_counts(arguments.prompts, "-p")
    generates = parse_counts(arguments.generates, "-n")
    depths = parse_counts(arguments.depths, "-d")
    if len(prompts) != 1 or len(generates) != 1 or any(depth % max(depths) for depth in depths if depth):
        raise UsageError("a sweep has one prompt length, one number of tokens, and the depths 0 and one other")
    if not prompts[0] or max(depths) % prompts[0]:
        raise UsageError("the depth must be a multiple of the prompt's length")
    tests = plan(prompts, generates, depths, combined=False)
    if arguments.batch > 1:
        tests.append(Test(0, _BATCH_TOKENS, batch=arguments.batch))
    peers.OPENERS[ENGINE] = partial(_open, arguments.build.absolute())
    gguf = str(arguments.gguf.absolute())
    asked = [Peer(ENGINE, gguf=gguf)]
    if arguments.llama_python:
        asked.insert(0, Peer("llama.cpp", arguments.llama_python, gguf))
    options = MeasureOptions(
        models=[arguments.model or gguf],
        tests=tests,
        rounds=arguments.rounds,
        threads=arguments.threads,
        peers=asked,
        activations=arguments.activations,
    )
    with live_view() as view:
        return run(options, view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="file that all read")
    parser.add_argument("build", type=Path, help="build folder of ik_llama.cpp")
    parser.add_argument("--llama-python", help="interpreter that has llama-cpp-python [llama.cpp is left out]")
    parser.add_argument("-m", "--model", help="the same weights for headrace [the file]")
    parser.add_argument("-p", "--prompts", default="512", help="prompt length [512]")
    parser.add_argument("-n", "--generates", default="64", help="number of tokens to decode [64]")
    parser.add_argument("-d", "--depths", default="0,2048", help="tokens already in the KV cache [0,2048]")
    parser.add_argument("--batch", type=int, default=1, help="sequences that decode together [no such test]")
    parser.add_argument("-r", "--rounds", type=int, default=6, help="rounds [6]")
    parser.add_argument("--threads", type=int, help="CPU threads of all")
    parser.add_argument("--activations", default="16", help="bits of headrace's activations: 16 or 8 [16]")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measured = compare(arguments)
    print(json_text(measured) if arguments.json else formats.markdown(measured))


if __name__ == "__main__":
    main()

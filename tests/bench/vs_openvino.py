"""OpenVINO GenAI beside headrace on the same GGUF file, in the same rounds: the tables of docs/benchmarks.md.

    python -m tests.bench.vs_openvino FILE.gguf PYTHON -p 500,2000 -n 64 -d 0 --threads 2 -r 3

PYTHON has openvino-genai, which converts the file by its own reader. Each test uses its fastest settings, found when it
warms up: K/V as `u8` (its default) or `f16`, activations in groups of 32 or unrounded, arithmetic in `bf16` where the
processor has it or `f32`, and for one sequence its pipeline without paged attention.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.app.bench.measure import peers
from headrace.app.bench.measure.child_process import ChildProcess
from headrace.app.bench.measure.open_engines import MeasureOptions
from headrace.app.bench.measure.peers import Peer, same_weights
from headrace.app.bench.measure.plan import Test, parse_counts, plan
from headrace.app.bench.measure.records import RunDocument
from headrace.app.bench.measure.run import run
from headrace.app.bench.measure.sample import Backend
from headrace.app.bench.show import formats
from headrace.app.bench.show.live import live_view
from headrace.app.output.document import json_text
from headrace.models.gguf.container import open_container
from headrace.models.loading.load import LoadedModel
from headrace.runtime.errors import EngineError, HeadraceError, UsageError

KV_TYPES = {"f16": ("u8", "f16"), "q8": ("u8",)}
"""Its K/V formats to choose from, by ours."""


class OpenVINOProcess(ChildProcess):
    """Its process, with a folder for its converted model."""

    def __init__(self, peer: Peer, model: str, numbers: tuple[int, int, int]) -> None:
        """numbers: tokens of a sequence, sequences, threads."""
        self._scratch = TemporaryDirectory(prefix="headrace-openvino-")
        script = str(Path(__file__).parent / "openvino_child.py")
        kinds = ",".join(KV_TYPES[peer.kv])
        command = [peer.python or sys.executable, script, str(peer.gguf), self._scratch.name, *map(str, numbers), kinds]
        try:
            super().__init__("openvino", model, command, threads=numbers[-1], tunes=True)
        except BaseException:
            self._scratch.cleanup()
            raise

    def close(self) -> None:
        super().close()
        self._scratch.cleanup()


def rounded(gguf: str) -> list[str]:
    """Return a remark if its reader changes weights: it keeps the minimum of a Q4_1 group in whole steps."""
    try:
        kinds = {tensor.type for tensor in open_container(Path(gguf)).tensors.values()}
    except (HeadraceError, OSError):
        return []  # the peer says why
    return ["openvino rounds the minima of Q4_1 groups to whole steps"] if "Q4_1" in kinds else []


def _open(peer: Peer, model: LoadedModel, tests: Sequence[Test], threads: int) -> tuple[Backend, str]:
    gguf = str(peer.gguf)
    numbers = (max(test.tokens for test in tests), max(test.batch for test in tests), threads)
    remarks = ["OpenVINO GenAI's own reader of GGUF, " + same_weights(gguf, model), *rounded(gguf)]
    return OpenVINOProcess(peer, model.name, numbers), "; ".join(remarks)


def compare(arguments: argparse.Namespace) -> RunDocument:
    """Measure both. Raises UsageError for a K/V format that it lacks, EngineError if it fails."""
    if arguments.kv not in KV_TYPES:
        raise UsageError(f"openvino has no comparable K/V format {arguments.kv}", "use f16 or q8 (its u8)")
    peers.OPENERS["openvino"] = _open
    tests = plan(
        parse_counts(arguments.prompts, "-p"),
        parse_counts(arguments.generates, "-n"),
        parse_counts(arguments.depths, "-d"),
        combined=False,
        batches=parse_counts(arguments.batches, "--batch"),
    )
    options = MeasureOptions(
        models=[arguments.model or arguments.gguf],
        tests=tests,
        rounds=arguments.rounds,
        threads=arguments.threads,
        peer_threads=arguments.peer_threads,
        peers=[Peer("openvino", arguments.python, arguments.gguf, arguments.kv)],
        kv=[arguments.kv],
        activations=arguments.activations,
    )
    with live_view() as view:
        measured = run(options, view)
    if "openvino" not in {entry.engine for entry in measured.results}:
        raise EngineError(next((note for note in measured.notes if note.startswith("openvino")), "openvino failed"))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", help="file that both read")
    parser.add_argument("python", help="interpreter that has openvino-genai")
    parser.add_argument("-m", "--model", help="the same weights for headrace [the file]")
    parser.add_argument("-p", "--prompts", default="512", help="prompt lengths [512]")
    parser.add_argument("-n", "--generates", default="128", help="numbers of tokens to decode [128]")
    parser.add_argument("-d", "--depths", default="0", help="tokens already in the KV cache [0]")
    parser.add_argument("--batch", dest="batches", default="1", help="sequences that decode together [1]")
    parser.add_argument("-r", "--rounds", type=int, help="rounds [5, more if noisy]")
    parser.add_argument("--threads", type=int, help="CPU threads of both")
    parser.add_argument("--peer-threads", type=int, help="CPU threads of openvino [--threads]")
    parser.add_argument("--kv", default="f16", help="headrace's K/V format: f16 or q8 [f16]")
    parser.add_argument("--activations", default="16", help="bits of prompts' activations: 16 or 8 [16]")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measured = compare(arguments)
    print(json_text(measured) if arguments.json else formats.markdown(measured))


if __name__ == "__main__":
    main()

"""The peers of `headrace bench --vs`, from its options."""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.app.cli.bench_options import BenchOptions
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.app.bench.measure.peers import Peer


def chosen_peers(given: BenchOptions, kv: str) -> "list[Peer]":
    """Return the peers of --vs. Raises UsageError for options of others."""
    from headrace.app.bench.measure.peers import Peer

    if given.peer_threads and not given.peers:
        raise UsageError("--peer-threads needs --vs")
    if given.llama_python and "llama.cpp" not in given.peers:
        raise UsageError("--llama-python goes with --vs llama.cpp")
    if given.openvino_python and "openvino" not in given.peers:
        raise UsageError("--openvino-python goes with --vs openvino")
    if given.llama_model and not {"llama.cpp", "openvino"} & {*given.peers}:
        raise UsageError("--llama-model goes with --vs llama.cpp or openvino")
    if given.llama_model and not Path(given.llama_model).is_file():
        raise UsageError(f"no such file: {given.llama_model}")
    gguf = given.llama_model or next((model for model in given.models[:1] if model.lower().endswith(".gguf")), None)
    known = {
        "mlx-lm": Peer("mlx-lm", given.mlx_python),
        "llama.cpp": Peer("llama.cpp", given.llama_python, gguf, kv),
        "openvino": Peer("openvino", given.openvino_python, gguf, kv),
    }
    return [known[name] for name in dict.fromkeys(given.peers)]

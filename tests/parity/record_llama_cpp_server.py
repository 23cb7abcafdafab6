"""Record the answers of llama.cpp's server on the tiny GGUF files of newer architectures.

    python -m tests.parity.record_llama_cpp_server NAME...

needs gguf and xllamacpp, which has wheels of recent versions, and adds these variants of
`tests/support/gguf_layered_models.py` to `llama_cpp_layered.json`: three greedy answers, as `record_llama_cpp.py` does,
and logarithms of probabilities in place of logits, which a server does not give.
"""

import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

from tests.parity.record_llama_cpp import as_lines
from tests.support.gguf_layered_models import VOCAB, write_layered

ANSWERS = Path(__file__).parents[1] / "models" / "gguf" / "llama_cpp_layered.json"
STEPS = 6
SPARSE = {"minimax-m3"}  # llama.cpp leaves out its indexer without flash attention


def main() -> None:
    answers = json.loads(ANSWERS.read_text())
    every = answers["every"]
    prompt = answers["prompt"]
    for variant in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            server = serve(write_layered(Path(directory) / "tiny.gguf", variant), sparse=variant in SPARSE)
            first = complete(server, prompt)
            second = complete(server, [*prompt, *first["tokens"], *answers["said_next"]])
            edited = complete(server, answers["edited"])
        best = first["completion_probabilities"][0]["top_logprobs"]
        by_token = {each["id"]: each["logprob"] for each in best}
        answers["log_probabilities"][variant] = [round(by_token[token], 6) for token in range(0, VOCAB, every)]
        answers["turns"][variant] = [each["tokens"] for each in (first, second, edited)]
        answers["versions"][variant] = f"xllamacpp {xllamacpp.__version__}"
    ANSWERS.write_text(as_lines(answers) + "\n")


def serve(path: Path, *, sparse: bool) -> xllamacpp.Server:
    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx = 256
    options.n_parallel = 1
    options.port = 0
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    kinds = xllamacpp.llama_flash_attn_type
    options.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if sparse else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(options)


def complete(server: xllamacpp.Server, prompt: list[int]) -> dict[str, Any]:
    """Return the greedy answer to a prompt, from an empty cache, with all probabilities."""
    wanted = {
        "prompt": prompt, "n_predict": STEPS, "temperature": 0, "n_probs": VOCAB, "return_tokens": True,
        "cache_prompt": False,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(wanted).encode(), {"content-type": "application/json"}
    )
    answer: dict[str, Any] = json.load(urllib.request.urlopen(request))
    return answer


if __name__ == "__main__":
    main()

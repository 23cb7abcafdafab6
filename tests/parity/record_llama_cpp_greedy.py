"""Record what llama.cpp answers, greedily, on the default model's own GGUF, for `test_llama_cpp_greedy.py`.

    python -m tests.parity.record_llama_cpp_greedy MODEL.gguf

needs llama-cpp-python. For every prompt it records the token ids and, for each of the 32 tokens that follow,
llama.cpp's best tokens with their logits, best first, in two files:

    llama_cpp_greedy.json      the file as it is; llama.cpp then rounds activations to 8 bits before multiplying
    llama_cpp_f32_greedy.json  the same weights expanded to F32 by llama.cpp itself, with K/V in F32: no such rounding
"""

import sys
import tempfile
from ctypes import byref
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tests.support.parity_prompts import PROMPTS
from tests.support.recorded_answers import write

HERE = Path(__file__).parent
STEPS = 32
BEST = 4


def main() -> None:
    source = Path(sys.argv[1])
    record(source, HERE / "llama_cpp_greedy.json")
    with tempfile.TemporaryDirectory() as scratch:
        expanded = Path(scratch) / "f32.gguf"
        expand(source, expanded)
        f32 = llama_cpp.GGML_TYPE_F32
        record(expanded, HERE / "llama_cpp_f32_greedy.json", type_k=f32, type_v=f32)


def record(model_file: Path, answers: Path, **options: Any) -> None:
    model = llama_cpp.Llama(str(model_file), n_ctx=2048, n_threads=2, verbose=False, **options)
    write(
        answers,
        f"llama-cpp-python {llama_cpp.__version__}",
        {name: answer(model, text) for name, text in PROMPTS.items()},
    )


def expand(source: Path, target: Path) -> None:
    """The same weights as F32, converted by llama.cpp."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), byref(params)):
        raise SystemExit(f"llama.cpp could not expand {source}")


def answer(model: Any, text: str) -> dict[str, Any]:
    """Feed the prompt, then 31 of its own greedy tokens; end-of-turn tokens do not stop it."""
    prompt = model.tokenize(text.encode(), add_bos=False, special=True)
    model.reset()
    model.eval(prompt)
    steps: list[list[tuple[int, float]]] = []
    for _ in range(STEPS):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(model.n_vocab(),))
        best = np.argsort(-logits)[:BEST]
        steps.append([(int(token), round(float(logits[token]), 4)) for token in best])
        model.eval([steps[-1][0][0]])
    return {"prompt": prompt, "steps": steps}


if __name__ == "__main__":
    main()

"""Record what llama.cpp answers, greedily, on the default model's own GGUF, for `test_llama_cpp_greedy.py`.

    python -m tests.parity.record_llama_cpp_greedy MODEL.gguf

needs llama-cpp-python and rewrites `llama_cpp_greedy.json`: for every prompt its token ids and, for each of the 32
tokens that follow, llama.cpp's best tokens with their logits, best first.
"""

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tests.parity.prompts import PROMPTS

ANSWERS = Path(__file__).with_name("llama_cpp_greedy.json")
STEPS, BEST = 32, 4


def main() -> None:
    model = llama_cpp.Llama(sys.argv[1], n_ctx=2048, n_threads=2, verbose=False, logits_all=False)
    record = {
        "llama_cpp_python": llama_cpp.__version__,
        "answers": {name: answer(model, text) for name, text in PROMPTS.items()},
    }
    ANSWERS.write_text(compact(record))


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


def compact(record: dict[str, Any]) -> str:
    """JSON with one line per prompt and per step."""
    parts = []
    for name, each in record["answers"].items():
        steps = ",\n      ".join(json.dumps(step) for step in each["steps"])
        prompt = json.dumps(each["prompt"])
        parts.append(f'    {json.dumps(name)}: {{\n    "prompt": {prompt},\n    "steps": [\n      {steps}\n    ]}}')
    body = ",\n".join(parts)
    return f'{{\n  "llama_cpp_python": {json.dumps(record["llama_cpp_python"])},\n  "answers": {{\n{body}\n  }}\n}}\n'


if __name__ == "__main__":
    main()

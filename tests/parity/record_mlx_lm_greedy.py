"""Record mlx-lm's greedy answers on the default model in float32, for `test_default_model.py`.

    python -m tests.parity.record_mlx_lm_greedy MODEL_DIRECTORY

rewrites `mlx_lm_greedy.json`: for every prompt its token ids and, for each of the 128 tokens that follow, mlx-lm's
best tokens with their logits, best first. It takes minutes on x86, where MLX multiplies slowly; so the suite asks
mlx-lm itself only once, and this record for the rest.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from tests.support.parity_prompts import PROMPTS
from tests.support.recorded_answers import write

ANSWERS = Path(__file__).with_name("mlx_lm_greedy.json")
STEPS = 128
BEST = 4


def main() -> None:
    mx.set_default_device(mx.cpu)
    directory = Path(sys.argv[1])
    model, _ = load_model(directory)
    model.set_dtype(mx.float32)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    answers = {}
    for name, text in PROMPTS.items():
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        answers[name] = {"prompt": prompt, "steps": answer(model, prompt)}
    write(ANSWERS, f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}", answers)


def answer(model: Any, prompt: list[int]) -> list[list[tuple[int, float]]]:
    """The best tokens of each step; end-of-turn tokens do not stop it."""
    cache = make_prompt_cache(model)
    fed = prompt
    steps = []
    for _ in range(STEPS):
        logits = model(mx.array([fed]), cache=cache)[0, -1]
        best: list[int] = mx.argsort(-logits)[:BEST].tolist()
        steps.append([(token, round(float(logits[token].item()), 5)) for token in best])
        fed = [best[0]]
    return steps


if __name__ == "__main__":
    main()

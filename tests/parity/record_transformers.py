"""Record what transformers says of tiny checkpoints as it writes them: config, tensors, logits.

    python -m tests.parity.record_transformers CASES.json    (needs torch and transformers 5; the suite needs neither)

CASES.json: {name: {"model_type": ..., every other key of the config}}. Weights follow from the tensors' names
(`weight`), so that none has to be kept.
"""

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECORDED = Path(__file__).with_name("transformers_logits.json")
TOKENS = [(7 * i * i + 3 * i + 5) % 96 for i in range(24)]
LENGTHS = (12, 24)  # on both sides of the original context of what was extended
STEPS = 12  # tokens of each of three turns


def weight(name: str, shape: list[int]) -> NDArray[Any]:
    """A tensor's values from its name: matrices keep the variance of what they multiply, norms are near one.

    Tables of experts (of eight) have two others for each token.
    """
    if name.endswith("tid2eid"):
        first = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 8, (shape[0], 1))
        return np.asarray((first + np.array([0, 3])) % 8)
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return noise * np.float32(shape[-1] ** -0.5)
    return np.asarray(np.float32(0.1) * noise + np.float32(0.0 if name.endswith("bias") else 1.0))


def prompts_of(first: list[int]) -> list[list[int]]:
    """The prompts of three turns: the first, one that goes on from its answer, and an edited one."""
    return [TOKENS, [*TOKENS, *first, 3, 1, 4, 1, 5], [*TOKENS[:15], 9, 2, 6, *TOKENS[18:]]]


def record(cases: dict[str, dict[str, Any]]) -> None:
    """Write these cases into RECORDED, beside what it has under other names."""
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    recorded = json.loads(RECORDED.read_text())
    for name, case in cases.items():
        family = AutoModelForImageTextToText if "text_config" in case else AutoModelForCausalLM
        config = CONFIG_MAPPING[case.pop("model_type")](**case)
        with tempfile.TemporaryDirectory() as folder:
            family.from_config(config).float().save_pretrained(folder)
            file = Path(folder) / "model.safetensors"
            shapes = {key: list(array.shape) for key, array in load_file(file).items()}
            save_file({key: weight(key, shape) for key, shape in shapes.items()}, file, metadata={"format": "pt"})
            model = family.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
            stated = json.loads((Path(folder) / "config.json").read_text())
        model.eval()

        def answer(prompt: list[int], model: Any = model) -> list[int]:
            tokens = list(prompt)
            for _ in range(STEPS):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            return tokens[len(prompt) :]

        with torch.no_grad():
            logits = [model(torch.tensor([TOKENS[:count]])).logits[0, -1, :12].tolist() for count in LENGTHS]
            turns = [answer(prompt) for prompt in prompts_of(answer(TOKENS))]
        rounded = [[round(value, 5) for value in row] for row in logits]
        recorded[name] = {"config": stated, "tensors": shapes, "logits": rounded, "turns": turns}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in recorded.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record(json.loads(Path(sys.argv[1]).read_text()))

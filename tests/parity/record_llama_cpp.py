"""Record llama.cpp's answers on the tiny GGUF files of `tests/support/gguf_models.py`, so that the suite can hold the
converter to them where llama.cpp is not installed.

    python -m tests.parity.record_llama_cpp [DEFAULT_MODEL.gguf | layered | adapters | only NAME...]

needs llama-cpp-python and gguf, and rewrites `tests/models/gguf/llama_cpp.json`: token ids of every text of
`tests/support/corpus.py` for each tokenizer, and of each tiny model some logits and three greedy answers. With the
default model's file its token ids are recorded too; without, the ones already there are kept. `layered` rewrites
`llama_cpp_layered.json` instead, for the files of `gguf_layered_models.py`. `only` adds the answers of these variants
and tokenizers to what is there, and `adapters` those of models with an adapter. `record_llama_cpp_server.py` records
those variants that llama-cpp-python's last wheel does not know.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp

from tests.support.corpus import NASTY
from tests.support.gguf_layered_models import LAYERED, write_layered
from tests.support.gguf_models import VARIANTS, add_vocabulary, write_adapter, write_gguf

ANSWERS = Path(__file__).parents[1] / "models" / "gguf" / "llama_cpp.json"
LAYERED_ANSWERS = ANSWERS.with_name("llama_cpp_layered.json")
PRE_TOKENIZERS = (
    "default", "gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "qwen35", "tekken", "seed-coder", "gpt-4o",
    "falcon", "deepseek-coder", "deepseek-v3", "exaone-moe", "bloom", "viking", "deepseek-llm", "spark2_5", "afmoe",
    "glm4", "jais-2", "laguna", "minicpm5", "superbpe", "ufakzeka", "k2-horizon",
)  # fmt: skip
# Names that llama.cpp treats as one of those.
ALIASES = (
    "phi-2", "exaone4", "jina-v2-de", "gigachat", "glm5", "chatglm-bpe", "lfm2", "falcon-h1", "midm-2.0", "a.x-4.0",
    "mellum", "hunyuan", "kormo", "hunyuan-dense", "llama4", "mpt", "olmo", "starcoder", "refact", "command-r",
    "codeshell", "exaone", "minerva-7b", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "stablelm2",
    "deepseek-r1-qwen", "megrez", "solar-open", "f2llmv2", "grok-2", "minimax-m2", "kanana2", "bailingmoe",
    "bailingmoe2", "llada-moe", "joyai-llm", "hy_v4", "talkie", "jina-es", "jina-de", "jina-v2-es", "modern-bert",
    "jina-v5-nano", "mellum2", "trillion", "granite-docling", "jais", "poro-chat", "gpt3-finnish",
)  # fmt: skip
ADAPTED = ("llama", "qwen3", "gemma3", "phi3")
PROMPT = [(7 * i * i + 3 * i + 5) % 900 for i in range(24)]
EVERY = 23  # one logit in so many is kept
STEPS = 6
SAID_NEXT = [3, 90, 17]
EDITED = [*PROMPT[:10], 5, 6, 11]


def main() -> None:
    if sys.argv[1:] == ["layered"]:
        record_layered()
        return
    if sys.argv[1:] == ["adapters"]:
        known = json.loads(ANSWERS.read_text())
        ANSWERS.write_text(as_lines({**known, "adapters": adapter_logits()}) + "\n")
        return
    if sys.argv[1:2] == ["only"]:
        record_only(sys.argv[2:])
        return
    kept: dict[str, Any] = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {"tokens": {}}
    tokens = {name: token_ids(path) for name, path in vocabulary_files()}
    if len(sys.argv) > 1:
        tokens["default-model"] = token_ids(Path(sys.argv[1]))
    elif "default-model" in kept["tokens"]:
        tokens["default-model"] = kept["tokens"]["default-model"]
    answers = {
        "llama_cpp_python": llama_cpp.__version__,
        "prompt": PROMPT,
        "every": EVERY,
        "said_next": SAID_NEXT,
        "edited": EDITED,
        "logits": {variant: logits(variant) for variant in VARIANTS},
        "turns": {variant: turns(variant) for variant in VARIANTS},
        "adapters": adapter_logits(),
        "tokens": tokens,
        "same_tokens": same_tokens(tokens),
    }
    ANSWERS.write_text(as_lines(answers) + "\n")


def record_layered() -> None:
    answers = {
        "llama_cpp_python": llama_cpp.__version__, "prompt": PROMPT, "every": EVERY, "said_next": SAID_NEXT,
        "edited": EDITED, "logits": {variant: logits(variant) for variant in LAYERED},
        "turns": {variant: turns(variant) for variant in LAYERED},
    }  # fmt: skip
    LAYERED_ANSWERS.write_text(as_lines(answers) + "\n")


def record_only(names: list[str]) -> None:
    """Record these variants and tokenizers."""
    for file, known in ((ANSWERS, VARIANTS), (LAYERED_ANSWERS, LAYERED)):
        answers = json.loads(file.read_text())
        for variant in (variant for variant in known if variant in names):
            answers["logits"][variant], answers["turns"][variant] = logits(variant), turns(variant)
            answers.setdefault("versions", {})[variant] = llama_cpp.__version__
        if file == ANSWERS:
            answers["tokens"] |= {name: token_ids(path) for name, path in vocabulary_files() if name in names}
        file.write_text(as_lines(answers) + "\n")


def vocabulary_files() -> Iterator[tuple[str, Path]]:
    """(name, GGUF file without tensors) for each tokenizer under test."""
    with tempfile.TemporaryDirectory() as directory:
        for pre in PRE_TOKENIZERS:
            yield pre, vocabulary_file(Path(directory) / f"{pre}.gguf", "byte_level", pre=pre)
        for name, prefix in (("spm", False), ("spm-prefix", True)):
            yield name, vocabulary_file(Path(directory) / f"{name}.gguf", "sentencepiece", space_prefix=prefix)
        yield "sarvam-moe", vocabulary_file(Path(directory) / "sarvam.gguf", "characters", pre="sarvam-moe")


def same_tokens(tokens: dict[str, Any]) -> dict[str, str]:
    """Return for each of `ALIASES` the first name in `tokens` with the same ids of all texts."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "alias.gguf"
        ids = {name: token_ids(vocabulary_file(path, "byte_level", pre=name)) for name in ALIASES}
    return {name: next(case for case, known in tokens.items() if known == each) for name, each in ids.items()}


def vocabulary_file(path: Path, vocabulary: str, **options: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add_vocabulary(writer, vocabulary, **options)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def token_ids(path: Path) -> dict[str, list[list[int]]]:
    """The ids of every text, with special tokens recognised and without; BOS as the file asks."""
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return {
        name: [model.tokenize(text.encode(), add_bos=True, special=special) for text in NASTY]
        for name, special in (("special", True), ("plain", False))
    }


def adapter_logits() -> dict[str, list[float]]:
    """Logits after `PROMPT` of models with an adapter."""
    return {variant: logits(variant, adapted=True) for variant in ADAPTED}


def logits(variant: str, *, adapted: bool = False) -> list[float]:
    """Logits after `PROMPT`, everything in float32."""
    with tempfile.TemporaryDirectory() as directory:
        adapter = write_adapter(Path(directory) / "lora.gguf", variant) if adapted else None
        model = opened(Path(directory), variant, adapter)
        model.eval(PROMPT)
        return [round(float(x), 6) for x in model.scores[len(PROMPT) - 1][::EVERY]]


def turns(variant: str) -> list[list[int]]:
    """Greedy answers to `PROMPT`, to what is said next, and to an edited first turn; each from an empty cache."""
    with tempfile.TemporaryDirectory() as directory:
        model = opened(Path(directory), variant)
        first = greedy(model, PROMPT)
        return [first, greedy(model, [*PROMPT, *first, *SAID_NEXT]), greedy(model, EDITED)]


def greedy(model: llama_cpp.Llama, prompt: list[int]) -> list[int]:
    model.reset()
    said: list[int] = []
    for piece in (prompt, *([None] * (STEPS - 1))):
        model.eval(piece or said[-1:])
        said.append(int(model.scores[model.n_tokens - 1].argmax()))
    return said


def opened(directory: Path, variant: str, adapter: Path | None = None) -> llama_cpp.Llama:
    write = write_layered if variant in LAYERED else write_gguf
    path = write(directory / "tiny.gguf", variant)
    return llama_cpp.Llama(
        str(path), n_ctx=64, logits_all=True, type_k=0, type_v=0, flash_attn=False, n_threads=1, verbose=False,
        lora_path=None if adapter is None else str(adapter),
    )  # fmt: skip


def as_lines(answers: dict[str, Any]) -> str:
    """JSON with one line per innermost list."""
    text = json.dumps(answers, separators=(",", ":"))
    return text.replace(',"', ',\n"').replace("],[", "],\n[")


if __name__ == "__main__":
    main()

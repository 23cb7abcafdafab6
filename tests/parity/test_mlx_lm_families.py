"""The decoder against mlx-lm's classes for the families of one table, on checkpoints as the classes write them."""

import json
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from headrace.models.architectures.families import architecture_named
from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.text_part import text_config
from headrace.models.mlx_lm.load import load
from headrace.models.network.long_rope_decoder import long_rope
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.ops import Ops, reference
from tests.support.alone import new_cache
from tests.support.kernels import KERNELS, name_of, tolerance
from tests.support.mlx_lm_models import MODELS, RECURRENT, VOCAB, config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder, quantize_model

pytestmark = pytest.mark.peer

_KEYS = (
    "model.layers.1.self_attn",
    "language_model.model.layers.1.self_attn",
    "model.language_model.layers.1.self_attn",
    "transformer.h.1.attn.attention",
    "model.h.1.attn",
)
EIGHT_BITS = {
    name: {"bits": 8, "group_size": 32} for name in (*(f"{at}.k_proj" for at in _KEYS), "transformer.h.1.attn.c_k")
}
ROUTERS = {
    f"{at}.gate": False
    for i in range(6)
    for at in (f"model.layers.{i}.mlp", f"language_model.model.layers.{i}.mlp", f"backbone.layers.{i}.mixer")
}
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(40)]  # longer than the window
STEPS = 20


def logits_of(network: Any, tokens: list[int]) -> mx.array:
    cache = new_cache(network, 256)
    cache.reserve(len(tokens))
    return network.all_logits(network.layers(network.embed(mx.array([tokens])), cache))


def difference(a: mx.array, b: mx.array) -> float:
    return float((mx.abs(a - b).max() / mx.abs(b).max()).item())


def stock(directory: Path) -> Any:
    """Return mlx-lm's model alone: costs of its steps would take longer than all of its logits here."""
    model, _ = load(open_checkpoint(directory), mx.DeviceType.cpu)
    return model


def logits_of_class(model: Any, tokens: list[int]) -> mx.array:
    """Return the logits (1, T, V) of all positions. Raises CheckpointError for whatever the class raises."""
    try:
        logits: mx.array = model(mx.array([tokens]), cache=make_prompt_cache(model))
        mx.eval(logits)
    except Exception as error:
        raise CheckpointError(str(error)) from error
    return logits


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlx_lm_model(tmp_path_factory.mktemp(request.param), config_of(request.param))


def kind_of(directory: Path) -> str:
    """Return the model_type of the text part."""
    config = json.loads((directory / "config.json").read_text())
    return str(config.get("text_config", config)["model_type"])


def plain_of(kind: str) -> tuple[str, ...]:
    """Return the ends of modules that a quantized checkpoint of the family has plain."""
    row = architecture_named(kind)
    return architecture_named(row.same_as or kind).plain


def is_recurrent(directory: Path) -> bool:
    return kind_of(directory) in RECURRENT


def skip_unless_runs(directory: Path, ops: Ops) -> None:
    if ops is reference and is_recurrent(directory):
        pytest.skip("stock MLX has no blocks to keep recurrent state beside")


# Families with facts that no other has: tests/faults/deliberate changes them.
OWN_FACTS = (
    *("gemma3n-plain-reference", "kimi-k3-plain", "klear-plain-reference", "mamba-plain", "mimo-v2-plain-reference"),
    *("nanbeige-plain-reference", "phimoe-scaled-plain-reference", "rwkv7-plain", "spark2.5-plain-reference"),
)


@pytest.mark.sampled(24, always=OWN_FACTS)
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "4-bit"])
def test_logits_equal_mlx_lms(tmp_path: Path, directory: Path, ops: Ops, quantized: bool) -> None:
    skip_unless_runs(directory, ops)
    if quantized:
        directory = quantize_model(
            directory,
            tmp_path / "quantized",
            {**EIGHT_BITS, **(ROUTERS if ".mlp.gate" in plain_of(kind_of(directory)) else {})},
        )
    decoder = load_decoder(directory, ops)
    gathers = decoder.kv_shape.indexed or long_rope(decoder.config) is not None
    assert decoder.pages == (ops is not reference and not gathers)
    ours = logits_of(decoder, PROMPT)
    theirs = logits_of_class(stock(directory), PROMPT)
    kind = kind_of(directory)
    # One half of K/V projections has half precision; the class of Gemma 1 computes another GELU than transformers.
    rounds = kind == "gemma" or (quantized and kind in ("deepseek_v2", "minicpm3", "youtu_llm"))
    if decoder.kv_shape.indexed and ops.name == "native":  # rounded scores choose other entries for some positions
        rows = mx.abs(ours - theirs).max(axis=-1)[0]
        ours, theirs = (logits[:, mx.argsort(rows)[: len(PROMPT) // 2]] for logits in (ours, theirs))
    assert difference(ours, theirs) < max(tolerance(ops), 5e-4 * rounds)


def answer_of(peer: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Return the most likely token of mlx-lm's class behind the prompt, and behind each token of an answer."""
    logits = logits_of_class(peer, [*prompt, *answer[:-1]])[0, len(prompt) - 1 :]  # (T, V)
    return [int(token) for token in logits.argmax(axis=-1).tolist()]  # type: ignore[union-attr]


def said(events: Any) -> list[int]:
    return [token for event in events if isinstance(event, Step) for token in event.tokens]


@pytest.mark.sampled(72)
@pytest.mark.parametrize("ops", [ops for ops in KERNELS if ops.name != "native"], ids=name_of)
def test_turns_equal_mlx_lms(directory: Path, ops: Ops) -> None:
    """A first turn, a second one on its prefix and an edited one; all at once; with draft tokens from the prompt."""
    skip_unless_runs(directory, ops)
    peer = stock(directory)
    network = load_decoder(directory, ops)
    engine = Engine(network, context_limit=256, keep_prefix=True)

    def answer(engine: Engine, prompt: list[int], speculate: Literal["off", "ngram"] = "off") -> list[int]:
        return said(engine.generate(Request(prompt, max_tokens=STEPS, speculate=speculate)))

    first = answer(engine, PROMPT)
    prompts = [PROMPT, [*PROMPT, *first, 3, 1, 4, 1, 5], [*PROMPT[:25], 9, 2, 6, *PROMPT[28:]]]
    answers = [first, *(answer(engine, prompt) for prompt in prompts[1:])]
    for prompt, given in zip(prompts, answers, strict=True):
        assert len(given) == STEPS
        assert answer_of(peer, prompt, given) == given
    together = Engine(network, context_limit=256)
    sequences = [together.submit(Request(prompt, max_tokens=STEPS, speculate="off")) for prompt in prompts]
    events: dict[Any, list[Any]] = {sequence: [] for sequence in sequences}
    while together.has_work:
        for sequence, event in together.step():
            events[sequence].append(event)
    assert [said(events[sequence]) for sequence in sequences] == answers
    again = Engine(network, context_limit=256)
    repeated = [*PROMPT, *first, *PROMPT]
    assert answer(again, repeated, "ngram") == answer(again, repeated)


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "model_type")
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# Fields that mlx-lm's class ignores, and transformers' class does not.
_IGNORED = {
    ("kimi_linear", "rope_scaling"),  # it rotates nothing
    *((kind, "rope_scaling") for kind in ("Klear", "cohere", "helium", "phi", "stablelm", "starcoder2")),
    *((kind, "rope_scaling") for kind in ("muse_glimmer", "nanochat", "lille-130m", "qwen")),
    ("deepseek", "rope_scaling"),  # of other kinds than linear
    ("minicpm", "tie_word_embeddings"),  # tied logits are not scaled
    ("bailing_moe", "num_experts_per_tok"),  # one expert a token ends the process in MLX 0.32
    ("falcon_mamba", "state_size"),  # the norm of one number is its sign
    ("falcon_h1", "mamba_rms_norm"),  # its class normalizes over both groups
    ("glm4_moe", "tie_word_embeddings"),
    *((kind, "index_n_heads") for kind in ("deepseek_v32", "glm_moe_dsa")),  # of few, equal scores of 0
    *((kind, "rope_scaling") for kind in ("glm_moe_dsa", "minimax_m3_vl")),  # they read `rope_parameters`
    ("glm4_moe_lite", "tie_word_embeddings"),
    ("llama4", "rms_norm_eps"),  # of queries' and keys' norms
    ("solar_open", "tie_word_embeddings"),
    ("qwen2_moe", "tie_word_embeddings"),
    ("step3p5", "tie_word_embeddings"),
    ("gpt_neox", "rope_scaling"),
    ("gemma3n", "rope_scaling"),
    *((kind, "n_positions") for kind in ("gpt2", "gpt_bigcode")),  # the prompt has more
    ("internlm3", "max_position_embeddings"),  # dynamic scaling begins there
    ("helium", "head_dim"),
    ("hunyuan", "tie_word_embeddings"),
    ("deepseek_v3", "topk_group"),  # of one group: fewer experts than a token takes, all others rank alike
}
# Their classes take the arguments of another one, have another activation, or sizes in sections and lists.
_ELSEWHERE = ("qwen3.5", "qwen3.5-moe", "qwen3-vl-moe", "ministral3", "gemma", "dbrx", "openelm")
_FIRST = {config_of(name)["model_type"]: name for name in reversed(MODELS)}


def others(value: Any) -> list[Any]:
    """Return other values that a field may have."""
    if isinstance(value, bool):
        return [not value]
    return [value * 0.5, value * 3] if isinstance(value, float) else [1, 3] if isinstance(value, int) else []


def changes_of(name: str) -> list[dict[str, Any]]:
    from mlx_lm.utils import _get_classes

    config = config_of(name)
    arguments = _get_classes(config_of(name))[1]
    if "text_config" in config:
        config = config["text_config"]
        module = import_module(arguments.__module__)
        arguments = getattr(module, "TextArgs", None) or module.TextConfig
    changes: list[dict[str, Any]] = [{"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": _LLAMA3}]
    for field in fields(arguments):
        stated = config.get(field.name, None if field.default is MISSING else field.default)
        if field.name not in _SIZES:
            changes += [{field.name: value} for value in others(stated)]
    return changes


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", [name for name in _FIRST.values() if name not in _ELSEWHERE])
def test_every_field_of_the_class_counts_or_is_refused(tmp_path: Path, name: str) -> None:
    compared = 0
    for number, change in enumerate(changes_of(name)):
        config = {**config_of(name), **change}
        if (text := config_of(name).get("text_config")) is not None:
            config = {**config_of(name), "text_config": {**text, **change}}
        if (config["model_type"], next(iter(change))) in _IGNORED:
            continue
        try:
            if decoder_config(text_config(normalized(config))) is None:
                continue  # mlx-lm's class runs it
            directory = write_mlx_lm_model(tmp_path / str(number), config)
            theirs = logits_of_class(stock(directory), PROMPT)
        except (CheckpointError, UnsupportedModelError, ValueError, AssertionError, KeyError):
            continue  # one of them refuses it
        ours = logits_of(load_decoder(directory, KERNELS[-1] if is_recurrent(directory) else reference), PROMPT)
        assert difference(ours, theirs) < 2e-5, change
        compared += 1
    assert compared > 3

"""Every model module of mlx-lm through headrace: turns and bytes of a step, on tiny random weights."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.mlx_lm.load import load
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.ops import reference
from tests.support.every_module import VOCAB, config_of, names
from tests.support.kernels import FAST
from tests.support.mlx_lm_models import write_mlx_lm_model
from tests.support.tiny import load_decoder

pytestmark = [pytest.mark.peer, pytest.mark.nightly]

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(40)]
NEAR_TIE = 4e-3  # of the largest logit: half-precision K/V and rounded activations


def test_modules_have_configs() -> None:
    assert len(names()) > 95


@pytest.mark.parametrize("name", names())
def test_turns_are_the_classes(tmp_path: Path, name: str) -> None:
    """A first turn, a second on its prefix and an edited one: each token is the class's choice, up to near-ties.

    A wider gap must be one that the class itself, in half precision, could turn.
    """
    directory = write_mlx_lm_model(tmp_path, config_of(name))
    peer = MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu).model
    engine = Engine(network_of(directory), context_limit=256, keep_prefix=True)

    def check(prompt: list[int]) -> list[int]:
        answer = [
            token
            for event in engine.generate(Request(prompt, max_tokens=12, speculate="off"))
            if isinstance(event, Step)
            for token in event.tokens
        ]
        logits = one_pass(peer, prompt + answer[:-1])[len(prompt) - 1 :]
        chosen = mx.take_along_axis(logits, mx.array(answer)[:, None], axis=1)[:, 0]
        assert len(answer) == 12
        gaps = logits.max(axis=1) - chosen
        largest = mx.abs(logits).max()
        if (gaps.max() / largest).item() >= NEAR_TIE:  # a model that magnifies rounding; its class's own shows how much
            rounded = one_pass(halved(directory), prompt + answer[:-1])[len(prompt) - 1 :].astype(mx.float32)
            assert (gaps <= mx.abs(rounded - logits).max(axis=1)).all().item()
        return answer

    first = check(PROMPT)
    check([*PROMPT, *first, 3, 1, 4, 1, 5])
    check([*PROMPT[:25], 9, 2, 6, *PROMPT[28:]])


def halved(directory: Path) -> Any:
    """Return the class in half precision, as it runs on a GPU."""
    return load(open_checkpoint(directory), mx.DeviceType.gpu)[0]


def network_of(directory: Path) -> Any:
    """Load a checkpoint as `load_model` does, without a tokenizer."""
    checkpoint = open_checkpoint(directory)
    if own_decoder(checkpoint) is not None:
        return load_decoder(directory, FAST)
    kernels = None if FAST is reference else FAST
    return MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu, kernels=kernels).use_kernels()


def one_pass(model: Any, tokens: list[int]) -> mx.array:
    """Return logits (T, V) of a prompt by a class's own rules."""
    from mlx_lm.models.cache import make_prompt_cache

    logits: mx.array = model(mx.array([tokens]), cache=make_prompt_cache(model))
    assert not mx.isnan(logits).any().item()
    return logits[0]

"""Prefix reuse with every kind of cache: ours, ours behind sliding windows, and mlx-lm's plain and rotating ones.

Rotating caches cannot go back once they have wrapped: then a branch starts anew, and only a pure continuation reuses.
"""

from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from tests.support.tiny import load_decoder, write_model
from tests.support.watched import split

pytestmark = pytest.mark.peer
START = [(7 * i * i + 3 * i + 5) % 96 for i in range(9)]


def decoder(directory: Path) -> Any:
    return load_decoder(directory)


def peer(directory: Path) -> Any:
    return MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu)


def tokens(engine: Engine, prompt: list[int], steps: int) -> tuple[list[int], int]:
    said, end = split(list(engine.generate(Request(prompt, max_tokens=steps))))
    return said, end.summary.reused_tokens


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("load", "variant"),
    [*product([decoder, peer], ["llama", "qwen3", "gemma2", "gemma3"]), (decoder, "mistral-window")],
)
def test_turns_branches_and_repeats_give_equal_tokens(tmp_path: Path, load: Any, variant: str) -> None:
    network = load(write_model(tmp_path / "model", variant))
    chat = Engine(network, context_limit=128, keep_prefix=True)
    once = Engine(network, context_limit=128)
    history = list(START)
    for turn in range(5):
        said, reused = tokens(chat, history, 8)
        assert said == tokens(once, history, 8)[0]
        assert reused == (len(history) - 4 if turn else 0)  # all but what was added since, and the token it ended with
        history += [*said, turn, 90, 17]
    edited = [*START, 5, 5]
    said, reused = tokens(chat, edited, 8)
    assert said == tokens(once, edited, 8)[0]
    rotated = load is peer and variant == "gemma3"
    assert reused == (0 if rotated else len(START))
    again, reused = tokens(chat, edited, 8)
    assert again == said
    assert reused in ((0, len(edited) - 1) if rotated else (len(edited) - 1,))

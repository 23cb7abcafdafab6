"""Recurrences in stock MLX: memory of a prompt, and bits however it is cut."""

import mlx.core as mx
import pytest

from headrace.runtime.ops import MixerSizes, MixerSpec, reference

TOKENS = 320
SPECS = {
    "scan": MixerSpec(
        MixerSizes("scan", heads=1024, key_heads=1, key_dim=32, value_dim=1, width=1),
        rate=-mx.ones((1024, 32)),
        skip=mx.ones((1024,)),
    ),
    "wkv": MixerSpec(MixerSizes("wkv", heads=8, key_heads=8, key_dim=64, value_dim=64, width=1)),
}
WIDTHS = {"scan": 2 * 1024 + 2 * 32, "wkv": 6 * 8 * 64}  # of a projected row


@pytest.mark.parametrize("kind", SPECS)
def test_a_prompt_takes_the_memory_of_few_states(kind: str) -> None:
    spec = SPECS[kind]
    x = mx.random.uniform(0.0, 0.1, (1, TOKENS, WIDTHS[kind]), key=mx.random.key(1))
    state = mx.zeros((spec.sizes.state,))
    mx.eval(x, state)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    whole, [end] = reference.mix_pass(x, [state], [TOKENS], spec)
    mx.eval(whole, end)
    states = (mx.get_peak_memory() - before - 2 * x.nbytes) / state.nbytes  # parts of rows are copied
    assert states < TOKENS / 3

    parts = []
    for first, last in ((0, 1), (1, 3), (3, 36), (36, TOKENS)):
        y, [state] = reference.mix_pass(x[:, first:last], [state], [last - first], spec)
        parts.append(y)
    assert mx.array_equal(mx.concatenate(parts, axis=1), whole)
    assert mx.array_equal(state, end)

"""Row invariance: a row has the same bits in any batch, for any prompt split and number of threads.

Prompts are cut into random chunks, decode rows run together and one by one, on one, two and three threads and on every
instruction set of this machine; outputs and cache entries are compared as bytes.
"""

import random
from collections.abc import Iterator
from itertools import accumulate

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.runtime.metrics.cost import FLOAT_MODES
from headrace.runtime.ops import AttentionSpec, Ops, Phase, Rope, Weight, native
from tests.support.kernels import INSTRUCTION_SETS, Exact, name_of, on_instruction_set

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

PROMPT = 1300  # entries: more than two chunks that are merged
SPEC = AttentionSpec(6, 2, 64, 0.125, Rope(64, 10_000 ** (mx.arange(0, 64, 2) / 64)))
SPECS = {
    "plain": SPEC,
    "window": replace(SPEC, window=300),
    "narrow window": replace(SPEC, window=40),
    "sinks": replace(SPEC, sinks=mx.array([0.5, -1.0, 3.0, 0.0, 2.0, 8.0])),
    "window and sinks": replace(SPEC, window=300, sinks=mx.array([0.5, -1.0, 3.0, 0.0, 2.0, 8.0])),
    "softcap": replace(SPEC, softcap=5.0, window=700),
    "norms, other heads": replace(SPEC, heads=7, kv_heads=1, q_norm=mx.ones(64), k_norm=mx.ones(64), window=130),
}


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


def appended(spec: AttentionSpec, qkv: mx.array, passes: list[tuple[int, Phase]], dtype: mx.Dtype) -> list[bytes]:
    """Attend for qkv (1, N, .) in passes of these lengths and phases; returns output and cache."""
    shape = (1, spec.kv_heads, qkv.shape[1] + 5, spec.head_dim)
    keys = mx.full(shape, float("nan"), dtype)
    values = mx.full(shape, float("nan"), dtype)
    outputs = []
    done = 0
    for length, phase in passes:
        out, keys, values = native.attend([qkv[:, done : done + length]], keys, values, done, spec, 0, phase)
        mx.eval(out)
        outputs.append(out)
        done += length
    kept = [mx.concatenate(outputs, axis=1), keys[:, :, :done], values[:, :, :done]]
    return [bytes(memoryview(mx.contiguous(array.view(mx.uint8)))) for array in kept]  # type: ignore[arg-type]


def cut(total: int, sizes: list[int], seed: int) -> list[int]:
    """Return random chunk sizes that sum to `total`; the first ones are given."""
    draw = random.Random(seed)
    chunks = list(sizes)
    while (left := total - sum(chunks)) > 0:
        chunks.append(min(left, draw.choice([1, 2, 3, 7, 16, 31, 64, 65, 200, 513])))
    return chunks


def projections(spec: AttentionSpec, tokens: int) -> mx.array:
    mx.random.seed(11)
    return 3 * mx.random.normal((1, tokens, (spec.heads + 2 * spec.kv_heads) * spec.head_dim))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_has_the_same_bits_for_any_split(name: str, dtype: mx.Dtype) -> None:
    spec = SPECS[name]
    qkv = projections(spec, PROMPT)
    native.set_threads(1)
    expected = appended(spec, qkv, [(PROMPT, "prefill")], dtype)
    for seed, threads in enumerate((1, 2, 3)):
        native.set_threads(threads)
        chunks = cut(PROMPT, [[], [600, 1, 1], [1, 63, 64, 1]][seed], seed)
        assert appended(spec, qkv, [(chunk, "prefill") for chunk in chunks], dtype) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("name", SPECS)
def test_decode_rows_have_the_same_bits_together_and_one_by_one(name: str, dtype: mx.Dtype) -> None:
    spec = SPECS[name]
    qkv = projections(spec, 760)
    prompt: list[tuple[int, Phase]] = [(500, "prefill"), (124, "prefill")]
    native.set_threads(1)
    expected = appended(spec, qkv, [*prompt, *[(1, "decode")] * 136], dtype)
    for threads in (1, 2, 3):
        native.set_threads(threads)
        runs: list[tuple[int, Phase]] = [(length, "decode") for length in range(1, 17)]  # 136 in all
        assert appended(spec, qkv, [*prompt, *runs], dtype) == expected


SIXTEEN = "6 bits in groups of 16"
FORMATS = ["f16", "bf16", "f32", *(f"{bits} bits" for bits in (2, 3, 4, 5, 6, 8)), SIXTEEN, *FLOAT_MODES]


def matrix(name: str, rows: int, columns: int) -> Weight:
    values = 0.1 * mx.random.normal((rows, columns), key=mx.random.key(5))
    floats = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}
    if name in floats:
        return Weight(values.astype(floats[name]))
    if name in FLOAT_MODES:
        bits, group = FLOAT_MODES[name]
        data, scales = mx.quantize(values, group_size=group, bits=bits, mode=name)
        return Weight(data, scales, None, bits, group, mode=name)
    data, scales, biases = mx.quantize(values, group_size=32, bits=int(name[0]))
    if name == SIXTEEN:
        scales = mx.repeat(scales, 2, axis=1) * mx.random.uniform(0.5, 1.5, (rows, columns // 16), key=mx.random.key(7))
        return Weight(data, scales, -32 * scales, 6, 16)
    return Weight(data, scales, biases, int(name[0]), 32)


@pytest.mark.sampled
@pytest.mark.parametrize("ops", [native, Exact()], ids=name_of)
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(name: str, ops: Ops) -> None:
    w = ops.prepare(matrix(name, 150, 1600), mx.float32)
    x = 3 * mx.random.normal((1, 40, 1600), key=mx.random.key(6))
    native.set_threads(1)
    expected = mx.concatenate([ops.linear(x[:, row : row + 1], w) for row in range(40)], axis=1)
    for threads, counts in ((1, [40]), (2, [2, 3, 4, 5, 6, 7, 8, 5]), (3, [9, 1, 17, 13])):
        native.set_threads(threads)
        ends = list(accumulate(counts))
        found = [ops.linear(x[:, end - count : end], w) for count, end in zip(counts, ends, strict=True)]
        assert mx.array_equal(mx.concatenate(found, axis=1), expected)

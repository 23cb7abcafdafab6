"""mlx-lm's classes with their projections and tables on our kernels, against the same classes on stock MLX."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from headrace.models.mlx_lm.kernels import KernelFunctions, _Experts, _OnKernels, _Projection, _Table
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.ops import Ops, Weight, native
from tests.models.mlx_lm.test_network import CONFIGS, PROMPT, load, write
from tests.support.kernels import Exact
from tests.support.speculating import run
from tests.support.watched import answer, split

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not native.status().available, reason="the native kernels are not built"),
]

_SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5", "text_config": {
        **_SMALL, "model_type": "qwen3_5_text", "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}},
    "lfm2": {**_SMALL, "model_type": "lfm2", "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64,
             "block_ff_dim": 128, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
             "block_auto_adjust_ff_dim": False, "full_attn_idxs": [2], "rope_theta": 1e6},
    "minicpm3": {**_SMALL, "model_type": "minicpm3", "dim_model_base": 64, "rms_norm_eps": 1e-5, "q_lora_rank": 32,
                 "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
                 "scale_depth": 1.4, "scale_emb": 12, "rope_theta": 1e4, "rope_scaling": {
                     "type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8,
                     "original_max_position_embeddings": 512}},
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "olmoe": {**_SMALL, "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
              "norm_topk_prob": True, "tie_word_embeddings": True},
    "granitemoehybrid": {**_SMALL, "model_type": "granitemoehybrid", "shared_intermediate_size": 64,
                         "num_local_experts": 6, "num_experts_per_tok": 2, "mamba_n_heads": 4, "mamba_d_head": 32,
                         "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_d_state": 32,
                         "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_proj_bias": False, "mamba_conv_bias": True,
                         "embedding_multiplier": 12.0, "attention_multiplier": 0.25, "logits_scaling": 6.0,
                         "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "attention_bias": False,
                         "position_embedding_type": "nope", "tie_word_embeddings": True},
    "gpt_oss": {**_SMALL, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
                "rms_norm_eps": 1e-5, "sliding_window": 8, "rope_theta": 1e4, "layer_types": [
                    "sliding_attention", "full_attention"] * 2},
}  # fmt: skip
EVERY = {**CONFIGS, **HYBRIDS, **EXPERTS}


def logits(network: MlxLmNetwork) -> mx.array:
    """Return those of a prompt, and of three steps behind it."""
    parts = network._fresh_parts()
    rows = [network._model(mx.array([PROMPT]), cache=parts)]
    rows += [network._model(mx.array([[token]]), cache=parts) for token in (5, 17, 3)]
    return mx.concatenate(rows, axis=1)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("ops", [Exact(), native], ids=["exact", "native"])
@pytest.mark.parametrize("bits", [None, 4], ids=["plain", "4-bit"])
@pytest.mark.parametrize("name", EVERY)
def test_kernels_give_the_logits_of_the_stock_class(tmp_path: Path, name: str, bits: int | None, ops: Ops) -> None:
    directory = write(tmp_path, EVERY[name], bits)
    stock, ours = (load(directory, kernels=kernels) for kernels in (None, ops))
    wanted = logits(stock)
    ours.use_kernels()
    exchanged = [module for _, module in ours._model.named_modules() if isinstance(module, _OnKernels)]
    assert len(exchanged) > 3
    stock_stacks = [module for _, module in ours._model.named_modules() if "SwitchLinear" in type(module).__name__]
    assert not stock_stacks
    distance = mx.abs(logits(ours) - wanted).max() / mx.abs(wanted).max()
    assert distance.item() < (2e-4 if isinstance(ops, Exact) else 1e-2)
    assert ours.vocab_size == stock.vocab_size


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["lfm2", "olmo2"])  # with recurrent state, and in shared passes
def test_kernels_give_the_tokens_of_the_stock_class_alone_and_in_a_batch(tmp_path: Path, kind: str) -> None:
    directory = write(tmp_path, EVERY[kind])
    stock = load(directory)
    ours = load(directory, kernels=Exact()).use_kernels()
    requests = [Request(PROMPT[:n], max_tokens=12, speculate="off") for n in (41, 5, 9)]
    together = run(Engine(ours, context_limit=256), requests)
    for request, events in zip(requests, together, strict=True):
        assert split(events)[0] == answer(stock, request)[0]


def test_layers_whose_weights_a_class_reads_itself_get_no_kernels(tmp_path: Path) -> None:
    """OLMo 2 stands for all classes here: one of its layers reads the weights of a projection."""
    from mlx_lm.models import olmo2

    class Curious(olmo2.MLP):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            return self.down_proj(nn.silu(x @ self.gate_proj.weight.T) * self.up_proj(x))

    network = load(write(tmp_path, CONFIGS["olmo2"]), kernels=Exact())
    network._model.layers[0].mlp.__class__ = Curious
    wanted = logits(network)
    network.use_kernels()
    kinds = {path.rpartition(".")[2]: type(module) for path, module in network._model.named_modules()}
    assert kinds["gate_proj"] is nn.Linear
    assert (kinds["up_proj"], kinds["lm_head"], kinds["embed_tokens"]) == (_Projection, _Projection, _Table)
    assert mx.allclose(logits(network), wanted, atol=1e-4)


def test_kernels_keep_no_second_copy_of_weights(tmp_path: Path) -> None:
    network = load(write(tmp_path, CONFIGS["olmo2"], bits=4), kernels=native)
    before = network.cost
    network.use_kernels()
    held = [module for _, module in network._model.named_modules() if type(module) in (nn.Linear, nn.QuantizedLinear)]
    assert held == []
    counted = sum(array.nbytes for array in network.arrays)
    table = network._model.model.embed_tokens._weight.nbytes  # looked up, never read whole
    assert network.cost.weight_bytes == pytest.approx(counted - table, rel=0.02)
    assert network.cost.weight_flops == before.weight_flops


@pytest.mark.parametrize("shape", [(5, 1, 1, 64), (5, 3, 1, 64), (5, 1, 4, 64), (64,)], ids=str)
def test_stacks_broadcast_rows_and_indices_as_the_class_does(shape: tuple[int, ...]) -> None:
    """Rows for all experts of a token, one for each, several for each, and one for all."""
    from mlx_lm.models.switch_layers import SwitchLinear

    mx.random.seed(5)
    stock = SwitchLinear(64, 32, 6)
    weight = native.prepare(Weight(stock.weight, bias=stock.bias), mx.float32)
    indices = mx.random.randint(0, 6, (5, 3))
    x = mx.random.normal(shape if len(shape) > 1 else (1, 64))
    wanted, ours = (layer(x, indices) for layer in (stock, _Experts(native, weight, 6)))
    assert ours.shape == wanted.shape
    assert mx.allclose(ours, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["olmo2", "olmoe"])
def test_prompt_chunks_do_not_change_bits_with_kernels(tmp_path: Path, kind: str) -> None:
    network = load(write(tmp_path, EVERY[kind], bits=4), kernels=native).use_kernels()
    functions = network._functions
    assert functions is not None
    functions.phase = "prefill"

    def last(*lengths: int) -> mx.array:
        parts = network._fresh_parts()
        begin = 0
        for length in lengths:
            rows = network._model(mx.array([PROMPT[begin : begin + length]]), cache=parts)
            begin += length
        return rows[:, -1]

    whole = last(41)
    assert all(mx.array_equal(last(*lengths), whole) for lengths in ((20, 21), (40, 1), (1, 1, 39)))


def test_kernels_of_a_model_do_not_change_other_models_of_its_class(tmp_path: Path) -> None:
    directory = write(tmp_path, EVERY["qwen3_5"])
    stock = load(directory)
    ours = load(directory, kernels=native).use_kernels()
    before = type(stock._model.layers[0].linear_attn)
    after = type(ours._model.layers[0].linear_attn)
    assert after is not before
    assert issubclass(after, before)
    names = ("nn", "mx")
    assert all(before.__call__.__globals__[name] is not after.__call__.__globals__[name] for name in names)
    assert before.__call__.__globals__["nn"] is nn


def test_kernels_do_not_change_the_shared_default_activation() -> None:
    """Mixtures of mlx-lm share one module, a default argument."""
    one = SwitchGLU(32, 32, 2)
    other = SwitchGLU(32, 32, 2)
    KernelFunctions(native).bind(one)
    assert type(one.activation) is not SwiGLU
    assert type(other.activation) is SwiGLU

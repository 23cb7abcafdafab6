"""A random model as an MLX checkpoint (4 bits, group 64) and as a GGUF (Q4_0) with the same weights.

    python -m tests.bench.make_model 3b FOLDER        writes FOLDER/3b-mlx/ and FOLDER/3b.gguf
    headrace bench -m FOLDER/3b-mlx --vs llama.cpp --llama-python PYTHON --llama-model FOLDER/3b.gguf

The speed of a step depends on a model's shape, not on its values. Both files have 4.5 bits per weight, so both programs
read the same bytes. Weights are made and written one matrix at a time. The tokenizer has single bytes only.
`make_family` does the same for families of other structure.

Guards: tests/bench/test_make_model.py compares the logits of both files.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from headrace.models.gguf.safetensors_writer import SafetensorsWriter
from tests.bench.shapes import SHAPES, Shape

_END = "<|end|>"
_MERGE = ("Ġ", "Ġ")
# Values that share a scale
_GROUP = 64  # in MLX
_BLOCK = 32  # in Q4_0
_BLOCK_BYTES = 2 + _BLOCK // 2  # of Q4_0: a scale in half precision, and 4 bits a value
_CONTEXT = 65536
_ROPE_THETA = 500000.0
_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Matrix:
    """A projection of N rows by K columns, or a stack of them.

    rotated: heads whose rows llama.cpp stores in its own RoPE order, or 0. stack: number of experts, or 0.
    """

    name: str
    gguf_name: str
    rows: int
    columns: int
    rotated: int = 0
    stack: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """(N,), or (X, N) of a stack."""
        if self.stack:
            return self.stack, self.rows
        return (self.rows,)


def matrices(shape: Shape) -> Iterator[Matrix]:
    """Return every matrix of the model, in the order of both files."""
    width = shape.width
    inner = shape.hidden
    dim = shape.head_dim
    # A dense model is a Llama; a mixture is a Qwen 3, whose query and key rows llama.cpp keeps in their order.
    rotated_heads = shape.heads
    rotated_kv_heads = shape.kv_heads
    mlp_name = "mlp"
    suffix = ""
    if shape.experts:
        rotated_heads = 0
        rotated_kv_heads = 0
        mlp_name = "mlp.switch_mlp"
        suffix = "_exps"
    yield Matrix("model.embed_tokens", "token_embd", shape.vocab, width)
    for i in range(shape.layers):
        at = f"model.layers.{i}"
        block = f"blk.{i}"
        yield Matrix(f"{at}.self_attn.q_proj", f"{block}.attn_q", shape.heads * dim, width, rotated_heads)
        yield Matrix(f"{at}.self_attn.k_proj", f"{block}.attn_k", shape.kv_heads * dim, width, rotated_kv_heads)
        yield Matrix(f"{at}.self_attn.v_proj", f"{block}.attn_v", shape.kv_heads * dim, width)
        yield Matrix(f"{at}.self_attn.o_proj", f"{block}.attn_output", width, shape.heads * dim)
        mlp = f"{at}.{mlp_name}"
        yield Matrix(f"{mlp}.gate_proj", f"{block}.ffn_gate{suffix}", inner, width, stack=shape.experts)
        yield Matrix(f"{mlp}.up_proj", f"{block}.ffn_up{suffix}", inner, width, stack=shape.experts)
        yield Matrix(f"{mlp}.down_proj", f"{block}.ffn_down{suffix}", width, inner, stack=shape.experts)


def norms(shape: Shape) -> dict[str, str]:
    """Return the names of the norm weights in the checkpoint and in the GGUF. All are one."""
    names = {"model.norm": "output_norm"}
    for i in range(shape.layers):
        names[f"model.layers.{i}.input_layernorm"] = f"blk.{i}.attn_norm"
        names[f"model.layers.{i}.post_attention_layernorm"] = f"blk.{i}.ffn_norm"
        if shape.experts:
            names[f"model.layers.{i}.self_attn.q_norm"] = f"blk.{i}.attn_q_norm"
            names[f"model.layers.{i}.self_attn.k_norm"] = f"blk.{i}.attn_k_norm"
    return names


def vectors(shape: Shape, seed: int) -> Iterator[tuple[str, str, npt.NDArray[np.float32]]]:
    """Return (name in the checkpoint, name in the GGUF, values) of plain weights: norms, all ones, and routers."""
    for name, gguf_name in norms(shape).items():
        size = shape.width
        if name.endswith(("q_norm", "k_norm")):  # of each head
            size = shape.head_dim
        yield name, gguf_name, np.ones(size, np.float32)
    if not shape.experts:
        return
    draw = np.random.default_rng(seed + 1)
    for i in range(shape.layers):
        values = draw.standard_normal((shape.experts, shape.width), np.float32) / math.sqrt(shape.width)
        yield f"model.layers.{i}.mlp.gate", f"blk.{i}.ffn_gate_inp", values.astype(np.float16).astype(np.float32)


def packed(matrix: Matrix, draw: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return random 4-bit values (N, K / 2), two per byte, lower half first (MLX). Of a stack, (X * N, K / 2)."""
    rows = math.prod(matrix.shape)
    return np.frombuffer(draw.bytes(rows * matrix.columns // 2), np.uint8).reshape(rows, -1)


def scale_of(matrix: Matrix) -> np.float16:
    """Return one scale for all groups of a matrix: (q - 8) * scale has a variance of about 1 / K.

    4.6 is the standard deviation of q, whose 16 values are equally likely.
    """
    return np.float16(1 / (4.6 * math.sqrt(matrix.columns)))


def q4_0(matrix: Matrix, values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return Q4_0 blocks (N, K / 32 * 18) of the weights: a half-precision scale, values j and j + 16 in byte j."""
    if matrix.rotated:  # pairs (i, i + D / 2) of a head become neighbours
        halves = values.reshape(matrix.rotated, 2, -1, values.shape[1])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    halves = values.reshape(len(values), -1, 2, _BLOCK // 4)  # (N, blocks, halves, bytes)
    low = halves[:, :, 0]
    high = halves[:, :, 1]
    blocks = np.empty((*low.shape[:2], _BLOCK_BYTES), np.uint8)
    blocks[..., :2] = np.frombuffer(scale_of(matrix).tobytes(), np.uint8)
    # Byte i of a half has values 2 i and 2 i + 1. Bytes 2 i and 2 i + 1 of the block take one of them from each half.
    blocks[..., 2::2] = (low & 15) | (high << 4)
    blocks[..., 3::2] = (low >> 4) | (high & 0xF0)
    return blocks.reshape(*matrix.shape, -1)


def write_checkpoint(directory: Path, shape: Shape, seed: int = 0) -> None:
    """Write an MLX model directory, which mlx-lm loads too."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(shape), indent=2))
    tokenizer = _tokenizer(shape.vocab)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "model_max_length": _CONTEXT})
    )
    draw = np.random.default_rng(seed)
    parts = [f"{m.name}.{part}" for m in matrices(shape) for part in ("weight", "scales", "biases")]
    names = [*parts, *(f"{name}.weight" for name, _, _ in vectors(shape, seed))]
    with SafetensorsWriter(directory / "model.safetensors", names) as file:
        for m in matrices(shape):
            scales = np.full((*m.shape, m.columns // _GROUP), scale_of(m), np.float16)
            file.add(f"{m.name}.weight", packed(m, draw).view("<u4").reshape(*m.shape, -1), "U32")
            file.add(f"{m.name}.scales", scales, "F16")
            file.add(f"{m.name}.biases", -8 * scales, "F16")
        for name, _, values in vectors(shape, seed):
            file.add(f"{name}.weight", values.astype(np.float16), "F16")


def write_gguf(path: Path, shape: Shape, seed: int = 0) -> None:
    """Write the same weights for llama.cpp."""
    architecture = "llama"
    if shape.experts:
        architecture = "qwen3moe"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(_CONTEXT)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(_ROPE_THETA)
    writer.add_layer_norm_rms_eps(_NORM_EPS)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.active)
        writer.add_expert_feed_forward_length(shape.hidden)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _add_vocabulary(writer, shape.vocab)

    kind = gguf.GGMLQuantizationType.Q4_0
    for m in matrices(shape):
        stored = (*m.shape, m.columns // _BLOCK * _BLOCK_BYTES)
        writer.add_tensor_info(f"{m.gguf_name}.weight", stored, np.dtype(np.uint8), math.prod(stored), kind)
    for _, name, values in vectors(shape, seed):
        writer.add_tensor_info(f"{name}.weight", values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(seed)
    for m in matrices(shape):
        writer.write_tensor_data(q4_0(m, packed(m, draw)))
    for _, _, values in vectors(shape, seed):
        writer.write_tensor_data(values)
    writer.close()


def _config(shape: Shape) -> dict[str, Any]:
    mixture: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.active,
        "moe_intermediate_size": shape.hidden,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if not shape.experts:
        mixture = {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": _CONTEXT,
        "rope_theta": _ROPE_THETA,
        "rms_norm_eps": _NORM_EPS,
        "tie_word_embeddings": True,
        "eos_token_id": _words(shape.vocab).index(_END),
        "quantization": {"group_size": _GROUP, "bits": 4},
        **mixture,  # with other classes' names
    }


def _words(vocab: int) -> list[str]:
    """Return a vocabulary: the bytes, one merge (an empty list is not valid in a GGUF), an end token, and filling."""
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "".join(_MERGE), _END]
    return [*known, *(f"<unused {i}>" for i in range(vocab - len(known)))]


def _tokenizer(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(_words(vocab))}, [_MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return tokenizer


def _add_vocabulary(writer: gguf.GGUFWriter, vocab: int) -> None:
    words = _words(vocab)
    kinds = []
    for word in words:
        if word == _END:
            kinds.append(gguf.TokenType.CONTROL)
        elif word.startswith("<unused"):
            kinds.append(gguf.TokenType.UNUSED)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(_MERGE)])
    writer.add_eos_token_id(words.index(_END))
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    write_checkpoint(options.folder / f"{options.shape}-mlx", shape)
    write_gguf(options.folder / f"{options.shape}.gguf", shape)


if __name__ == "__main__":
    main()

"""Whole conversions of tiny models: layout, exactness, the files beside the weights, and llama.cpp's own logits."""

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from headrace.models.architectures.read import decoder_config
from headrace.models.gguf import convert_gguf
from headrace.models.gguf.convert import read_plan
from headrace.models.loading.load import load_model
from headrace.models.text.tokenizer import Tokenizer as ModelTokenizer
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.ops import groups_of_16
from tests.support.alone import new_cache
from tests.support.corpus import NASTY
from tests.support.gguf_models import VARIANTS, gguf_weights, header, hf_weights, shape_of, write_gguf
from tests.support.tiny import load_decoder
from tests.support.watched import split

LLAMA_CPP = json.loads(Path(__file__).with_name("llama_cpp.json").read_text())
# llama.cpp's CPU GELU is a lookup table in half precision. With that rounding imitated, Gemma models of one and two
# layers agree to 4e-6 as well; what stays in deeper ones grows with depth. Wrong softcaps, windows, RoPE bases or query
# scales move these logits by 1.6e-2 and more; a wrong epsilon could hide, and is checked in the config instead.
TOLERANCE = {"gemma": 1e-3, "gemma2": 1e-3, "gemma3": 1e-3}
# mlx-lm's classes ignore long factors and YaRN's amplitude.
OWN_DECODER = {"phi3-long", "minicpm-long", "qwen2-yarn-attn"}
LATER = ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4")
LARGE = {"hidden": 256, "inner": 512, "head_dim": 64, "layers": 1}


def convert(source: Path) -> Path:
    target = source.with_suffix("")
    target.mkdir()
    convert_gguf(source, target)
    return target


def read(directory: Path, name: str) -> Any:
    return json.loads((directory / name).read_text())


def in_float32(arrays: dict[str, mx.array], module: str, bits: int) -> np.ndarray:
    scales, biases = (arrays[f"{module}.{leaf}"].astype(mx.float32) for leaf in ("scales", "biases"))
    if bits == groups_of_16.BITS:
        return np.array(groups_of_16.dequantized(arrays[f"{module}.weight"], scales, biases))
    return np.array(mx.dequantize(arrays[f"{module}.weight"], scales, biases, group_size=32, bits=bits))


def write_tensors(path: Path, variant: str, tensors: dict[str, np.ndarray]) -> Path:
    writer = header(path, variant)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_come_out_in_hugging_face_layout(variant: str, tmp_path: Path) -> None:
    directory = convert(write_gguf(tmp_path / "m.gguf", variant))
    ours = mx.load(str(directory / "model.safetensors"))
    wanted = hf_weights(variant)
    assert ours.keys() == wanted.keys()
    for name, values in wanted.items():
        if variant.startswith("gemma") and name.endswith("norm.weight"):
            values = (values + np.float32(1)) - np.float32(1)  # what the 1 costs is lost before us
        np.testing.assert_array_equal(np.array(ours[name]), values, err_msg=name)


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
def test_our_decoder_gives_llama_cpps_logits(variant: str, tmp_path: Path) -> None:
    directory = convert(write_gguf(tmp_path / "m.gguf", variant))
    if decoder_config(read(directory, "config.json")) is None:
        return  # mlx-lm's class runs it: see below
    if variant == "gpt-oss":  # llama.cpp rounds the ends of YaRN's ramp, as every other model with YaRN has them
        config = read(directory, "config.json")
        config["rope_scaling"]["truncate"] = True
        (directory / "config.json").write_text(json.dumps(config))
    compare(first_logits(directory), variant)


def first_logits(directory: Path) -> np.ndarray:
    """The decoder's logits after the recorded prompt."""
    decoder = load_decoder(directory)
    prompt = LLAMA_CPP["prompt"]
    cache = new_cache(decoder, 256)
    cache.reserve(len(prompt))
    x = decoder.layers(decoder.embed(mx.array([prompt])), cache)
    return np.array(decoder.all_logits(x)).reshape(len(prompt), -1)[-1]


@pytest.mark.sampled
@pytest.mark.peer
@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - OWN_DECODER))
def test_mlx_lm_loads_the_directory_and_gives_llama_cpps_logits(variant: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    model, _ = load_model(convert(write_gguf(tmp_path / "m.gguf", variant)))
    compare(np.array(model(mx.array([LLAMA_CPP["prompt"]]))[0, -1]), variant)


@pytest.mark.peer
def test_minicpm_has_the_logits_of_mlx_lms_class(tmp_path: Path) -> None:
    from mlx_lm.models.minicpm import Model, ModelArgs

    shape = shape_of("minicpm")
    args = ModelArgs(
        model_type="minicpm", hidden_size=shape["hidden"], dim_model_base=shape["hidden"] // 2,
        num_hidden_layers=shape["layers"], intermediate_size=shape["inner"], num_attention_heads=shape["heads"],
        rms_norm_eps=1e-5, vocab_size=1001, num_key_value_heads=shape["kv_heads"], scale_depth=1.4, scale_emb=12.0,
        rope_theta=10_000.0,
    )  # fmt: skip
    model = Model(args)
    model.load_weights([(name, mx.array(values)) for name, values in hf_weights("minicpm").items()])
    theirs = np.array(model(mx.array([LLAMA_CPP["prompt"]]))[0, -1])
    ours = first_logits(convert(write_gguf(tmp_path / "m.gguf", "minicpm")))
    assert np.abs(ours - theirs).max() < 5e-6 * np.abs(theirs).max()


@pytest.mark.parametrize(
    "keys",
    [
        {"scaling.factor": 2.0},
        {"scale_linear": 2.0},
        {"scaling.factor": 2.0, "scale_linear": 4.0},
        {"scaling.type": "linear", "scale_linear": 2.0, "scaling.finetuned": True},
    ],
)
def test_every_spelling_of_linear_scaling_gives_llama_cpps_logits(keys: dict[str, Any], tmp_path: Path) -> None:
    metadata = {f"rope.{key}": value for key, value in keys.items()}
    compare(first_logits(convert(write_gguf(tmp_path / "m.gguf", "llama", metadata=metadata))), "llama-linear")


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_decoders_answer_as_llama_cpp_in_every_turn(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First turn, second turn and an edited first turn of one conversation, on a cache that is kept between them."""
    monkeypatch.setenv("HEADRACE_EXACT", "1")
    loaded = load_model(convert(write_gguf(tmp_path / "m.gguf", variant)), name=variant)
    assert loaded.notes == []
    engine = Engine(loaded.network, context_limit=64, keep_prefix=True)
    wanted = LLAMA_CPP["turns"][variant]
    first: list[int] = LLAMA_CPP["prompt"]
    second = [*first, *wanted[0], *LLAMA_CPP["said_next"]]
    for prompt, answer in zip((first, second, LLAMA_CPP["edited"]), wanted, strict=True):
        said, _ = split(list(engine.generate(Request(prompt, max_tokens=len(answer)))))
        assert said == answer


def test_converting_a_gguf_does_not_change_its_plan(tmp_path: Path) -> None:
    """A conversion leaves its plan as it is: `config` has no quantization section."""
    plan = read_plan(write_gguf(tmp_path / "m.gguf", "llama", matrices="Q8_0"))
    before = json.dumps(plan.config)
    for name in "ab":
        (tmp_path / name).mkdir()
        convert_gguf(plan, tmp_path / name)
        assert json.dumps(plan.config) == before
    assert read(tmp_path / "a", "config.json") == read(tmp_path / "b", "config.json")
    assert "quantization" in read(tmp_path / "a", "config.json")
    assert "quantization" not in plan.config


@pytest.mark.peer
def test_mxfp4_experts_keep_their_bits(tmp_path: Path) -> None:
    """The same file with its experts in F32, as the reference dequantizer gives them, has the same logits."""
    from mlx_lm.utils import load_model as load_in_mlx_lm

    path = write_gguf(tmp_path / "m.gguf", "gpt-oss", experts="MXFP4")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    plain = {}
    for name, tensor in stored.items():
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        plain[name] = values.reshape(tuple(reversed(tensor.shape.tolist())))
    packed = convert(path)
    section = read(packed, "config.json")["quantization"]
    assert section == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    models = [packed, convert(write_tensors(tmp_path / "plain.gguf", "gpt-oss", plain))]
    ours, theirs = (np.array(load_in_mlx_lm(each)[0](mx.array([LLAMA_CPP["prompt"]]))) for each in models)
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


def compare(logits: np.ndarray, variant: str) -> None:
    theirs = np.array(LLAMA_CPP["logits"][variant])
    difference = np.abs(logits[:: LLAMA_CPP["every"]] - theirs).max() / np.abs(theirs).max()
    assert difference < TOLERANCE.get(variant, 5e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ2_S", "TQ1_0", *LATER])
def test_every_tensor_type_loads_and_equals_its_source(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", matrices=kind, **LARGE)
    directory = convert(path)
    ours = mx.load(str(directory / "model.safetensors"))
    source = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.0.ffn_down.weight"]
    values = gguf.quants.dequantize(source.data, source.tensor_type)
    name = "model.layers.0.mlp.down_proj"
    config = read(directory, "config.json")
    if kind in ("F16", "BF16"):
        assert "quantization" not in config
        assert ours[name + ".weight"].dtype == {"F16": mx.float16, "BF16": mx.bfloat16}[kind]
        np.testing.assert_array_equal(np.array(ours[name + ".weight"].astype(mx.float32)), values)
        return
    dequantized = in_float32(ours, name, config["quantization"]["bits"])
    inexact = {row["name"]: row for row in read(directory, "headrace.json")["inexact_tensors"]}
    if kind in ("Q2_K", "Q3_K", "IQ2_S", "TQ1_0"):
        row = inexact["blk.0.ffn_down.weight"]
        assert (row["type"], row["became"]) == (kind, "affine 8-bit, group size 32")
        assert np.abs(dequantized - values).max() == pytest.approx(row["max_abs_error"], rel=1e-3)
    else:
        assert inexact == {}
        np.testing.assert_array_equal(dequantized, values)


def test_quantized_query_rows_are_put_back_in_order(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", matrices="Q4_0", **LARGE)
    ours = mx.load(str(convert(path) / "model.safetensors"))
    matrix = in_float32(ours, "model.layers.0.self_attn.q_proj", 4)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.0.attn_q.weight"]
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    for head in range(4):
        rows = slice(64 * head, 64 * head + 64)
        np.testing.assert_array_equal(matrix[rows][:32], values[rows][0::2])
        np.testing.assert_array_equal(matrix[rows][32:], values[rows][1::2])


@pytest.mark.peer
def test_mixed_widths_load_in_mlx_lm(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    writer = header(tmp_path / "m.gguf", "llama")
    for name, values in gguf_weights("llama", hf_weights("llama")).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if "embd" in name or "ffn_up" in name else gguf.GGMLQuantizationType.Q4_1
        if values.ndim == 1 or name == "blk.1.attn_v.weight":
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    directory = convert(tmp_path / "m.gguf")
    section = read(directory, "config.json")["quantization"]
    eight = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert section == {
        "group_size": 32, "bits": 4, "mode": "affine", "model.embed_tokens": eight,
        "model.layers.0.mlp.up_proj": eight, "model.layers.1.mlp.up_proj": eight,
    }  # fmt: skip
    model, _ = load_model(directory)
    layer = model.model.layers[1]
    assert (layer.mlp.up_proj.bits, layer.mlp.gate_proj.bits) == (8, 4)
    assert not hasattr(layer.self_attn.v_proj, "bits")
    assert mx.isfinite(model(mx.array([[5, 6, 7]]))).all()


@pytest.mark.peer
@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("variant", ["llama", "llama-spm", "gemma3"])
def test_transformers_reads_the_same_tokenizer(variant: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = convert(write_gguf(tmp_path / "m.gguf", variant))
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(directory)
    assert [theirs(text)["input_ids"] for text in NASTY] == [ours.encode(text).ids for text in NASTY]
    assert theirs.chat_template == (directory / "chat_template.jinja").read_text()
    assert theirs.eos_token == "</s>"


def test_a_converted_directory_has_all_files_of_a_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama-3")
    told: list[tuple[int, int]] = []
    (target := tmp_path / "out").mkdir()
    convert_gguf(path, target, progress=lambda done, total: told.append((done, total)))
    assert {file.name for file in target.iterdir()} == {
        "config.json", "generation_config.json", "headrace.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert (target / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"
    assert read(target, "generation_config.json") == {"bos_token_id": 0, "eos_token_id": [1, 3]}
    origin = read(target, "headrace.json")
    assert (origin["source"], origin["size"], origin["licence"]) == ("m.gguf", path.stat().st_size, "apache-2.0")
    assert len(origin["sha256"]) == 64
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    _, metadata = mx.load(str(target / "model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}


def test_the_template_for_tools_is_used_when_there_are_tools(tmp_path: Path) -> None:
    """Command R and Hermes name a second template."""
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    directory = convert(write_gguf(tmp_path / "m.gguf", "llama", template=named))
    tokenizer = ModelTokenizer.load(directory)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.encode_chat(messages) == tokenizer.encode("a")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tokenizer.encode_chat(messages, tools=[tool]) == tokenizer.encode("b")


def test_conversion_repeats_byte_for_byte(tmp_path: Path) -> None:
    first, second = (convert(write_gguf(tmp_path / f"{n}.gguf", "qwen3")) for n in "ab")
    for file in first.iterdir():
        if file.name != "headrace.json":
            assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def changed(tmp_path: Path, **changes: np.ndarray | None) -> Path:
    """A llama file with tensors replaced, added or (None) left out; `__` in a name stands for a dot."""
    tensors = gguf_weights("llama", hf_weights("llama"))
    for name, values in changes.items():
        name = name.replace("__", ".")
        if values is None:
            del tensors[name]
        else:
            tensors[name] = values
    return write_tensors(tmp_path / "m.gguf", "llama", tensors)


def test_missing_foreign_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    vector = np.zeros(64, np.float32)
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_k\.weight"):
        convert(changed(tmp_path, blk__1__attn_k__weight=None))
    (tmp_path / "m").rmdir()
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        convert(changed(tmp_path, blk__0__ffn_gate_inp__weight=vector))
    (tmp_path / "m").rmdir()
    with pytest.raises(CheckpointError, match=r"output_norm\.weight.*\(63,\)"):
        convert(changed(tmp_path, output_norm__weight=vector[:63]))


def test_rope_factors_that_are_not_llama_3_are_refused(tmp_path: Path) -> None:
    factors = np.array([1, 1, 3, 2, 5, 6, 7, 8], np.float32)
    with pytest.raises(UnsupportedModelError, match="Llama 3 formula"):
        convert(changed(tmp_path, rope_freqs__weight=factors))
    (tmp_path / "m").rmdir()
    directory = convert(changed(tmp_path, rope_freqs__weight=np.ones(8, np.float32)))
    assert "rope_scaling" not in read(directory, "config.json")

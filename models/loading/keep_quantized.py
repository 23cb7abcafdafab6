"""Quantized copies of plain checkpoints in the model store.

The copy is an MLX-quantized directory that headrace and mlx-lm load. Memory: the output of one shard at a time.

Guard: tests/models/loading/test_keep_quantized.py.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.checkpoint.arrays import save_arrays
from headrace.models.checkpoint.quantization import Quantization
from headrace.models.checkpoint.safetensors import Checkpoint, open_checkpoint
from headrace.models.checkpoint.text_part import headrace_name, text_config, text_part
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.network.head_decoder import head_config
from headrace.models.network.mtp import head_tensors
from headrace.models.network.stacks import inputs_first
from headrace.models.network.tensors import scoring_modules
from headrace.models.network.weight_arrays import shard_arrays
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.resolve import ResolvedModel
from headrace.models.registry.store import Store, StoredModel
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.ops import Weight

# Files that are copied unchanged: tokenizer, templates, sampling defaults.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja", "chat_template.json", "tokenizer.model", "tekken.json", "tiktoken.model",
    "qwen.tiktoken", "added_tokens.json",
)  # fmt: skip
_NAMED_TEMPLATES = "additional_chat_templates"  # folder
_JOINED = (".experts.gate_up_proj", ".experts.down_proj")  # stacks as publishers name them


def keep_quantized(
    model: ResolvedModel, kind: Quantization, *, name: str | None = None, progress: Progress = silent
) -> StoredModel:
    """Store `model` quantized as `kind`, under `name` (default: its own name and the width, `qwen3-4bit`).

    Raises UsageError for a quantized checkpoint, UnsupportedModelError if headrace's own decoder does not run it.
    """
    checkpoint = open_checkpoint(model.path)
    if checkpoint.quantization is not None:
        raise UsageError(f"{model.name} is quantized already", "--quantize takes a plain checkpoint")
    config = own_decoder(checkpoint)
    if config is None:
        raise UnsupportedModelError(
            f"{model.name}: headrace does not quantize its architecture",
            "mlx_lm.convert -q does it for mlx-lm's models",
        )

    def build(target: Path) -> dict[str, object]:
        _write_weights(checkpoint, config, kind, target, progress)
        section = {"bits": kind.bits, "group_size": kind.group_size, "mode": "affine"}
        write_side_files(checkpoint, section, target)
        how = f"quantized here to {kind.bits} bits, groups of {kind.group_size}"
        return {"source": f"{model.origin}, {how}", "licence": model.licence}

    stem = (model.stored_as or model.name).replace("/", "--")
    return Store().install(name or f"{stem}-{kind.bits}bit", build, progress=progress)


def write_side_files(checkpoint: Checkpoint, section: Mapping[str, object], target: Path) -> None:
    """Write config.json with this section for the quantization, and copy tokenizer, templates and sampling defaults."""
    config = {**checkpoint.config, "quantization": section, "quantization_config": section}
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for file in _COPIED:
        if (checkpoint.path / file).is_file():
            shutil.copyfile(checkpoint.path / file, target / file)
    if (checkpoint.path / _NAMED_TEMPLATES).is_dir():
        shutil.copytree(checkpoint.path / _NAMED_TEMPLATES, target / _NAMED_TEMPLATES)


def _write_weights(
    checkpoint: Checkpoint, config: DecoderConfig, kind: Quantization, target: Path, progress: Progress
) -> None:
    """Write the tensors, matrices among them quantized, a file for each shard. progress: gets bytes that are done."""
    kept_names = _kept_names(checkpoint)
    scoring = _scoring_names(checkpoint, config)
    done = 0
    here = {stored: name for name, stored in text_part(checkpoint).stored.items()}  # names in MLX by those in the files
    shapes = {name: checkpoint.tensors[stored].shape for stored, name in here.items()}
    total = sum(checkpoint.tensors[name].nbytes for name in kept_names)
    for number, arrays in enumerate(shard_arrays(checkpoint)):
        written: dict[str, mx.array] = {}
        for name in kept_names & arrays.keys():
            array = arrays[name]
            called = name
            if name.endswith(_JOINED) and ".switch_mlp." in here.get(name, ""):  # named as matrices of quantized models
                called = name.replace(".experts.", ".switch_mlp.").replace("gate_up_proj", "input_linear") + ".weight"
                if inputs_first(here[name], shapes):
                    array = mx.contiguous(array.swapaxes(1, 2))  # (experts, outputs, inputs)
            made = {called: array}
            if name not in scoring and _is_matrix(array, called, kind):
                made = matrix_tensors(called.removesuffix(".weight"), kind.apply(array))
            mx.eval(list(made.values()))  # so that the stored array is freed before the next one is read
            written |= made
            done += checkpoint.tensors[name].nbytes
            progress("quantizing", done, total)
        save_arrays(target / f"model-{number:05d}.safetensors", written)


def _kept_names(checkpoint: Checkpoint) -> set[str]:
    """Return the tensors of the text part, and of a multi-token prediction head without copies of the model's own."""
    names = set(text_part(checkpoint).stored.values())
    head = head_tensors(checkpoint)
    if head is not None:
        names |= set(head.renamed)
    return names


def _scoring_names(checkpoint: Checkpoint, config: DecoderConfig) -> set[str]:
    """Return the stored names of the matrices that stay plain, see `scoring_modules`, of a prediction head, too."""
    parts = [(config, text_part(checkpoint).stored)]  # with stored names by those of the table
    head = head_tensors(checkpoint)
    if head is not None:
        text = text_config(head.checkpoint.config)
        parts.append((head_config(head), {headrace_name(name, text): stored for stored, name in head.renamed.items()}))
    names = set()
    for part_config, stored_names in parts:
        scoring = scoring_modules(part_config)
        names |= {stored for name, stored in stored_names.items() if name.rpartition(".")[0] in scoring}
    return names


def _is_matrix(array: mx.array, name: str, kind: Quantization) -> bool:
    """Return whether a tensor is a matrix, or a stack, of rows with whole groups."""
    return name.endswith(".weight") and array.ndim >= 2 and kind.fits(array.shape[-1])


def matrix_tensors(module: str, weight: Weight) -> dict[str, mx.array]:
    """Return the tensors of a quantized matrix by name."""
    tensors = {f"{module}.weight": weight.data, f"{module}.scales": weight.scales, f"{module}.biases": weight.biases}
    return {name: array for name, array in tensors.items() if array is not None}

"""Chosen bits against uniform quantization of the same size: KL from the given weights, for docs/benchmarks.md.

python -m tests.bench.chosen_bits MODEL WORK [BITS ...]      # 2.5 3.5 4.5

MODEL is a plain checkpoint, or a GGUF, which is dequantized to float16 in WORK first. Three copies are made for each
number of bits: `mlx_lm.utils.quantize_model` in groups of 64, the same formats rounded as `headrace quantize` does, and
chosen bits. Figures are kept in WORK/figures.json: the same command goes on where it was stopped.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from headrace.app.bench.quality.figures import mean_figure
from headrace.app.quantize.budget import QuantizationBudget
from headrace.app.quantize.quantize import SCORED, QuantizeOptions, _excerpts, quantize
from headrace.app.quantize.sensitivity import Reference, importances_of
from headrace.models.checkpoint.arrays import save_arrays
from headrace.models.checkpoint.quantization import Groups, layer_quantization
from headrace.models.checkpoint.safetensors import Checkpoint, open_checkpoint
from headrace.models.loading.keep_quantized import write_side_files
from headrace.models.loading.load import load_model, load_resolved
from headrace.models.loading.mixed_quantization import PlainModel, plain_model, write_mixed
from headrace.models.network.decoder import Decoder
from headrace.models.network.weight_arrays import loaded, weight_arrays
from headrace.models.registry.progress import silent
from headrace.models.registry.resolve import ResolvedModel, resolve
from headrace.runtime.ops import groups_of_16

BITS = (2.5, 3.5, 4.5)
_GROUP = 64
_OF_SCALES = 0.5  # bits a weight, of scales and biases in groups of 64


def dequantize(model: ResolvedModel, target: Path) -> Path:
    """Write a plain directory with the weights that a quantized GGUF stands for, in float16; return it."""
    checkpoint = open_checkpoint(model.path)
    target.mkdir(parents=True)
    plain: dict[str, mx.array] = {}
    arrays = weight_arrays(checkpoint)
    for name in checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        if f"{module}.scales" not in checkpoint.tensors:
            plain[name] = loaded(arrays[name]).astype(mx.float16)
        elif leaf == "weight":
            plain[name] = _dequantized(checkpoint, module, [loaded(arrays[f"{module}.{part}"]) for part in _PARTS])
        mx.eval(plain)
    save_arrays(target / "model.safetensors", plain)
    write_side_files(checkpoint, {}, target)
    config = {name: value for name, value in checkpoint.config.items() if not name.startswith("quantization")}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


_PARTS = ("weight", "scales", "biases")


def _dequantized(checkpoint: Checkpoint, module: str, parts: list[mx.array]) -> mx.array:
    groups = layer_quantization(checkpoint.quantization, module)
    if groups.group_size == groups_of_16.GROUP:
        return groups_of_16.dequantized(*parts).astype(mx.float16)
    data, scales, biases = (part if part.dtype == mx.uint32 else part.astype(mx.float32) for part in parts)
    return mx.dequantize(data, scales, biases, groups.group_size, groups.bits).astype(mx.float16)


def copies(work: Path, bits: float) -> Iterator[tuple[str, Path]]:
    """Yield the name of each copy, and the folder where it is."""
    folder = work / f"{bits:g}"
    for kind in ("mlx-lm", "fitted", "chosen"):
        yield f"{bits:g} {kind}", folder / kind


def write_uniform_mlx_lm(source: Path, bits: int, target: Path) -> None:
    """Quantize with mlx-lm."""
    from mlx_lm.utils import load_model as load_mlx_lm
    from mlx_lm.utils import quantize_model, save_config, save_model

    model, config = load_mlx_lm(source, lazy=True)
    model, config = quantize_model(model, config, _GROUP, bits)
    target.mkdir(parents=True)
    save_model(target, model)
    save_config(config, config_path=target / "config.json")
    for file in source.glob("tokenizer*"):
        shutil.copyfile(file, target / file.name)


def write_uniform_fitted(plain: PlainModel, importances: dict[str, mx.array], bits: int, target: Path) -> None:
    """Quantize to one format, with the rounding of `headrace quantize`."""
    target.mkdir(parents=True)
    write_mixed(plain, [(part, Groups(bits, _GROUP)) for part in plain.parts], importances, target, silent)


def main() -> None:
    """Measure what is not in WORK/figures.json yet, and print the rows of the table."""
    model = resolve(sys.argv[1])
    work = Path(sys.argv[2])
    wanted = [float(bits) for bits in sys.argv[3:]] or list(BITS)
    work.mkdir(parents=True, exist_ok=True)
    if open_checkpoint(model.path).quantization is not None:
        plain_folder = work / "plain"
        if not (plain_folder / "config.json").exists():
            shutil.rmtree(plain_folder, ignore_errors=True)
            dequantize(model, plain_folder)
        model = resolve(str(plain_folder))
    file = work / "figures.json"
    figures = json.loads(file.read_text()) if file.exists() else {}

    source = open_checkpoint(model.path)
    plain = plain_model(source, model.name)
    loaded_model = load_resolved(model, context=SCORED)
    measured, scored = _excerpts(loaded_model.tokenizer, None)
    assert isinstance(loaded_model.network, Decoder)
    reference = Reference(loaded_model.network, scored)
    importances = importances_of(loaded_model.network, measured)
    del loaded_model
    for bits in wanted:
        for name, folder in copies(work, bits):
            if name in figures:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            whole_bits = round(bits - _OF_SCALES)
            if name.endswith("mlx-lm"):
                write_uniform_mlx_lm(model.path, whole_bits, folder)
            elif name.endswith("fitted"):
                write_uniform_fitted(plain, importances, whole_bits, folder)
            else:
                quantize(QuantizeOptions(str(model.path), QuantizationBudget(bits=bits), folder, quiet=True))
            compared = reference.compare(load_model(folder, name=name, context=SCORED).network)
            kl, top1 = mean_figure([compared.kl]), mean_figure([compared.agrees])
            nbytes = open_checkpoint(folder).nbytes
            figures[name] = {
                "bits": nbytes * 8 / plain.weights,
                "kl": [kl.value, kl.low, kl.high],
                "top1": top1.value,
            }
            file.write_text(json.dumps(figures, indent=1))
            shutil.rmtree(folder)
            print(name, figures[name], flush=True)
    print("| Bits a weight | Uniform, mlx-lm | Uniform, fitted scales | Chosen bits |\n|---|---:|---:|---:|")
    for bits in wanted:
        cells = [_cell(figures[name]) for name, _ in copies(work, bits)]
        print(f"| {bits:.2f} | {' | '.join(cells)} |")


def _cell(row: dict[str, object]) -> str:
    value, low, high = row["kl"]  # type: ignore[misc]
    return f"{value:.3g} ({low:.3g} to {high:.3g}), {100 * row['top1']:.1f} %"  # type: ignore[operator]


if __name__ == "__main__":
    main()

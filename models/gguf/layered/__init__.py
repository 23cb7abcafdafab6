"""GGUF architectures with layers that differ, or with classes of mlx-lm's alone.

Each becomes the layout of mlx-lm's class; facts of the files are those of llama.cpp's converter.

    parts       tensors of a layer, and their targets
    common      entries and tensors that many share
    delta, dense, gemma, mamba, mixtures, others      families
"""

from headrace.models.gguf.layered import delta, dense, gemma, mamba, mixtures, others
from headrace.models.gguf.layered.parts import Contents, LayeredArchitecture

__all__ = ["LAYERED", "Contents", "LayeredArchitecture"]

LAYERED: dict[str, LayeredArchitecture] = {
    "qwen35": delta.QWEN35,
    "qwen35moe": delta.QWEN35_MOE,
    "qwen3next": delta.QWEN3_NEXT,
    "gemma4": gemma.GEMMA4,
    "lfm2": others.LFM2,
    "lfm2moe": others.LFM2_MOE,
    "granitehybrid": mamba.GRANITE_HYBRID,
    "nemotron_h": mamba.NEMOTRON_H,
    "nemotron_h_moe": mamba.NEMOTRON_H,
    "falcon-h1": mamba.FALCON_H1,
    "mamba": mamba.MAMBA,
    "mamba2": mamba.MAMBA2,
    "jamba": mamba.JAMBA,
    "glm4moe": mixtures.GLM4_MOE,
    "deepseek2": mixtures.DEEPSEEK2,
    "mistral4": mixtures.MISTRAL4,
    "minimax-m2": mixtures.MINIMAX_M2,
    "ernie4_5-moe": mixtures.ERNIE_MOE,
    "starcoder2": others.STARCODER2,
    "phi2": others.PHI2,
    "apertus": others.APERTUS,
    "llama4": others.LLAMA4,
    "gemma3n": gemma.GEMMA3N,
    "kimi-linear": delta.KIMI_LINEAR,
    "command-r": dense.COMMAND_R,
    "stablelm": dense.STABLELM,
    "nemotron": dense.NEMOTRON,
    "deci": dense.DECI,
    "arcee": dense.ARCEE,
    "olmoe": mixtures.OLMOE,
    "dots1": mixtures.DOTS1,
    "deepseek": mixtures.DEEPSEEK,
    "mellum": mixtures.MELLUM,
    "exaone-moe": mixtures.EXAONE_MOE,
    "bailingmoe": mixtures.BAILING_MOE,
    "bailingmoe2": mixtures.BAILING_MOE2,
    "afmoe": mixtures.AFMOE,
    "hunyuan-moe": mixtures.HUNYUAN_MOE,
    "step35": mixtures.STEP35,
}

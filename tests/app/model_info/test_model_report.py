"""Formats of modules in model reports, by the rules of loading."""

from types import SimpleNamespace
from typing import Any

from headrace.app.model_info.model_report import quantization_document


def test_a_quantized_tensor_without_a_mode_is_reported_as_affine() -> None:
    section = {"bits": 4, "group_size": 32, "mode": "mxfp4", "lm_head": {"bits": 8, "group_size": 64}}
    checkpoint: Any = SimpleNamespace(quantization=section, tensors=dict.fromkeys(("mlp.scales", "lm_head.scales")))
    document = quantization_document(checkpoint)
    assert document["formats"] == {"4-bit, groups of 32, mxfp4": 1, "8-bit, groups of 64": 1}


def test_a_format_that_cannot_be_loaded_is_shown() -> None:
    section = {"bits": 7, "group_size": 48, "mode": "affine"}
    checkpoint: Any = SimpleNamespace(quantization=section, tensors=dict.fromkeys(("mlp.scales",)))
    assert quantization_document(checkpoint)["formats"] == {"7-bit, groups of 48": 1}

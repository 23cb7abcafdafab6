"""Selection of a repository's files: the model in a supported quantization, never code or pickles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.registry.hub_files import choose_files, quantization_of
from headrace.runtime.errors import HeadraceError

REPO = "org/name"


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("smollm2-1.7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Qwen2.5-0.5B-Instruct-Q8_0.gguf", "Q8_0"),
        ("model-F16.gguf", "F16"),
        ("model.bf16.gguf", "BF16"),
        ("sub/Q5_K_S/model-Q6_K.gguf", "Q6_K"),
        ("model-UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("model_q4_0.gguf", "Q4_0"),
        ("model-Q4_0_4_4.gguf", None),
        ("model-IQ4_XS.gguf", "IQ4_XS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-IQ2_XS.gguf", "IQ2_XS"),
        ("model-TQ1_0-00001-of-00003.gguf", "TQ1_0"),
        ("Q4U-model.gguf", None),
        ("model-Q4_K_L.GGUF", "Q4_K_L"),
        ("model-MXFP4_MOE.gguf", "MXFP4_MOE"),
    ],
)
def test_reads_the_quantization_from_a_name(name: str, quantization: str | None) -> None:
    assert quantization_of(name) == quantization


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        (["Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q8_0"], "Q4_K_M"),
        (["Q2_K", "Q4_0", "Q5_K_M"], "Q4_0"),
        (["Q2_K", "Q8_0", "F16"], "Q8_0"),
        (["IQ2_XS", "F32", "F16"], "F16"),
        (["IQ2_XS", "IQ4_XS", "F16"], "IQ4_XS"),
        (["IQ2_XS", "Q2_K", "Q3_K_M"], "Q3_K_M"),
        (["Q5_K_L", "Q6_K_L", "Q8_0"], "Q5_K_L"),
        (["Q8_0", "Q4_K_L"], "Q4_K_L"),
        (["BF16", "MXFP4_MOE"], "MXFP4_MOE"),
    ],
)
def test_prefers_a_sensible_quantization(offered: list[str], taken: str) -> None:
    assert choose_files([f"m-{kind}.gguf" for kind in offered], REPO) == [f"m-{taken}.gguf"]


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [("Q8_0", "m-q8_0.gguf"), ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"), ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf")],
)
def test_a_requested_quantization_is_chosen(wanted: str, taken: str) -> None:
    names = ["config.json", "model.safetensors", "m-q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf"]
    assert choose_files(names, REPO, quantization=wanted) == [taken]


def test_the_beginning_of_a_quantization_is_enough() -> None:
    names = ["m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-Q40.gguf"]
    assert choose_files(names, REPO, quantization="Q4") == ["m-Q4_K_M.gguf"]
    assert choose_files(names, REPO, quantization="Q8") == ["m-Q8_0.gguf"]
    with pytest.raises(HeadraceError, match="Q6"):
        choose_files(names, REPO, quantization="Q6")


def test_files_of_a_requested_folder_are_chosen() -> None:
    parts = ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]
    plain = ["4bit/config.json", "4bit/model.safetensors", "4bit/tokenizer.json"]
    names = [*parts, *plain, "m-Q4_K_M.gguf", "README.md"]
    assert choose_files(names, REPO, "BF16") == parts
    assert choose_files(names, REPO, "4bit") == plain
    assert choose_files(["a/m-Q8_0.gguf", "a/m-Q4_0.gguf", "m-Q8_0.gguf"], REPO, "a", "Q8_0") == ["a/m-Q8_0.gguf"]
    with pytest.raises(HeadraceError, match="8bit"):
        choose_files(names, REPO, "8bit")


def test_a_repository_with_models_in_folders_alone_names_them() -> None:
    model = ["config.json", "model.safetensors"]
    names = [f"{folder}/{name}" for folder in ("BF16", "4bit", "a/b") for name in model]
    others = ["README.md", "vae/config.json", "vae/diffusion.safetensors", "pytorch_model.bin"]
    with pytest.raises(HeadraceError, match="in folders alone") as caught:
        choose_files([*names, *others], REPO)
    assert caught.value.hint == "pass 'org/name/4bit' or 'org/name/BF16' or 'org/name/a/b'"
    assert choose_files([*names, *others], REPO, "BF16") == ["BF16/config.json", "BF16/model.safetensors"]
    with pytest.raises(HeadraceError, match="org/name/a has weights that headrace reads in folders") as caught:
        choose_files([*names, *others], REPO, "a")
    assert caught.value.hint == "pass 'org/name/a/b'"
    with pytest.raises(HeadraceError, match="no weights that headrace reads"):  # parts of a pipeline of images
        choose_files(["model_index.json", *(f"text_encoder/{name}" for name in model)], REPO)


@pytest.mark.parametrize("file", ["modeling.py", "model.bin", "model.safetensors", "sub/evil.py"])
def test_a_requested_file_is_a_gguf(file: str) -> None:
    names = ["m-Q8_0.gguf", "modeling.py", "model.bin", "model.safetensors", "sub/evil.py"]
    with pytest.raises(HeadraceError, match=r"neither a \.gguf file nor a folder") as caught:
        choose_files(names, REPO, file)
    assert caught.value.hint == "it has 'Q8_0'"


def test_a_quantization_that_is_not_there_lists_the_others() -> None:
    with pytest.raises(HeadraceError, match="Q6_K") as caught:
        choose_files(["m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf"], REPO, quantization="Q6_K")
    assert caught.value.hint == "it has 'Q4_K_M, Q8_0'"
    with pytest.raises(HeadraceError, match="Q6_K"):
        choose_files(["model.safetensors"], REPO, quantization="Q6_K")


def test_a_single_gguf_of_no_stated_kind_is_taken() -> None:
    assert choose_files(["model.gguf", "README.md"], REPO) == ["model.gguf"]


def test_safetensors_come_before_gguf_and_only_from_the_root() -> None:
    names = [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "m-Q4_K_M.gguf",
        "model.safetensors.index.json", "merges.txt", "tokenizer.model", "consolidated.safetensors",
        "original/model.safetensors", "setup.py", "training_args.bin", ".gitattributes",
        "additional_chat_templates/tool_use.jinja", "additional_chat_templates/a/b.jinja",
    ]  # fmt: skip
    assert choose_files(names, REPO) == [
        "additional_chat_templates/tool_use.jinja", "config.json", "merges.txt",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.model",
    ]  # fmt: skip


def test_a_variant_is_fetched_only_where_there_is_no_other() -> None:
    assert choose_files(["config.json", "model.fp16.safetensors", "model.safetensors"], REPO) == [
        "config.json", "model.safetensors"
    ]  # fmt: skip
    variants = ["model.bf16-00001-of-00002.safetensors", "model.bf16-00002-of-00002.safetensors"]
    assert choose_files(["config.json", *variants, "model-00001-of-00001.safetensors"], REPO) == [
        "config.json", "model-00001-of-00001.safetensors"
    ]  # fmt: skip
    assert choose_files(["config.json", "model.fp16.safetensors"], REPO) == ["config.json", "model.fp16.safetensors"]


_part = st.sampled_from(["model", "config", "m-Q4_0", "evil", "a/b", "..", "mmproj-F16", "x-00001-of-00003"])
_suffix = st.sampled_from([".safetensors", ".json", ".gguf", ".py", ".bin", ".pt", ".pkl", ".PY", ".jinja", ""])


@given(st.lists(st.builds(str.__add__, _part, _suffix), max_size=10))
def test_chosen_files_are_weights_and_settings_of_the_repository(names: list[str]) -> None:
    try:
        chosen = choose_files(names, REPO)
    except HeadraceError:
        return
    assert chosen
    assert set(chosen) <= set(names)
    assert all(name.endswith((".safetensors", ".json", ".gguf", ".jinja")) for name in chosen)
    assert sum(name.endswith(".gguf") for name in chosen) in {0, len(chosen)}

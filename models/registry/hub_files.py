"""Selection of the files to download from a hub repository, by name only.

A safetensors repository gives weights, configs, tokenizer and templates; a GGUF repository gives one file, or all parts
of a split one. Code (*.py) and pickles are never selected. `fetch_hub` asks for the names and downloads the files.

Guard: tests/models/registry/test_hub_files.py.
"""

import re
from collections.abc import Iterable

from headrace.models.checkpoint.safetensors import PICKLE_SUFFIXES, weight_files
from headrace.models.checkpoint.split_files import first_parts, is_gguf, part_names, whole_name
from headrace.runtime.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

# Config, tokenizer, chat template, merges, and tokenizers in other formats.
_SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NAMED_TEMPLATE = re.compile(r"additional_chat_templates/[^/]+\.jinja")  # additional_chat_templates/tool_use.jinja
# The format in a file's name: `Q4_K_M` of qwen3-4b-q4_k_m.gguf and of model.Q4_K_M-00001-of-00002.gguf.
# No underscore may follow: Q4_0_4_4 is another format than Q4_0, and this pattern has no name for it.
_QUANTIZATION = re.compile(
    r"(?:^|[-._])(q\d_[01]|q\d_k(?:_(?:[sml]|xl))?|iq4_nl|iq\d_(?:xxs|xs|[sm])|tq[12]_0|mxfp4(?:_moe)?|bf16|f16|fp16|f32)(?=[-.]|$)",
    re.IGNORECASE,
)
_SHOWN_FOLDERS = 4
# By preference: the usual compromise between size and quality, its neighbours, larger files, and last the lossy ones.
_PREFERRED = (
    "Q4_K_M", "Q4_K_L", "Q4_K_XL", "Q4_K_S", "Q4_K", "MXFP4", "MXFP4_MOE", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS",
    "Q5_K_M", "Q5_K_L", "Q5_K_XL", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q8_0", "Q8_K_XL",
    "BF16", "F16", "FP16", "F32", "Q3_K_XL", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q3_K", "Q2_K", "Q2_K_L", "Q2_K_XL",
    "Q2_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "TQ1_0", "IQ1_M",
    "IQ1_S",
)  # fmt: skip


def choose_files(
    names: Iterable[str], repo: str, file: str | None = None, quantization: str | None = None
) -> list[str]:
    """Return the files to download from `repo`; for a GGUF repository one, or the parts of one, in order.

    names: of all files there.
    repo: its id, for errors.
    file: the one GGUF to download, or the folder of the model.
    quantization: that of the GGUF to download, in capitals, or the beginning of its name; with `file`, of one there.

    Raises ModelNotFoundError, CheckpointError or UnsupportedModelError.
    """
    names = sorted(names)

    # A file or a folder that was asked for, or a quantization
    if file is not None:
        below = [name.removeprefix(f"{file}/") for name in names if name.startswith(f"{file}/")]
        if below:
            return [f"{file}/{name}" for name in choose_files(below, f"{repo}/{file}", quantization=quantization)]
        if file not in names:
            raise ModelNotFoundError(f"{repo} has no file or folder {file!a}", _offered(names))
        if not is_gguf(file):
            raise CheckpointError(f"{repo}: {file!a} is neither a .gguf file nor a folder", _offered(names))
        return _all_parts(file, names, repo)
    if quantization is not None:
        return _all_parts(choose_gguf(names, repo, quantization), names, repo)

    # Else the checkpoint in the repository's root, or one of its GGUFs
    root = [name for name in names if "/" not in name]
    weights = weight_files(root)
    if weights and "config.json" in root:
        templates = [name for name in names if _NAMED_TEMPLATE.fullmatch(name)]
        return templates + [name for name in root if name in weights or name.endswith(_SIDE_FILES)]
    if any(map(is_gguf, names)):
        return _all_parts(choose_gguf(names, repo), names, repo)
    if "model_index.json" not in names and (folders := _model_folders(names)):  # such a folder is a part of a pipeline
        shown = " or ".join(ascii(f"{repo}/{folder}") for folder in folders[:_SHOWN_FOLDERS])
        raise CheckpointError(f"{repo} has weights that headrace reads in folders alone", f"pass {shown:.300}")
    if any(name.endswith(PICKLE_SUFFIXES) for name in names):
        raise CheckpointError(
            f"{repo} has its weights as pickles only, which can run code when opened; they are refused",
            "look for a safetensors or GGUF version of the model",
        )
    raise CheckpointError(f"{repo} has no weights that headrace reads (model*.safetensors or .gguf)")


def _model_folders(names: list[str]) -> list[str]:
    """Return the folders that have a config.json and weights."""
    files: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        files.setdefault(folder, []).append(file)
    return [folder for folder, inside in files.items() if folder and "config.json" in inside and weight_files(inside)]


def choose_gguf(names: list[str], repo: str, quantization: str | None = None) -> str:
    """Return the GGUF of this quantization among the files of `repo`, or the most sensible one; a set's first part.

    quantization: in capitals, or the beginning of its name. Raises ModelNotFoundError and UnsupportedModelError.
    """
    return _most_sensible(names, repo) if quantization is None else _of_quantization(names, repo, quantization)


def quantization_of(file: str) -> str | None:
    """Return the quantization in a GGUF's file name, in capitals, or None."""
    matches = _QUANTIZATION.findall(_stem(file))
    return matches[-1].upper() if matches else None


def _stem(file: str) -> str:
    """Return a GGUF's file name without its folder, the number of its part and `.gguf`."""
    return whole_name(file.rpartition("/")[2])[: -len(".gguf")]


def _of_quantization(names: list[str], repo: str, wanted: str) -> str:
    """Return the GGUF of this quantization; also if `wanted` is a longer end of its name, such as UD-Q4_K_XL."""
    ggufs = [name for name in names if is_gguf(name)]
    files = [name for name in ggufs if quantization_of(name) == wanted]
    # Without the pattern: `UD-Q4_K_XL`, whose quantization is Q4_K_XL, and formats that the pattern has no name for.
    ends = (f"-{wanted}", f".{wanted}", f"_{wanted}")
    files = files or [name for name in ggufs if f"-{_stem(name).upper()}".endswith(ends)]
    if files:
        return next((name for name in files if part_names(name) == [name]), files[0])
    beginning = [name for name in ggufs if (quantization_of(name) or "").startswith(f"{wanted}_")]
    if beginning:  # `Q4` asks for any of Q4_0, Q4_K_M and the like: the first in _PREFERRED
        return _most_sensible(beginning, repo)
    raise ModelNotFoundError(f"{repo} has no .gguf file in {wanted}", _offered(names))


def _all_parts(file: str, names: list[str], repo: str) -> list[str]:
    """Return the names of a file's set. Raises CheckpointError if the repository lacks one of them."""
    parts = part_names(file)
    if missing := [name for name in parts if name not in names]:
        raise CheckpointError(f"{repo} lacks {missing[0]!a}, one of the {len(parts)} parts of a GGUF")
    return parts


def _offered(names: list[str]) -> str | None:
    """Return a hint with the quantizations or .gguf files of a repository."""
    kinds = sorted({quantization_of(name) or name for name in names if is_gguf(name)})
    return f"it has {', '.join(kinds)[:200]!a}" if kinds else "it has no .gguf files: leave that part out"


def _most_sensible(names: list[str], repo: str) -> str:
    """Return the GGUF in the format that comes first in _PREFERRED; the only one in any format."""
    ggufs = [name for name in names if is_gguf(name)]
    whole = sorted(first_parts(ggufs), key=lambda name: len(part_names(name)))  # whole files before split ones
    for wanted in _PREFERRED:
        for name in whole:
            if quantization_of(name) == wanted:
                return name
    if len(whole) == 1:
        return whole[0]
    kinds = sorted({quantization_of(name) or name for name in whole})
    raise UnsupportedModelError(f"{repo} has no quantization that headrace reads: {', '.join(kinds)[:200]!a}")

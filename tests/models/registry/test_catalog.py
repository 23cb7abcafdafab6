"""The catalog file: every row complete, every number consistent with its shape."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from headrace.models.registry.catalog import CatalogEntry, Wheel, find, load_catalog, ranked
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.resolve import DEFAULT_MODEL
from headrace.models.registry.source import CatalogName, parse_source
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.errors import ModelNotFoundError
from tests.support.catalog_config import FILE, reduced

ROOT = Path(__file__).parents[3]
ENTRIES = list(load_catalog().values())
LICENCES = {
    "Apache-2.0", "MIT", "Modified MIT", "Gemma", "Llama 3.1 Community", "Llama 3.2 Community", "LFM Open", "DeepSeek",
    "MiniMax Community", "NVIDIA Open Model",
}  # fmt: skip
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def test_the_default_model_is_that_of_the_catalog_file() -> None:
    with (ASSETS / "catalog.toml").open("rb") as file:
        assert tomllib.load(file)["default"] == DEFAULT_MODEL
    assert isinstance(find(DEFAULT_MODEL).source, Wheel)


def test_default_comes_first_then_by_download_size() -> None:
    assert ENTRIES[0].name == DEFAULT_MODEL
    sizes = [entry.download_bytes for entry in ENTRIES[1:]]
    assert sizes == sorted(sizes)


@each_entry
def test_catalog_names_and_repositories_are_told_apart(entry: CatalogEntry) -> None:
    assert parse_source(entry.name) == CatalogName(entry.name)
    if isinstance(entry.source, HubId):
        assert parse_source(entry.source.repo) == HubId(entry.source.repo)


@each_entry
def test_catalog_entries_have_all_facts(entry: CatalogEntry) -> None:
    assert entry.title
    assert entry.checked
    assert entry.licence in LICENCES
    assert entry.use in {"general", "code"}
    assert re.fullmatch(r"202[4-9]-(0[1-9]|1[0-2])", entry.released)
    assert 8192 <= entry.context <= 1048576
    if isinstance(entry.source, HubId):
        gguf = entry.source.file is not None
        assert gguf == entry.quantization.startswith("Q")
        assert entry.source.file is None or entry.source.file.endswith(".gguf")
    else:
        assert re.fullmatch(r"[0-9a-f]{64}", entry.source.sha256)
        assert re.fullmatch(r"[0-9a-f]{64}", entry.source.member_sha256)
        assert entry.source.bytes == entry.download_bytes


def test_every_model_has_a_config() -> None:
    assert json.loads(FILE.read_bytes()).keys() == {entry.name for entry in ENTRIES}


@pytest.mark.sampled
@each_entry
def test_a_config_has_no_entry_without_a_figure(entry: CatalogEntry) -> None:
    assert reduced(entry.config) == entry.config


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("lfm2.5-8b-a1b", 8.47e9), ("nemotron-3-nano-30b-a3b", 31.6e9), ("qwen3-coder-next", 79.7e9),
        ("mistral-small-4-119b", 119e9), ("qwen3.5-122b-a10b", 122e9), ("dots.llm1", 142e9), ("minimax-m3", 428e9),
        ("deepseek-v3.1", 671e9), ("deepseek-v3.2", 671e9), ("glm-5", 744e9), ("glm-5.2", 744e9), ("kimi-k2", 1.03e12),
    ],
)  # fmt: skip
def test_parameters_are_those_published(name: str, parameters: float) -> None:
    assert find(name).parameters == pytest.approx(parameters, rel=0.006)


@each_entry
def test_titles_state_the_numbers_of_weights(entry: CatalogEntry) -> None:
    stated = re.search(r"([0-9.]+)([MBT])(?:-A([0-9.]+)B)?", entry.title)
    if stated is None:  # GLM-4.7 Flash says its own, others none
        return
    # Qwen 2.5 and Gemma 2 leave the embedding table out, Gemma 4 E2B and E4B the tables of its layers.
    total = float(stated[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[stated[2]]
    assert 0.9 * total < entry.parameters < (2.4 if entry.name.startswith("gemma") else 1.25) * total
    if stated[3]:
        assert 0.85 * float(stated[3]) < entry.active_parameters / 1e9 < 1.75 * float(stated[3])


@each_entry
def test_sizes_of_downloads_follow_from_the_configs(entry: CatalogEntry) -> None:
    """A wrong layer count, width or vocabulary shows up as weights that do not fit the published size."""
    if entry.quantization.startswith("Q"):  # a GGUF, whose blocks are larger in memory
        bits = {"Q4_1": 5, "Q8_0": 8.5, "Q4_K_M": 4.9}[entry.quantization]
        assert entry.download_bytes == pytest.approx(entry.parameters * bits / 8, rel=0.11)
        return
    tokenizer_and_rounding = 45e6 + 0.01 * entry.weight_bytes
    beside = entry.download_bytes - entry.weight_bytes - entry.unread_bytes
    assert -0.01 * entry.weight_bytes <= beside < tokenizer_and_rounding


@pytest.mark.parametrize(
    ("name", "weights"),
    [  # of one pass, as the models' cards state them
        ("qwen3.5-2b", 1.9e9), ("qwen3.5-4b", 4.2e9), ("gemma-4-e2b", 2.3e9), ("gemma-4-e4b", 4.6e9),
        ("gpt-oss-20b", 3.6e9), ("gpt-oss-120b", 5.1e9), ("gemma-4-26b-a4b", 3.8e9), ("qwen3.6-35b-a3b", 3e9),
        ("nemotron-3-nano-30b-a3b", 3.2e9), ("lfm2.5-1.2b", 1.17e9), ("kimi-k2.5", 32e9), ("deepseek-v3.2", 37e9),
        ("glm-5", 40e9), ("glm-5.2", 40e9),
    ],
)  # fmt: skip
def test_a_token_reads_the_published_count_of_weights(name: str, weights: float) -> None:
    assert find(name).active_parameters == pytest.approx(weights, rel=0.03)


def test_vision_towers_have_plausible_sizes() -> None:
    """Half precision of 0.33 to 0.9 billion weights, audio included; Muse Glimmer's 50 layers have 1.9 billion."""
    beside = {entry.name: entry.unread_bytes for entry in ENTRIES if entry.unread_bytes}
    assert 2 * 1.8e9 < beside.pop("muse-glimmer-30b") < 2 * 2e9
    assert beside.pop("gemma-3-1b") == pytest.approx(262144 * 1152 * 4.5 / 8, rel=0.01)  # a table stored twice
    assert all(0.6e9 < size < 1.8e9 for size in beside.values())


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("smollm2-135m", 2 * 2 * 30 * 3 * 64), ("llama-3.1-8b", 128 << 10), ("qwen3-8b", 144 << 10),
        ("gpt-oss-20b", 2 * 2 * 24 * 8 * 64), ("gemma-4-12b", 2 * 2 * (40 * 8 * 256 + 8 * 1 * 512)),
        ("qwen3.5-122b-a10b", 24 << 10), ("nemotron-3-nano-30b-a3b", 6 << 10), ("lfm2.5-8b-a1b", 12 << 10),
        ("mellum-2-12b-a2.5b", 56 << 10), ("step-3.5-flash", 2 * 2 * 45 * 8 * 128), ("glm-4.5-air", 184 << 10),
        ("kimi-k2", 2 * 2 * 61 * 576), ("deepseek-v3.2", 2 * 61 * (576 + 128)), ("muse-glimmer-30b", 52 << 10),
    ],
)  # fmt: skip
def test_kv_bytes_of_a_token_are_those_by_hand(name: str, kv_bytes: int) -> None:
    assert find(name).step_shape.cost.kv_bytes_per_token == kv_bytes


def test_experts_of_gpt_oss_have_four_bits_and_all_else_eight() -> None:
    matrices = find("gpt-oss-20b").step_shape.matrices
    bits = {matrix.name: 8 * matrix.nbytes / matrix.weights for matrix in matrices}
    assert bits.pop("expert gate_proj") == bits.pop("expert up_proj") == pytest.approx(4.25, rel=0.01)
    assert bits.pop("expert down_proj") == pytest.approx(4.25, rel=0.01)
    assert all(8.5 <= size < 8.6 for size in bits.values())


def test_a_gguf_in_q4_k_m_has_six_bits_in_half_of_its_down_projections() -> None:
    matrices = [matrix for matrix in find("smollm2-1.7b").step_shape.matrices if matrix.name == "down_proj"]
    counts = {round(8 * matrix.nbytes / matrix.weights): matrix.count for matrix in matrices}
    assert counts == {6: 12, 10: 12}  # with a scale and a bias in float32 for 32 or 16 weights


def test_a_newer_model_ranks_before_an_older_one_of_its_size() -> None:
    chat = [entry.name for entry in ranked("chat")]
    assert chat.index("qwen3.8-27b") < chat.index("qwen3.6-27b") < chat.index("qwen2.5-32b")
    assert chat.index("qwen3.5-9b") < chat.index("qwen3.5-4b") < chat.index("qwen3.5-2b")
    halves = find("qwen3.8-27b").score / find("qwen3.6-27b").score
    assert halves == pytest.approx(2 ** (4 / 6))


def test_all_models_have_a_rank_and_those_for_code_alone_none_for_chat() -> None:
    names = {entry.name for entry in ENTRIES}
    assert {entry.name for entry in ranked("code")} == names
    assert names - {entry.name for entry in ranked("chat")} == {
        entry.name for entry in ENTRIES if entry.use == "code"
    }  # fmt: skip
    order = [entry.name for entry in ranked("code")]
    assert order.index("qwen3-coder-30b-a3b") < order.index("qwen3-30b-a3b")


def test_the_page_has_what_its_script_renders() -> None:
    render = runpy.run_path(str(ROOT / "docs/catalog/render.py"))
    page = (ROOT / "docs/catalog.md").read_text(encoding="utf-8")
    assert render["rendered"](page) == page


def test_kv_bytes_of_layers_of_different_sizes_are_summed() -> None:
    gemma = find("gemma-4-26b-a4b").step_shape.cost
    assert gemma.kv_bytes_per_token == 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)
    assert gemma.kv_bytes(100_000) - gemma.kv_bytes(90_000) == 10_000 * 2 * 2 * 5 * 2 * 512
    hybrid = find("qwen3.5-4b")
    assert hybrid.memory_bytes(8192) - hybrid.memory_bytes(4096) == 4096 * 2 * 2 * 8 * 4 * 256


@pytest.mark.parametrize(
    ("name", "packed"),
    [  # element counts the hub shows for these builds, read from their pages
        ("qwen2.5-0.5b", 77.3e6),
        ("llama-3.2-1b", 193e6),
        ("qwen2.5-1.5b", 241e6),
        ("gemma-2-2b", 409e6),
        ("llama-3.2-3b", 502e6),
        ("qwen2.5-7b", 1.19e9),
        ("llama-3.1-8b", 1.25e9),
        ("gemma-2-9b", 1.44e9),
        ("mistral-nemo-12b", 1.91e9),
        ("qwen2.5-14b", 2.31e9),
        ("mistral-small-24b", 3.68e9),
        ("qwen2.5-32b", 5.12e9),
    ],
)
def test_parameters_match_the_published_element_count(name: str, packed: float) -> None:
    # 8 four-bit numbers to an element, plus scale and bias per group of 64.
    assert find(name).parameters * (1 / 8 + 2 / 64) == pytest.approx(packed, rel=0.005)


def test_predicted_memory_grows_with_context_up_to_the_models_limit() -> None:
    entry = find("smollm2-135m")
    assert entry.memory_bytes(2048) - entry.memory_bytes(1024) == 1024 * 23040
    assert entry.memory_bytes(1 << 20) == entry.memory_bytes(entry.context)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find("qwen3-4bb")
    assert caught.value.hint is not None
    assert "qwen3-4b" in caught.value.hint


def test_a_name_is_suggested_once() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find("smollm2-135", lambda: ["smollm2-135m"])
    assert str(caught.value.hint).count("smollm2-135m") == 1


def test_an_installed_name_is_suggested_before_one_that_is_as_near() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find("smolm", lambda: ["smollm2-135m"])
    assert str(caught.value.hint).startswith("did you mean smollm2-135m or smollm2-360m")


@pytest.mark.parametrize("name", ["gpt2", "GPT2", "distilgpt2", "gpt2-xl"])
def test_an_old_name_of_the_hub_is_given_with_its_address(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find(name)
    assert caught.value.hint == f"the hub's is hf.co/{name.lower()}"
    assert parse_source(f"hf.co/{name.lower()}") == HubId(name.lower())


@pytest.mark.parametrize(("name", "family"), [("qwn3-4b", "qwen3-4b"), ("lama-3", "llama"), ("mamba-2.8b", None)])
def test_suggestions_are_of_the_family(name: str, family: str | None) -> None:
    with pytest.raises(ModelNotFoundError) as missing:
        find(name)
    assert missing.value.hint is not None
    assert (
        missing.value.hint.startswith(f"did you mean {family}") if family else "did you mean" not in missing.value.hint
    )


def test_other_names_are_looked_up_for_unknown_names_alone() -> None:
    assert find("smollm2-135m", lambda: pytest.fail("looked for other names")).name == "smollm2-135m"

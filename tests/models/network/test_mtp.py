"""Multi-token prediction heads against NumPy, and in the engine: draft tokens, K/V in step, unchanged answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from headrace.models.checkpoint.quantization import Quantization
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import shape_to_run
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.loading.keep_quantized import keep_quantized
from headrace.models.loading.load import sized_network
from headrace.models.mlx_lm.network import MlxLmNetwork, MtpNetwork, add_head
from headrace.models.network.head_decoder import HeadDecoder, add_own_head
from headrace.models.network.make_decoder import make_decoder
from headrace.models.network.mtp import head_tensors
from headrace.models.network.parameters import Parameters
from headrace.models.registry.resolve import resolve
from headrace.runtime.engine import draft_networks
from headrace.runtime.engine.draft_networks import MAX_WAITING, MtpDraft
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.ops import Ops, native, reference
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.speculation.acceptance import MTP_PRIOR, Acceptance
from headrace.runtime.speculation.pass_costs import PassCostStore
from tests.runtime.speculation.test_dry_run import Recorded
from tests.support.mtp_models import CONFIGS, VOCAB, WIDTH, WITH_HEADS, head_logits, write_model
from tests.support.speculating import run, run_corrected, speculating

pytestmark = pytest.mark.peer
KINDS = sorted(CONFIGS)
# Those that our decoder runs, with recurrent state on the kernels alone.
OWN = [
    *[(kind, None) for kind in WITH_HEADS if not kind.startswith("qwen3")],
    *[(kind, native) for kind in WITH_HEADS if native.status().available],
]
BACKENDS: list[Ops | None] = [None, *([native] if native.status().available else [])]
SAYS = 24
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def load(directory: Path, kernels: Ops | None = None, *, own: bool = False) -> Any:
    """Return the network of a checkpoint with its head: ours, or mlx-lm's class."""
    checkpoint = open_checkpoint(directory)
    if own:
        config = own_decoder(checkpoint)
        ops = kernels or reference
        assert config is not None
        network: Any = make_decoder(config, Parameters(checkpoint, ops, mx.float32))
    else:
        network = MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu, kernels=kernels).use_kernels()
    tensors = head_tensors(checkpoint)
    if tensors is None:
        return network
    return add_own_head(network, tensors) if own else add_head(network, tensors, mx.DeviceType.cpu, kernels)


def logits_of(network: Any, tokens: Sequence[int]) -> tuple[Any, Any]:
    """Return the output of the layers and the last logits for a prompt."""
    kv = network.kv_backend(KVOptions(256))
    x = network.layers(network.embed(mx.array([list(tokens)])), one_pass(kv, kv.acquire(()), len(tokens)))
    return np.array(x[0]), np.array(network.logits(x)[0])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "kernels", "own"), [*[(k, o, False) for k in KINDS for o in BACKENDS], *[(k, o, True) for k, o in OWN]]
)
def test_a_prediction_head_equals_its_definition(tmp_path: Path, kind: str, kernels: Ops | None, own: bool) -> None:
    tensors = write_model(tmp_path, kind)
    random = np.random.default_rng(3)
    network = load(tmp_path, kernels, own=own)
    head = network.draft_head
    tokens = [5, 9, 2, 7, 7, 1, 30, 12]
    assert isinstance(head, HeadDecoder if own else MtpNetwork)
    tolerance = 2e-3 if own and kernels else 2e-4  # K/V in half precision
    hidden = random.normal(size=(len(tokens), WIDTH))
    kv = head.kv_backend(KVOptions(64))
    cache = kv.acquire(())
    given = mx.array(hidden[None].astype(np.float32))
    rows = []
    for start, end in ((0, 5), (5, 6), (6, 8)):
        kv_pass = one_pass(kv, cache, end - start)
        out = head.hidden(mx.array([tokens[start:end]]), given[:, start:end], kv_pass)
        kv_pass.advance()
        rows += list(np.array(out[0]))
        expected_hidden, expected = head_logits(kind, tensors, tokens[:end], hidden[:end])
        np.testing.assert_allclose(rows, expected_hidden, atol=tolerance)
        np.testing.assert_allclose(np.array(head.logits(out)[0]), expected[-1], atol=3 * tolerance)


def test_logits_are_capped_with_a_head_too(tmp_path: Path) -> None:
    write_model(tmp_path, OWN[0][0])
    network = load(tmp_path, own=True)
    network.config = replace(network.config, logit_softcap=0.5)
    _, logits = logits_of(network, [5, 9, 2])
    network.draft_head = None
    np.testing.assert_allclose(logits, logits_of(network, [5, 9, 2])[1], atol=1e-5)
    assert np.abs(logits).max() <= 0.5


def test_a_head_of_a_network_with_layer_norms_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, OWN[0][0])
    network = load(tmp_path, own=True)
    network.config = replace(network.config, family=replace(network.config.family, norm="layer"))
    with pytest.raises(UnsupportedModelError, match="need RMSNorms"):
        network.draft_head.of(network, hidden_first=False)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", sorted({kind for kind, _ in OWN}))
def test_a_quantized_copy_keeps_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    write_model(tmp_path / "plain", kind)
    kept = keep_quantized(resolve(str(tmp_path / "plain")), Quantization(8, 32))
    stored: Any = mx.load(str(kept.path / "model-00000.safetensors"))
    dense = {
        name: mx.dequantize(array, stored[f"{module}.scales"], stored[f"{module}.biases"], group_size=32, bits=8)
        if f"{(module := name.removesuffix('.weight'))}.scales" in stored
        else array
        for name, array in stored.items()
    }
    tensors = {name: np.array(array).astype(np.float64) for name, array in dense.items()}
    assert not any("shared_head.head" in name for name in tensors)
    head = load(kept.path, OWN[-1][1], own=True).draft_head
    tokens = [5, 9, 2, 7, 7, 1]
    hidden = np.random.default_rng(3).normal(size=(len(tokens), WIDTH))
    kv = head.kv_backend(KVOptions(64))
    kv_pass = one_pass(kv, kv.acquire(()), len(tokens))
    logits = head.logits(head.hidden(mx.array([tokens]), mx.array(hidden[None].astype(np.float32)), kv_pass))
    _, expected = head_logits(kind, tensors, tokens, hidden)
    np.testing.assert_allclose(np.array(logits[0]), expected[-1], atol=2e-2)
    assert np.array(logits[0]).argmax() == expected[-1].argmax()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_loaded_whichever_network_runs_the_model(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path, kind)
    checkpoint = open_checkpoint(tmp_path)
    config = own_decoder(checkpoint)
    sized = sized_network(checkpoint, config, shape_to_run(checkpoint, config), None, None)
    network = sized.make()
    assert network.draft_head is not None
    assert sized.weights > 0
    prompt = [3, 1, 4, 1, 5]
    tokens = [
        [token for event in Engine(network, context_limit=64).generate(Request(prompt, 12, speculate=choice))
         if isinstance(event, Step) for token in event.tokens]
        for choice in ("off", "auto")
    ]  # fmt: skip
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", WITH_HEADS)
def test_a_step_does_not_read_the_head_but_memory_has_it(tmp_path: Path, kind: str) -> None:
    shapes = []
    for has_head in (True, False):
        write_model(tmp_path / str(has_head), kind, head=has_head)
        shapes.append(shape_to_run(checkpoint := open_checkpoint(tmp_path / str(has_head)), own_decoder(checkpoint)))
    assert shapes[0].cost.weight_bytes == shapes[1].cost.weight_bytes
    head = head_tensors(open_checkpoint(tmp_path / "True"))
    assert head is not None
    assert shapes[0].resident_bytes == shapes[1].resident_bytes + head.nbytes


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_answers_as_without_its_head(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "with", kind)
    write_model(tmp_path / "without", kind, head=False)
    with_head = load(tmp_path / "with")
    without = load(tmp_path / "without")
    assert without.draft_head is None
    hidden, logits = logits_of(with_head, [3, 1, 4, 1, 5])
    assert hidden.shape == (5, WIDTH)
    np.testing.assert_allclose(logits, logits_of(without, [3, 1, 4, 1, 5])[1], atol=1e-5)


def expected_firsts(kind: str, network: Any, tensors: Any, whole: Sequence[int]) -> dict[int, int]:
    hidden, _ = logits_of(network, whole)
    _, logits = head_logits(kind, tensors, list(whole[1:]), hidden[:-1].astype(np.float64))
    return {known: int(logits[known - 2].argmax()) for known in range(2, len(whole))}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "kernels", "own"), [*[(k, None, False) for k in KINDS], *[(k, o, True) for k, o in OWN]]
)
def test_kv_of_the_head_follow_rejections_and_preemption(
    tmp_path: Path, kind: str, kernels: Ops | None, own: bool
) -> None:
    tensors = write_model(tmp_path, kind)
    network = load(tmp_path, kernels, own=own)
    prompts = [[11, 3, 5, 8, 60, 2, 9], [4, 4, 31, 1]]
    answers = [
        [token for event in Engine(network, context_limit=128).generate(Request(prompt, SAYS, speculate="off"))
         if isinstance(event, Step) for token in event.tokens]
        for prompt in prompts
    ]  # fmt: skip
    wholes = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    sequences, corrected, states = run_corrected(network, prompts, wholes, preempts=True)
    assert states.count("preempted")
    for whole, sequence, proposer in zip(wholes, sequences, corrected, strict=True):
        assert sequence.tokens == whole
        expected = expected_firsts(kind, network, tensors, whole)
        assert len(proposer.firsts) > SAYS // 4
        assert proposer.firsts == {known: expected[known] for known in proposer.firsts}


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_draft_tokens_of_a_head_leave_output_unchanged(tmp_path: Path, sampling: SamplingParams) -> None:
    write_model(tmp_path, "glm4_moe")
    network = load(tmp_path, BACKENDS[-1])
    found = {
        choice: [
            (event.tokens, event.record.source)
            for event in run(speculating(network), [Request([1, 2, 3], SAYS, sampling, speculate=choice)])[0]
            if isinstance(event, Step)
        ]
        for choice in ("off", "mtp", "auto")
    }
    tokens = {choice: [token for step, _ in steps for token in step] for choice, steps in found.items()}
    assert tokens["mtp"] == tokens["auto"] == tokens["off"]
    assert {source for _, source in found["mtp"]} >= {"mtp"}


def test_rejected_draft_tokens_of_a_head_cost_few_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads are never right: after few tries all passes are queued ahead again."""
    monkeypatch.setattr(MtpDraft, "cost_s", 0.001)  # whatever the clock says
    write_model(tmp_path, "mimo")
    engine = Engine(load(tmp_path), context_limit=256)
    controller = engine._drafting.controller = Recorded()
    list(engine.generate(Request([1, 2, 3], 200, SAMPLED, speculate="mtp")))
    assert 0 < sum(0.05 * count for count in controller.drafts) < 2  # passes
    assert all(controller.ahead[60:])
    assert engine._drafting.acceptance.rates[0] < 0.5


@pytest.mark.skipif(not native.status().available, reason="only the native kernels have clocks")
def test_steps_with_draft_tokens_of_a_head_are_timed(tmp_path: Path) -> None:
    write_model(tmp_path, "glm4_moe")
    engine = speculating(load(tmp_path, native, own=True))
    engine.timer.every = 1
    events = run(engine, [Request([1, 2, 3], SAYS, speculate="mtp")])[0]
    records = [event.record for event in events if isinstance(event, Step) and event.record.source == "mtp"]
    assert len(records) > 1
    assert any(record.parts is not None and record.parts.weights_s > 0 for record in records)


def test_rates_of_a_head_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    write_model(tmp_path / "model", "mimo")
    network = load(tmp_path / "model")
    store = PassCostStore(network.cost)
    store.save({(1, 1, 0): (1.2, 3)}, [0.25, 0.125])
    engine = Engine(network, context_limit=64, pass_costs=store)
    assert engine._drafting.acceptance.rates[:3] == [0.25, 0.125, MTP_PRIOR[2]]
    assert store.load() == {(1, 1, 0): (1.2, 3)}


def test_a_model_without_a_head_refuses_to_draft_with_one(tmp_path: Path) -> None:
    write_model(tmp_path, "mimo", head=False)
    with pytest.raises(UsageError, match="no multi-token prediction head"):
        Engine(load(tmp_path), context_limit=64).submit(Request([1], speculate="mtp"))


def test_hidden_states_that_wait_for_a_draft_are_bounded(tmp_path: Path) -> None:
    write_model(tmp_path, "mimo")
    head = load(tmp_path).draft_head
    assert head is not None
    mtp = MtpDraft(head, 3 * MAX_WAITING, Acceptance(MTP_PRIOR), lambda: lambda logits: mx.argmax(logits, axis=-1))  # type: ignore[arg-type, return-value]
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 3 * MAX_WAITING)]
    for start in range(0, len(tokens) - 1, 512):
        mtp.take(start, mx.zeros((1, min(512, len(tokens) - 1 - start), WIDTH)))
    assert mtp._waiting.end - mtp._waiting.start <= MAX_WAITING
    mtp.update(tokens)
    proposals = [mtp.propose(2) for _ in range(MAX_WAITING // 256 + 1)]
    assert any(len(draft) == 2 for draft in proposals)


class HiddenStates:
    """A head, an output of 64 tokens, and the hidden states of its positions."""

    def __init__(self, head: Any) -> None:
        self.head = head
        self.tokens = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 64)]
        self.hidden = mx.random.normal((1, len(self.tokens), WIDTH))

    def draft(self, *spans: range) -> Sequence[int]:
        """Return a new proposer's draft after hidden states of these positions. It also proposes after the first."""
        mtp = MtpDraft(self.head, 128, Acceptance(MTP_PRIOR), lambda: lambda logits: mx.argmax(logits, axis=-1))  # type: ignore[arg-type, return-value]
        draft: Sequence[int] = ()
        for span in spans:
            mtp.take(span.start, self.hidden[:, span.start : span.stop])
            if span in (spans[0], spans[-1]):
                mtp.update(self.tokens[: span.stop + 1])
                draft = mtp.propose(8)
                assert len(draft) == 8
        return draft


@pytest.fixture
def hidden_states(tmp_path: Path) -> HiddenStates:
    write_model(tmp_path, "mimo")
    return HiddenStates(load(tmp_path).draft_head)


def test_a_head_starts_again_after_hidden_states_that_never_came(hidden_states: HiddenStates) -> None:
    """Those of a reused prefix."""
    draft = hidden_states.draft(range(8), range(20, 24))
    assert draft == hidden_states.draft(range(20, 24))
    assert draft != hidden_states.draft(range(8), range(8, 24))


def test_a_head_starts_again_after_hidden_states_that_were_dropped(
    hidden_states: HiddenStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = [range(start, start + 4) for start in range(0, 24, 4)]
    without_drop = hidden_states.draft(*spans)
    monkeypatch.setattr(draft_networks, "MAX_WAITING", 8)
    draft = hidden_states.draft(*spans)
    assert draft == hidden_states.draft(range(16, 24))
    assert draft != without_drop

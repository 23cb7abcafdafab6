"""Loading a model on several ranks: rank 0 tells the others what to load, and each reads its part.

`app.hosts.load` calls `load_ranked` on rank 0, `app.hosts.rank` `serve_rank` on the others. The record that rank 0
sends is written in the one and read in `_serve_model` and `_load_part`: a key added to one belongs in the other.

Guard: tests/models/network/test_ranks.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Unpack, cast

from msgspec.structs import replace

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.loading.load import (
    KVChoice,
    LoadedModel,
    LoadOptions,
    fitting_network,
    load_resolved,
    read_network,
)
from headrace.models.loading.rank_part import Rank, check_division
from headrace.models.network.activations import with_activations
from headrace.models.network.tensor_decoder import TensorDecoder
from headrace.models.registry.resolve import ResolvedModel
from headrace.runtime.errors import UsageError, expected
from headrace.runtime.machine import memory
from headrace.runtime.network import Network
from headrace.runtime.ops.kv_format import FORMATS, KVFormat
from headrace.runtime.ranks.follower import Follower, FollowerNetwork, follow
from headrace.runtime.ranks.group import Group
from headrace.runtime.ranks.head import LeaderHead
from headrace.runtime.ranks.leader import Leader, LeaderNetwork
from headrace.runtime.ranks.peer_connection import Record
from headrace.runtime.ranks.split import Split

ANSWER_S = 10.0  # that a follower gets to find the model
MOST_CONTEXTS = 1e6  # more than any machine holds: stands for no bound, since JSON has no infinity


def load_ranked(
    resolved: ResolvedModel,
    leader: Leader,
    split: Split,
    *,
    model: Record | None = None,
    backend: str = "ring",
    **options: Unpack[LoadOptions],
) -> LoadedModel:
    """Load this rank's part of a model, and have the followers of `leader` load theirs.

    model: passed to the followers' `find`. Raises what `load_resolved` raises, UsageError for models that cannot be
    divided so, and RankLostError with a follower's error. The context is the longest that fits on every rank.
    """
    # Refusals before the followers are told.
    if len(split.shares) != leader.size:
        raise UsageError(f"{len(split.shares)} shares for {leader.size} ranks")
    kv = options.get("kv")
    activations = options.get("activations", 16)
    if activations == 8 and split.kind == "tensor":
        raise UsageError("tensor parallel rounds activations to 16 bits", "--split pipeline rounds to 8")
    checkpoint = open_checkpoint(resolved.path)
    check_division(checkpoint, own_decoder(checkpoint), split)

    # The model and the options, as `_serve_model` and `_load_part` read them.
    leader.tell(
        {
            "model": model or {},
            "backend": backend,
            "kind": split.kind,
            "shares": split.shares,
            "context": options.get("context"),
            "kv": kv.name if isinstance(kv, KVFormat) else kv,
            "activations": 16 if activations == "auto" else activations,
            "force": options.get("force", False),
        }
    )
    leader.answers(ANSWER_S)  # each has found the model

    # All parts at the same time.
    leader.tell({"join": True})
    rank = Rank(Group.join(leader.address, backend, " or ".join(leader.names[1:])), split)
    loaded = load_resolved(resolved, rank=rank, **options)
    answers = leader.answers(None)

    # The context, and the sequences, that fit on every rank.
    network = loaded.network
    if isinstance(network, TensorDecoder) and network.draft_head is not None:
        network.draft_head = LeaderHead(network.draft_head, leader)
    limit = min([loaded.context_limit, *(answer["context"] for answer in answers)])
    fitting = min([_contexts(network, limit), *(answer["fitting"] for answer in answers)])
    kv_memory = int(max(1.0, fitting) * _kv_bytes(network, limit))
    ranked = LeaderNetwork(network, leader, kv_memory, staged=split.kind == "pipeline")
    return replace(loaded, network=ranked, context_limit=limit)


def serve_rank(follower: Follower, find: Callable[[Record], Path]) -> None:
    """Load and run this rank's part of one model after the other until rank 0 ends. Errors are rank 0's to report.

    find: returns the directory of rank 0's model here, or raises a HeadraceError.
    """
    try:
        record = follower.take()
        while record is not None:
            record = _serve_model(record, follower, find)
    except Exception as error:  # the leader tells the user of any
        named = expected(error)
        follower.link.send({"error": str(named)})
        raise named from error
    finally:
        follower.link.close()


def _serve_model(record: Record, follower: Follower, find: Callable[[Record], Path]) -> Record | None:
    """Load and run this rank's part of one model; return rank 0's next record, None at its end."""
    directory = find(record["model"])
    follower.link.send({"found": True})
    if follower.take() is None:  # all join at once, since joining holds up everything else
        return None
    rank = Rank(Group.join(follower.address, record["backend"]), Split(record["kind"], tuple(record["shares"])))
    network, context = _load_part(directory, rank, record)
    follower.link.send({"context": context, "fitting": _contexts(network, context)})
    return follow(network, follower)


def _contexts(network: Network | FollowerNetwork, limit: int) -> float:
    """Return the sequences of `limit` entries whose K/V fit beside the weights; at most MOST_CONTEXTS."""
    room = memory.budget()
    each = _kv_bytes(network, limit)
    if room is None or each == 0:
        return MOST_CONTEXTS
    return min(MOST_CONTEXTS, room.usable / each)


def _kv_bytes(network: Network | FollowerNetwork, limit: int) -> int:
    """Return the K/V bytes of a sequence of `limit` entries, with those of a prediction head."""
    nbytes = network.cost.kv_bytes(limit)
    if network.draft_head is not None:
        nbytes += network.draft_head.cost.kv_bytes(limit)
    return nbytes


def _load_part(directory: Path, rank: Rank, how: Record) -> tuple[FollowerNetwork, int]:
    """Return this rank's part of the model in `directory`, and the context that fits here. how: rank 0's options."""
    checkpoint = open_checkpoint(directory)
    kv: KVChoice = "auto"
    if how["kv"] != "auto":
        kv = next((kind for kind in FORMATS if kind.name == how["kv"]), None)
    config = own_decoder(checkpoint)
    fitted = fitting_network(checkpoint, config, kv, how["context"], rank, force=how["force"])
    network = with_activations(read_network(fitted.sized), how["activations"])
    return cast(FollowerNetwork, network), fitted.context

"""Tensor or pipeline parallel, and each rank's share: as asked for, or as predicted from the ranks' reports.

`start.py` chooses once all ranks have reported and links are measured. The prediction is that of `headrace predict
--hosts` (`app.predict.hosts`), with this machine's figures.

Guard: tests/app/hosts/test_start.py.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from headrace.app.hosts.facts import Facts
from headrace.app.hosts.hostfile import RING, Hosts
from headrace.app.hosts.probe import LinkSpeed
from headrace.app.predict.hosts import SPLITS, SplitKind, best, predict_hosts, split_layers, tensor_shares
from headrace.app.predict.links import NetworkLink, links
from headrace.app.predict.prediction import TargetMachine
from headrace.models.checkpoint.safetensors import Checkpoint, open_checkpoint
from headrace.models.cost.costs import shape_to_run
from headrace.models.cost.step_shape import StepShape
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.loading.rank_part import check_division
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.ops import native
from headrace.runtime.ranks.split import Split

CONTEXT = 4096  # tokens in the cache, for the prediction
_MLX_S = 30e-6  # that MLX's ring adds to a message, over loopback on two idle cores; several times that on busy ones
_UNKNOWN = 50e9  # bytes per second of a machine that has measured none


def chosen_split(
    asked: str, model: Path, hosts: Hosts, reports: Sequence[Facts], measured: Sequence[LinkSpeed]
) -> Split:
    """Return the split of a model.

    asked: tensor, pipeline or auto.
    model: its folder.
    hosts: the ranks.
    reports: of all ranks.
    measured: links to the others.
    """
    checkpoint = open_checkpoint(model)
    shape = shape_to_run(checkpoint)
    targets = targets_of(hosts, reports)

    # Each rank's layers, and its share of every layer. A rank without a layer would have no stage: it gets one.
    layers = [max(1, count) for count in split_layers(shape, targets, min(CONTEXT, shape.context_length - 1))]
    shares = tensor_shares(shape, targets)
    if shape.stock:  # mlx-lm's classes divide evenly
        shares = [1.0] * len(targets)

    splits = {"tensor": Split("tensor", tuple(shares)), "pipeline": Split("pipeline", tuple(map(float, layers)))}
    if asked != "auto":
        return splits[asked]
    possible = [way for way in SPLITS if _can_divide(checkpoint, splits[way])]
    return splits[predicted_way(shape, targets, link_between(hosts, measured), possible or SPLITS)]


def _can_divide(checkpoint: Checkpoint, split: Split) -> bool:
    try:
        check_division(checkpoint, own_decoder(checkpoint), split)
    except (UsageError, UnsupportedModelError):
        return False
    return True


def predicted_way(
    shape: StepShape, targets: Sequence[TargetMachine], link: NetworkLink, ways: Sequence[SplitKind]
) -> str:
    """Return the fastest of these ways, of those that fit."""
    context = min(CONTEXT, shape.context_length - 1)
    return best([predict_hosts(shape, targets, link, context, way=way) for way in ways]).way


def targets_of(hosts: Hosts, reports: Sequence[Facts]) -> list[TargetMachine]:
    """Return the machines as they report themselves; ranks of one machine share its bandwidth."""
    targets = []
    for host, report in zip(hosts.hosts, reports, strict=True):
        machine = report["machine"]
        here = hosts.local_ranks if host.local else 1
        bandwidth = (machine["bandwidth"] or _UNKNOWN) / here
        memory = machine["usable_memory"]
        apple = machine["backend"] == "metal"
        targets.append(TargetMachine(host.name, bandwidth, memory, apple, chip=machine["device"]))
    return targets


def link_between(hosts: Hosts, measured: Sequence[LinkSpeed]) -> NetworkLink:
    """Return the slowest link to another rank, as measured over TCP; over RDMA, as published."""
    known = links()
    if hosts.backend != RING:
        return known["tb5-rdma"]
    latency = max(link.latency_s for link in measured)
    if len(hosts.hosts) > 2 or not native.status().available:  # else a connection without MLX's threads
        latency += _MLX_S
    bandwidth = min(link.bytes_per_second for link in measured)
    return replace(known["tb5"], name="measured", title="measured", latency=latency, bandwidth=bandwidth, source="")

"""Prediction targets: named chips, or this machine as measured.

`targets_for` may measure for a second. `known_target` measures nothing, for lists that must not wait.

Guard: tests/app/predict/test_predict.py.
"""

from msgspec.structs import replace

from headrace.app.predict.chip_names import chip_targets, known_targets, usable_bytes
from headrace.app.predict.fit_store import best_fit
from headrace.app.predict.prediction import TargetMachine
from headrace.runtime.machine.bandwidth import known_peak
from headrace.runtime.machine.compute import cached_compute, measure_compute
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.machine.memory import budget
from headrace.runtime.machine.peaks import Peak, cached_peak


def targets_for(
    chips: tuple[str, ...], memory: int | None, *, others: bool = True, compute: bool = False
) -> list[TargetMachine]:
    """Return the named chips, or this machine, with the Apple chips of the table if `others`.

    memory: GB of all of them; None: what this machine has, and the largest sold of chips.
    compute: also measure this machine's FLOP/s, unless known.
    """
    if chips:
        return list(dict.fromkeys(target for chip in chips for target in chip_targets(chip, memory)))
    here = _this_machine(memory, compute=compute)
    if not others:
        return [here]
    return [here, *known_targets(memory)]


def known_target(host: Machine, usable: int | None) -> TargetMachine | None:
    """Return this machine without a measurement; None if its bandwidth is not known yet.

    usable: bytes available to a model; None if unknown.
    """
    return _target(host, cached_peak(host), usable)


def _target(host: Machine, peak: Peak | None, usable: int | None) -> TargetMachine | None:
    # GPUs of Apple are predicted with the vendor's bandwidth, as the chips of the table are.
    nominal = None
    if host.backend == "metal":
        nominal = host.nominal_bandwidth
    if nominal is not None:
        bandwidth = nominal
    elif peak is not None:
        bandwidth = peak.bytes_per_second
    else:
        return None
    return TargetMachine(
        name="this machine",
        bandwidth=bandwidth,
        memory=usable,
        apple=nominal is not None,
        fit=best_fit(host),
        measured=nominal is None,
        chip=host.device_name,
    )


def _this_machine(memory: int | None, *, compute: bool) -> TargetMachine:
    """Return this machine with its measured peak (see `known_peak`) and its step-cost fit."""
    host = machine()
    room = budget(host)
    peak = known_peak(host)
    target = _target(host, peak, room.usable if room else None)
    assert target is not None, "its bandwidth is measured"
    flops = cached_compute()
    if compute and not flops:
        flops = measure_compute()
    if memory:
        target = replace(target, memory=usable_bytes(memory, apple=target.apple))
    return replace(target, busy=peak.busy, flops=flops)

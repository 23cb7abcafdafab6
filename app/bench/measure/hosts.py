"""Account of a benchmark on several machines: ranks, split, link, and the share of a step that the link takes.

Guard: tests/app/bench/test_views.py for the lines.
"""

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from headrace.app.bench.measure.records import HostsAccount, Result
from headrace.runtime.metrics.telemetry import RankTimes
from headrace.runtime.metrics.units import format_link, percent

if TYPE_CHECKING:
    from headrace.app.hosts.start import Ranks
    from headrace.models.loading.load import LoadedModel


def hosts_account(
    ranks: "Ranks", model: "LoadedModel", results: Sequence[Result], times: Sequence[Sequence[RankTimes]]
) -> HostsAccount:
    """Return the account. The link was measured over TCP before the model was loaded; its share is computed.

    times: of timed decode steps, by rank.
    """
    from headrace.app.hosts.split_choice import link_between, link_seconds
    from headrace.models.cost.costs import shape_to_run

    assert ranks.split is not None
    measured = list(ranks.links.values())
    link = link_between(ranks.hosts, measured)
    waits = link_seconds(shape_to_run(model.checkpoint), ranks.split, link)
    # That of the first decode test: one number for the run.
    median_ms = next((entry.itl_ms.p50 for entry in results if not entry.prompt_tokens), None)
    by_rank = list(zip(*times, strict=True))
    return HostsAccount(
        backend=ranks.hosts.backend,
        split=ranks.split.kind,
        shares=ranks.split.fractions,
        ranks=ranks.hosts.names,
        latency_us=max(each.latency_s for each in measured) * 1e6,
        bandwidth_gb_s=min(each.bytes_per_second for each in measured) / 1e9,
        rank_times=[_mean(of_rank) for of_rank in by_rank],
        link_s_per_step=waits,
        link_share=min(1.0, waits * 1e3 / median_ms) if median_ms else None,  # `waits` is in seconds
    )


def hosts_notes(account: HostsAccount | None) -> list[str]:
    """Return the account in a line."""
    if account is None:
        return []
    ranks = zip(account.ranks, account.shares, strict=True)
    shares = ", ".join(f"{name} {percent(share)}" for name, share in ranks)
    link = f"link {format_link(account.latency_us, account.bandwidth_gb_s)} over TCP"
    if account.link_share is not None:
        link += f"; about {percent(account.link_share)} of a step on it, computed"
    lines = [f"{account.split} parallel ({account.backend}): {shares}; {link}"]
    by_rank = [
        f"{name} {each.compute_s * 1e3:.1f} ms computing, {each.wait_s * 1e3:.1f} waiting for ranks, "
        f"{each.collective_s * 1e3:.1f} the rest"
        for name, each in zip(account.ranks, account.rank_times, strict=False)  # no times: no step was timed
    ]
    if by_rank:
        lines.append(f"of a timed step: {'; '.join(by_rank)}")
    return lines


def _mean(times: Sequence[RankTimes]) -> RankTimes:
    return RankTimes(
        compute_s=mean(each.compute_s for each in times),
        wait_s=mean(each.wait_s for each in times),
        collective_s=mean(each.collective_s for each in times),
    )

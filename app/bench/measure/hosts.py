"""Account of a benchmark on several machines: ranks, split, link, and the share of a step that the link takes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.app.bench.measure.result import Result
from headrace.app.output.document import Document

if TYPE_CHECKING:
    from headrace.app.hosts.start import Ranks
    from headrace.models.loading.load import LoadedModel


def hosts_account(ranks: "Ranks", model: "LoadedModel", results: Sequence[Result]) -> Document:
    """Return the account. The link was measured over TCP before the model was loaded; its share is computed."""
    from headrace.app.hosts.split_choice import link_between, link_seconds
    from headrace.models.cost.costs import shape_to_run

    assert ranks.split is not None
    measured = list(ranks.links.values())
    link = link_between(ranks.hosts, measured)
    waits = link_seconds(shape_to_run(model.checkpoint), ranks.split, link)
    step: dict[str, Any] | None = next((entry for entry in results if not entry["prompt_tokens"]), None)
    return {
        "backend": ranks.hosts.backend,
        "split": ranks.split.kind,
        "shares": [share / sum(ranks.split.shares) for share in ranks.split.shares],
        "ranks": ranks.hosts.names,
        "latency_us": max(one.latency_s for one in measured) * 1e6,
        "bandwidth_gb_s": min(one.bytes_per_second for one in measured) / 1e9,
        "link_s_per_step": waits,
        "link_share": min(1.0, waits * 1e3 / step["itl_ms"]["p50"]) if step else None,
    }


def hosts_notes(account: Document | None) -> list[str]:
    """Return the account in a line."""
    if account is None:
        return []
    shares = ", ".join(f"{name} {share:.0%}" for name, share in zip(account["ranks"], account["shares"], strict=True))
    link = f"link {account['latency_us']:,.0f} us, {account['bandwidth_gb_s']:.2f} GB/s over TCP"
    lost = f"; about {account['link_share']:.0%} of a step on it, computed" if account["link_share"] is not None else ""
    return [f"{account['split']} parallel ({account['backend']}): {shares}; {link}{lost}"]

"""JSON document of a model on several machines, and its view: `headrace predict --hosts`, with and without --json.

The view reads the document alone, so both show the same figures; the predictions are in `hosts.py`. Scripts read the
keys, so none may be renamed.

Guard: tests/app/predict/test_hosts.py.
"""

from collections.abc import Sequence

from msgspec.structs import asdict

from headrace.app.output.document import Document
from headrace.app.output.tables import Column, print_apart
from headrace.app.predict.document import described_model
from headrace.app.predict.hosts import HostsPrediction, best, possible_splits, predict_hosts
from headrace.app.predict.links import NetworkLink, has_thunderbolt5, links
from headrace.app.predict.prediction import TargetMachine, summarise_assumptions
from headrace.app.predict.view import FITS, print_head, print_notes
from headrace.models.cost.step_shape import StepShape
from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.units import format_bytes, format_link, percent, speed_text, times


def links_between(targets: Sequence[TargetMachine], name: str | None) -> list[NetworkLink]:
    """Return the named kind of link, or all that these machines can have. Raises UsageError."""
    known = links()
    older_mac = next((target.name for target in targets if target.apple and not has_thunderbolt5(target.name)), None)
    if name is None:
        return [link for link in known.values() if not (link.thunderbolt5 and older_mac)]
    link = known.get(name)
    if link is None:
        raise UsageError(f"--link: {name!r} is no kind of link", f"kinds: {', '.join(known)}")
    if link.thunderbolt5 and older_mac:
        raise UsageError(f"--link {name}: the {older_mac} has no Thunderbolt 5", "use --link 10gbe or wifi")
    return [link]


def hosts_prediction(
    name: str,
    shape: StepShape,
    targets: Sequence[TargetMachine],
    over: Sequence[NetworkLink],
    context: int,
    prompt: int,
) -> Document:
    """Predict one model on these machines together, over every kind of link, beside each of them alone.

    over: kinds of link, one or more.
    context: tokens in the cache.
    prompt: tokens of the prompt whose speed is predicted.
    Raises UsageError for a model that no ranks can divide.
    """
    ways = possible_splits(shape, targets)
    if not ways:
        raise UsageError(f"{name} runs on one machine only", "docs/hosts.md lists models that several can share")
    first = over[0]
    each = list(dict.fromkeys(targets))
    alone = [predict_hosts(shape, [target], first, context, way="alone", prompt=prompt) for target in each]
    single = best(alone)
    return {
        "model": described_model(name, shape),
        "context": context,
        "prompt_tokens": prompt,
        "machines": [
            {"name": target.name, "bandwidth_gb_s": target.bandwidth / 1e9, "usable_memory_bytes": target.memory}
            for target in targets
        ],
        "alone": [asdict(prediction) for prediction in alone],
        "links": [
            _over(
                link,
                [predict_hosts(shape, targets, link, context, way=way, prompt=prompt) for way in ways],
                single,
            )
            for link in over
        ],
        "assumptions": [
            "computed from shapes and published figures, not measured",
            *summarise_assumptions(targets, shape.kv_format),
            "tensor: heads in proportion to bandwidth, two all_sums a layer; pipeline: layers in proportion to it",
            *(
                f"{link.name}: {format_link(link.latency * 1e6, link.bandwidth / 1e9, digits=1)}; {link.source}"
                for link in over
            ),
            f"sizes from {shape.source}",
        ],
    }


def show_hosts(document: Document) -> None:
    """Print a row per machine alone and per link and way of splitting. document: of `hosts_prediction`."""
    # A machine alone has no link, so no gain, no time on the link, and no speed together with others.
    without_link = {"link": "", "gain": None, "link_share": None, "together": None}
    rows = [prediction | without_link for prediction in document["alone"]]
    for link in document["links"]:
        rows += [prediction | {"link": link["name"]} for prediction in link["predictions"]]
    print_head(document["model"])
    print_apart(
        Column("link", [row["link"] for row in rows], right=False),
        Column("split", [_split(row) for row in rows], right=False),
        Column("fits", [FITS[row["fits"]] for row in rows], right=False),
        Column("memory", [format_bytes(max(row["memory"])) for row in rows], leaves=4),
        Column("tok/s", [_speed(row) for row in rows]),
        Column("gain", [times(row["gain"]) for row in rows]),
        Column("on link", [percent(row["link_share"]) for row in rows], leaves=3),
        Column("together", [speed_text(row["together"]) for row in rows], leaves=2),
        Column("prompt", [speed_text(row["prefill"]) for row in rows], leaves=1),
    )
    print_notes([link["verdict"] for link in document["links"]])
    print_notes(
        [
            f"tok/s with {document['context']:,} tokens in the cache; gain over the fastest machine that fits it alone",
            "memory: of the fullest machine; together: all sequences, as many as machines",
            f"prompt: tok/s of a prompt of {document['prompt_tokens']:,} tokens, where the FLOP/s are published",
            *document["assumptions"],
        ]
    )


def _over(link: NetworkLink, predictions: Sequence[HostsPrediction], single: HostsPrediction) -> Document:
    fastest = best(predictions)
    return {
        "name": link.name,
        "title": link.title,
        "latency_us": link.latency * 1e6,
        "bandwidth_gb_s": link.bandwidth / 1e9,
        "source": link.source,
        "best": fastest.way,
        "slower_than_alone": single.fits is not False and fastest.speed < single.speed,
        "verdict": f"{link.name}: {_verdict(fastest, single)}",
        "predictions": [
            {**asdict(prediction), "gain": None if single.fits is False else prediction.speed / single.speed}
            for prediction in predictions
        ],
    }


def _verdict(fastest: HostsPrediction, single: HostsPrediction) -> str:
    count = len(fastest.machines)
    if fastest.fits is False:
        return f"the model does not fit {count} machines either"
    if single.fits is False:
        return f"{fastest.way}, {speed_text(fastest.speed)} tok/s; no machine holds the model alone"
    gain = fastest.speed / single.speed
    if gain < 1:
        return f"{count} machines are slower than one {single.machines[0]}: {gain:.2f}x, {fastest.way}"
    return f"{fastest.way}, {gain:.2f}x the {single.machines[0]} alone"


def _split(prediction: Document) -> str:
    if prediction["way"] == "pipeline":
        return f"pipeline {'+'.join(map(str, prediction['layers']))}"
    if prediction["way"] == "alone":
        return str(prediction["machines"][0])
    return "tensor"


def _speed(prediction: Document) -> str:
    speed = speed_text(prediction["speed"])
    if prediction["expected"]:
        return speed
    return f"≤{speed}"  # a roofline

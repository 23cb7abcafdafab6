"""The sampling options every generating command shares, and how they meet a model's own recommendations.

Precedence: what the user gave, then the checkpoint's generation_config.json, then greedy decoding; in the chat, where
asking again is to give another answer, `CHAT_SAMPLING` instead of greedy decoding.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from headrace.app.config.settings import SPECULATE
from headrace.runtime.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("-t", "--temperature", type=float, help="0 is greedy. Default: the model's own, else 0."),
    click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 is off."),
    click.option("--top-p", type=float, help="Keep the smallest set of tokens with this much probability."),
    click.option("--min-p", type=float, help="Drop tokens below this share of the most likely one's probability."),
    click.option("--repetition-penalty", type=float, help="Above 1 makes tokens seen before less likely."),
    click.option("--presence-penalty", type=float, help="Subtracted once from tokens already generated."),
    click.option("--frequency-penalty", type=float, help="Subtracted per occurrence from tokens already generated."),
    click.option("--logit-bias", multiple=True, metavar="ID=VALUE", help="Added to one token's logit. Repeatable."),
    click.option("--seed", type=int, help="Same seed, same machine, same tokens."),
    click.option(
        "--speculate",
        type=click.Choice(SPECULATE),
        metavar="off|ngram",
        help="Guess tokens ahead; answers stay the same [ngram].",
    ),
)
DEFAULT_MAX_TOKENS = 2048
"""Of an answer outside the chat."""
CHAT_SAMPLING: Mapping[str, float] = {"temperature": 0.7, "min_p": 0.05}
"""What the chat begins with where a model recommends no temperature. Not top_p: it sorts the vocabulary, which takes
longer than the rest of a small model's step."""
# generation_config.json key -> SamplingParams field
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_options(command: F) -> F:
    """Add the sampling options to a click command; it receives them by their field names."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sampling_settings(
    given: Mapping[str, Any], recommended: Mapping[str, Any], otherwise: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments for SamplingParams. Raises UsageError for a malformed --logit-bias.

    otherwise: for a model that recommends no temperature; `do_sample: false` recommends greedy decoding.
    """
    settings = recommended_settings(recommended)
    if recommended.get("do_sample") is not False and "temperature" not in settings:
        settings = dict(otherwise or {}) | settings
    settings |= {key: value for key, value in given.items() if value is not None and key != "logit_bias"}
    settings["logit_bias"] = dict(map(_bias, given.get("logit_bias") or ()))
    return settings


def chat_sampling(given: Mapping[str, Any], recommended: Mapping[str, Any]) -> dict[str, Any]:
    """The same for an answer in the chat."""
    return sampling_settings(given, recommended, CHAT_SAMPLING)


def recommended_settings(recommended: Mapping[str, Any]) -> dict[str, Any]:
    """What of a generation_config.json is a field of SamplingParams, and a number."""
    if recommended.get("do_sample") is False:
        return {}
    numbers = {key: value for key, value in recommended.items() if key in _RECOMMENDED}
    return {
        key: int(value) if key == "top_k" else float(value)
        for key, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UsageError(f"--logit-bias takes ID=VALUE, not {text!r}") from None

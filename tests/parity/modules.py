"""Turns on every model module of mlx-lm, beside the module's own logits, on tiny random weights.

    python -m tests.parity.modules [MODULE ...] [--part 2/8]

writes each result into docs/models.md, between `<!-- modules -->` and `<!-- end -->`.
"""

import argparse
import re
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.mlx_lm.load import load
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.ops import reference
from tests.support.every_module import LEFT_OUT, VOCAB, config_of, names
from tests.support.kernels import FAST, KERNELS
from tests.support.mlx_lm_models import write_mlx_lm_model
from tests.support.tiny import load_decoder

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(40)]
TOKENS = 12
NEAR_TIE = 4e-3  # of the largest logit: half-precision K/V and rounded activations
_SAME = 1e-4  # of the largest logit: logits in float32
_MARKED = re.compile(r"(<!-- modules -->\n).*?(<!-- end -->)", re.DOTALL)
_NAME = re.compile(r"`([^`]+)`")

OWN = "equal, in headrace's own decoder"
CLASS = "equal, in mlx-lm's class"
ROUNDED = "equal in float32; rounding turns the choice of experts or entries"
CORRECTED = "equal to the class with its fault corrected ([workarounds](workarounds.md)), and so unlike mlx-lm"
DIFFERENT = "different"


def compare(name: str, directory: Path) -> str:
    """Return the result of three turns, with weights in `directory`.

    Each token must be the class's choice; a wider gap must be one that the class itself, in half precision, could turn,
    or that the kernels do not have in float32: rounding chooses other experts, or other entries to attend to.
    """
    write_mlx_lm_model(directory, config_of(name))
    checkpoint = open_checkpoint(directory)
    is_own = own_decoder(checkpoint) is not None
    peer = MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu).model
    gap = largest_gap(peer, directory, load_decoder(directory, FAST) if is_own else class_of(directory))
    unrounded = gap
    if gap > NEAR_TIE and is_own:
        unrounded = largest_gap(peer, directory, load_decoder(directory, KERNELS[-1]))
    if unrounded > 1:
        return DIFFERENT
    if not is_stock(peer, directory):
        return CORRECTED
    if gap > NEAR_TIE:
        return ROUNDED
    return OWN if is_own else CLASS


def largest_gap(peer: Any, directory: Path, network: Any) -> float:
    """Return the largest gap of a first turn, a second on its prefix and an edited one; see `gap_of`."""
    engine = Engine(network, context_limit=256, keep_prefix=True)
    first = answer_of(engine, PROMPT)
    second = [*PROMPT, *first, 3, 1, 4, 1, 5]
    edited = [*PROMPT[:25], 9, 2, 6, *PROMPT[28:]]
    gaps = [gap_of(peer, directory, prompt, answer_of(engine, prompt)) for prompt in (second, edited)]
    return max(gap_of(peer, directory, PROMPT, first), *gaps)


def answer_of(engine: Engine, prompt: list[int]) -> list[int]:
    events = engine.generate(Request(prompt, max_tokens=TOKENS, speculate="off"))
    answer = [token for event in events if isinstance(event, Step) for token in event.tokens]
    assert len(answer) == TOKENS
    return answer


def gap_of(peer: Any, directory: Path, prompt: list[int], answer: list[int]) -> float:
    """Return how far the class prefers other tokens, of its largest logit; 2 if its rounding does not explain it."""
    logits = one_pass(peer, prompt + answer[:-1])[len(prompt) - 1 :]
    chosen = mx.take_along_axis(logits, mx.array(answer)[:, None], axis=1)[:, 0]
    gaps = logits.max(axis=1) - chosen
    gap = float((gaps.max() / mx.abs(logits).max()).item())
    if gap < NEAR_TIE:
        return gap
    halved = load(open_checkpoint(directory), mx.DeviceType.gpu)[0]  # as it runs on a GPU
    rounded = one_pass(halved, prompt + answer[:-1])[len(prompt) - 1 :].astype(mx.float32)
    return gap if (gaps <= mx.abs(rounded - logits).max(axis=1)).all().item() else 2.0


def is_stock(peer: Any, directory: Path) -> bool:
    """Return whether mlx-lm's own loading gives the same logits: no fault of its class is corrected."""
    from mlx_lm.utils import load_model

    stock, _ = load_model(directory)
    logits = one_pass(peer, PROMPT)
    difference = mx.abs(one_pass(stock, PROMPT) - logits).max() / mx.abs(logits).max()
    return bool((difference < _SAME).item())


def class_of(directory: Path) -> MlxLmNetwork:
    """Load a checkpoint in mlx-lm's class as `load_model` does, without a tokenizer."""
    kernels = None if FAST is reference else FAST
    return MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu, kernels=kernels).use_kernels()


def one_pass(model: Any, tokens: list[int]) -> mx.array:
    """Return logits (T, V) of a prompt by a class's own rules."""
    from mlx_lm.models.cache import make_prompt_cache

    logits: mx.array = model(mx.array([tokens]), cache=make_prompt_cache(model))
    assert not mx.isnan(logits).any().item()
    return logits[0]


def listed(results: Mapping[str, str]) -> str:
    """Return the modules by result, as a Markdown list. results: by module."""
    every = results | {name: f"not compared: {why}" for name, why in LEFT_OUT.items()}
    lines = [f"{len(every)} modules:", ""]
    for result in sorted(set(every.values()), key=lambda result: (result.startswith("not"), result)):
        members = [f"`{name}`" for name, each in every.items() if each == result]
        text = f"- {len(members)} {result}: {', '.join(sorted(members))}."
        lines += textwrap.wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines) + "\n"


def recorded(page: str) -> dict[str, str]:
    """Return the results that `listed` wrote into a page, by module."""
    section = _MARKED.search(page)
    assert section is not None
    items = " ".join(section[0].split()).split(" - ")[1:]
    found = {}
    for item in items:
        result, _, members = item.partition(": `")
        _, _, result = result.partition(" ")  # after the number of members
        found |= dict.fromkeys(_NAME.findall(f"`{members}"), result)
    return found


def write(results: Mapping[str, str]) -> None:
    """Write results into the page. Modules that are not among them keep theirs."""
    page = PAGE.read_text(encoding="utf-8")
    known = {name: result for name, result in recorded(page).items() if name in names()}
    text = _MARKED.sub(lambda match: f"{match[1]}{listed(known | results)}{match[2]}", page)
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="modules to compare [all]")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth of them, from the Ith")
    options = parser.parse_args()
    first, count = map(int, options.part.split("/"))
    for name in (options.modules or names())[first - 1 :: count]:
        with tempfile.TemporaryDirectory() as folder:
            result = compare(name, Path(folder))
        write({name: result})  # one by one, for a run that is cut short
        print(f"{name}: {result}", flush=True)


if __name__ == "__main__":
    main()

"""`headrace quantize`: a quantized copy with bits chosen for each projection; the work is in `app.quantize`.

`headrace pull --quantize` is the other way: all matrices alike, and no measurement.

Guard: tests/app/quantize/test_quantize.py.
"""

from pathlib import Path

import click

from headrace.app.cli.awake import keep_awake
from headrace.app.cli.completion import chip_names, model_names
from headrace.app.cli.decorators import json_option
from headrace.app.cli.load_for_answers import install_file
from headrace.app.cli.say import checked_json, print_json, say


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option("--bits", type=float, metavar="X", help="Bits a weight, scales included: 2 to 9, such as 4.5.")
@click.option("--memory", metavar="SIZE", help="Memory of weights, program and K/V of 4,096 tokens: 12GB, 800MB.")
@click.option("--at-least", metavar="SPEED", help='Predicted decode speed after 4,096 tokens: "30 tok/s".')
@click.option("--chip", metavar="CHIP", shell_complete=chip_names, help="Chip to predict for [this machine].")
@click.option(
    *("-o", "--output"), type=click.Path(path_type=Path), metavar="DIR", help="New folder for the result [the store]."
)
@click.option("--as", "name", metavar="NEW_NAME", help="Name of the copy in the store [MODEL and the budget].")
@click.option(
    "--text", type=click.Path(path_type=Path), metavar="FILE", help="Text of the measurements [a built-in one]."
)
@click.option("-q", "--quiet", is_flag=True, help="Errors only.")
@json_option
def quantize(
    model: str,
    bits: float | None,
    memory: str | None,
    at_least: str | None,
    chip: str | None,
    output: Path | None,
    name: str | None,
    text: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Quantize MODEL, a plain checkpoint, with bits chosen for each projection.

    Each projection's effect on the logits is measured, so that a budget of bits, memory or speed costs the least KL.
    The result is an ordinary MLX checkpoint. Ctrl-C keeps the measurements; the same command goes on.
    """
    from headrace.app.quantize.budget import parse_budget

    budget = parse_budget(bits, memory, at_least)
    if as_json:
        from headrace.models.registry.store import Store

        # Before the work, all that the document names: a path may be no UTF-8. The store refuses such a NEW_NAME.
        checked_json([model, str(output or Store().root)])
    keep_awake()
    install_file(model, quiet=quiet or as_json, ask=False, plain=True)
    from headrace.app.quantize.quantize import InterruptedQuantizationError, QuantizeOptions
    from headrace.app.quantize.quantize import quantize as run

    try:
        quantized = run(
            QuantizeOptions(
                model=model, budget=budget, output=output, name=name, chip=chip, text=text, quiet=quiet or as_json
            )
        )
    except InterruptedQuantizationError as interrupted:
        say(f"headrace: {interrupted}", err=True)
        raise
    if as_json:
        print_json(quantized.document())
    elif not quiet:
        from headrace.app.quantize.show import show

        show(quantized)

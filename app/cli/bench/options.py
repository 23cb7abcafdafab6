"""Options of `headrace bench`.

`command.py` turns a `BenchArguments` into the options of a run of speed or quality, and refuses options that do not go
together. A new option is a field, and a row of `_OPTIONS` with the field's name.

Guards: tests/app/cli/test_bench.py and test_bench_threads.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from msgspec import Struct

from headrace.app.cli.completion import files, kv_names, model_names, workload_names
from headrace.app.cli.model_options import hosts_options
from headrace.app.config.load_options import ACTIVATION_NAMES, HostsChoice
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.app.bench.measure.peers import Peer

FORMATS = ("table", "md")


class BenchArguments(Struct, frozen=True, kw_only=True):
    """Arguments of `headrace bench`: a field for each parameter of `_OPTIONS` and of `hosts_options`.

    The help texts of `_OPTIONS` explain the fields. None stands for the default in brackets there.
    """

    # Models, and how they are loaded
    models: tuple[str, ...]
    kv: str | None  # formats, separated by commas
    activations: str | None
    hosts: HostsChoice | None  # None: this machine alone
    threads: int | None
    force: bool
    # Tests of speed: numbers of tokens or sequences, separated by commas, as typed
    prompts: str
    generates: str
    depths: str
    batches: str
    arrivals: str
    combined: bool  # also prompt and generation in one test
    repetitions: int | None  # None: five rounds, more if the results are noisy
    profile: bool
    # Speculative decoding
    speculate: bool
    workloads: tuple[str, ...]
    draft: str | None
    # Peers of --vs
    peers: tuple[str, ...]
    peer_threads: int | None
    llama_python: str | None
    llama_model: str | None
    # Quality instead of speed
    quality: bool
    against: tuple[str, ...]  # other weights
    text: Path | None
    # Output
    form: Literal["table", "md"] | None  # see `chosen_form`
    as_json: bool
    report: Path | None

    @property
    def chosen_form(self) -> str | None:
        """Form of the output; None: a table on a terminal, Markdown elsewhere."""
        return "json" if self.as_json else self.form


_OPTIONS = (
    click.option(
        *("-m", "--model", "models"),
        multiple=True,
        metavar="MODEL",
        shell_complete=model_names,
        help="Model, as for run; repeatable [HEADRACE_MODEL or settings].",
    ),
    click.option("-p", "--prompt", "prompts", default="512", metavar="N,...", help="Prompt lengths to prefill [512]."),
    click.option(
        "-n", "--generate", "generates", default="128", metavar="N,...", help="Numbers of tokens to decode [128]."
    ),
    click.option("-d", "--depth", "depths", default="0", metavar="N,...", help="Tokens already in the KV cache [0]."),
    click.option("--batch", "batches", default="1", metavar="N,...", help="Sequences that decode together [1]."),
    click.option(
        "--arrivals", default="0", metavar="N,...", help="Prompt lengths that join decoding sequences [none]."
    ),
    click.option("--speculate", is_flag=True, help="Gain of speculative decoding, on its workloads."),
    click.option(
        "--workload",
        "workloads",
        multiple=True,
        metavar="NAME",
        shell_complete=workload_names,
        help="Workload of --speculate; repeatable [all].",
    ),
    click.option("--draft", metavar="MODEL", shell_complete=model_names, help="Draft model for --speculate [n-grams]."),
    click.option("--pg/--no-pg", "combined", default=True, help="Test of prompt and generation together [yes]."),
    click.option("-r", "--repetitions", type=click.IntRange(1), metavar="N", help="Rounds [5, more if noisy]."),
    click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="CPU threads of every engine [cores]."),
    click.option(
        "--peer-threads", type=click.IntRange(1, 1024), metavar="N", help="CPU threads of the peers [--threads]."
    ),
    click.option(
        "--vs",
        "peers",
        multiple=True,
        type=click.Choice(["mlx-lm", "llama.cpp"]),
        metavar="PEER",
        help="Peer to compare with: mlx-lm or llama.cpp; repeatable.",
    ),
    click.option(
        "--llama-python",
        metavar="PYTHON",
        shell_complete=files,
        help="Python interpreter that has llama-cpp-python, used instead of llama-bench.",
    ),
    click.option("--llama-model", metavar="FILE", shell_complete=files, help="GGUF file for llama.cpp [-m]."),
    click.option("--quality", is_flag=True, help="Effect of K/V formats or weights on the logits."),
    click.option(
        "--kv",
        metavar="FORMAT,...",
        shell_complete=kv_names,
        help="K/V formats to compare: f16, q8, k8v4, q4; or auto [settings].",
    ),
    click.option(
        "--activations",
        type=click.Choice(ACTIVATION_NAMES),
        metavar="|".join(ACTIVATION_NAMES),
        help="Bits of prompts' activations; with --quality, 8 is compared with 16 [settings].",
    ),
    click.option(
        "--against",
        multiple=True,
        metavar="MODEL",
        shell_complete=model_names,
        help="Other weights for --quality; repeatable.",
    ),
    click.option("--text", type=Path, metavar="FILE", shell_complete=files, help="Text for --quality [a shipped one]."),
    click.option("--profile", is_flag=True, help="Time of one step by part."),
    click.option(
        *("-o", "--output", "form"),
        metavar="FORM",
        type=click.Choice(FORMATS),
        help="Output form: table or md [table; md in pipes].",
    ),
    click.option("--json", "as_json", is_flag=True, help="One JSON document."),
    click.option(
        "--report",
        type=Path,
        metavar="FILE",
        shell_complete=files,
        help="HTML page with plots; mac: see CONTRIBUTING.md.",
    ),
    click.option("--force", is_flag=True, help="Go beyond the memory limit."),
)


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all options, in the order of the help text."""
    # Of click's decorators the one applied last comes first in the help: those of `hosts_options`, then `_OPTIONS`.
    for option in reversed(_OPTIONS):
        command = option(command)
    return hosts_options(command)


def typed_options(ctx: click.Context) -> dict[str, str]:
    """Return the long flags of the options that were set on the command line, by the parameters' names."""
    return {
        str(parameter.name): parameter.opts[-1]
        for parameter in ctx.command.params
        if ctx.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
    }


def chosen_peers(arguments: BenchArguments, kv: str) -> "list[Peer]":
    """Return the peers of --vs, each once. kv: our K/V format. Raises UsageError for options of others."""
    from headrace.app.bench.measure.peers import Peer

    if arguments.peer_threads and not arguments.peers:
        raise UsageError("--peer-threads needs --vs")
    if arguments.llama_python and "llama.cpp" not in arguments.peers:
        raise UsageError("--llama-python goes with --vs llama.cpp")
    if arguments.llama_model and "llama.cpp" not in arguments.peers:
        raise UsageError("--llama-model goes with --vs llama.cpp")
    if arguments.llama_model and not Path(arguments.llama_model).is_file():
        raise UsageError(f"{arguments.llama_model} cannot be read: no such file")
    # llama.cpp runs the first model alone.
    gguf = arguments.llama_model or next(
        (model for model in arguments.models[:1] if model.lower().endswith(".gguf")), None
    )
    known = {
        "mlx-lm": Peer("mlx-lm"),
        "llama.cpp": Peer("llama.cpp", arguments.llama_python, gguf, kv),
    }
    return [known[name] for name in dict.fromkeys(arguments.peers)]

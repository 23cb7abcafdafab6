"""Options of commands that load a model: its name, adapter, draft model, context, K/V format, hosts, memory.

A command takes all of them (`model_options`), or some by their own decorators with `load_arguments`, and receives a
`LoadArguments`. Decorators that check other options (`adapter_option`, `hosts_options`) see them as click passes them.

Guards: tests/app/cli/test_commands.py, test_draft.py for the draft model, tests/app/hosts/test_start.py for the hosts.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from headrace.app.cli.completion import files, model_names
from headrace.app.cli.decorators import CommandFunction
from headrace.app.config.load_options import (
    ACTIVATION_NAMES,
    KV_NAMES,
    SPLIT_NAMES,
    HostsChoice,
    ModelSpec,
    adapter_on_hosts,
)
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.app.config.settings import Settings


class LoadArguments(Struct, frozen=True, kw_only=True):
    """Options of a command that loads a model; None: not given.

    draft: the draft model's name.
    context: limit in tokens.
    kv: K/V format.
    activations: bits of prompts' activations.
    hosts: machines that share the model; None: this one alone.
    force: go beyond the memory limit.
    """

    draft: str | None = None
    context: int | None = None
    kv: str | None = None
    activations: str | None = None
    hosts: HostsChoice | None = None
    force: bool = False

    def spec(self, settings: "Settings", draft: str | None = None) -> ModelSpec:
        """Return the way to load a model: by the options given, else by the settings. draft: of `chosen_draft`."""
        return ModelSpec(
            context=self.context or settings.chat.context or None,
            kv=self.kv or settings.chat.kv,
            force=self.force,
            draft=draft,
            activations=self.activations or settings.chat.activations,
            hosts=self.hosts,
        )

    def chosen_draft(self, settings: "Settings", speculate: str | None) -> str | None:
        """Return the draft model's name: the given one, else the settings'; None for none.

        speculate: as given on the command line. Raises UsageError where both are given.
        """
        if speculate is None:
            return self.draft or settings.chat.draft or None
        if self.draft is not None:
            raise UsageError(f"--draft and --speculate {speculate} exclude each other")
        return None


def load_arguments(command: CommandFunction) -> CommandFunction:
    """Pass a click command its options of loading as one object, `load`."""

    @wraps(command)
    def collected(**arguments: Any) -> object:
        names = [name for name in LoadArguments.__struct_fields__ if name in arguments]
        return command(load=LoadArguments(**{name: arguments.pop(name) for name in names}), **arguments)

    return collected


def named_model_option(help: str) -> Callable[[CommandFunction], CommandFunction]:
    """Return an option --model with this help text."""
    return click.option("-m", "--model", metavar="MODEL", shell_complete=model_names, help=help)


model_option = named_model_option("Catalog name, directory, .gguf file or hub id [HEADRACE_MODEL or settings].")
draft_option = click.option(
    "--draft",
    metavar="MODEL",
    shell_complete=model_names,
    help="Draft model: a smaller model of the same vocabulary; the answer is the same.",
)
kv_option = click.option(
    "--kv",
    type=click.Choice(KV_NAMES),
    metavar="FORMAT",
    help=f"K/V format: {', '.join(KV_NAMES[:-1])}, or auto, the best that fits [f16, or the settings'].",
)
activations_option = click.option(
    "--activations",
    type=click.Choice(ACTIVATION_NAMES),
    metavar="|".join(ACTIVATION_NAMES),
    help="Bits of prompts' activations on the CPU kernels; auto: 8 if that changes little [16, or the settings'].",
)


def model_options(command: CommandFunction) -> CommandFunction:
    """Add --draft, --context, --adapter, --kv, --activations, --hosts, --split and --force to a click command.

    It receives all but the adapter as `load`.
    """
    command = load_arguments(command)
    context = click.option("--context", type=click.IntRange(1), help="Context limit in tokens [the model's].")
    force = click.option("--force", is_flag=True, help="Go beyond the memory limit, or with --context the model's.")
    # click shows the option first that was added last
    for option in (force, hosts_options, activations_option, kv_option, adapter_option, context, draft_option):
        command = option(command)
    return command


def adapter_option(command: CommandFunction) -> CommandFunction:
    """Add --adapter to a click command with a `model`, which gets the adapter after it: BASE+ADAPTER."""

    @wraps(command)
    def with_adapter(adapter: str | None, **arguments: Any) -> Any:
        if adapter is not None:
            from headrace.app.config.settings import chosen_model, load_settings
            from headrace.models.registry.adapters import split_adapter
            from headrace.models.registry.resolve import DEFAULT_MODEL

            if arguments["model"] is None and _continues_session(arguments):
                raise UsageError("--adapter needs -m MODEL here: the session has its own model")
            model = chosen_model(arguments["model"], load_settings()) or DEFAULT_MODEL
            _base, own_adapter = split_adapter(model)
            if own_adapter is not None:
                raise UsageError(f"--adapter: {model} has an adapter already", "name its base model with -m")
            arguments["model"] = f"{model}+{adapter}"
        return command(**arguments)

    help = "LoRA adapter of the model: a folder, hub id or .gguf file; -m MODEL+ADAPTER is the same."
    return click.option("--adapter", metavar="PATH|HUB", help=help)(with_adapter)


def _continues_session(arguments: Mapping[str, Any]) -> bool:
    """Return whether a command's arguments continue a stored session: without -m, its model is used."""
    return bool(arguments.get("resume") or arguments.get("go_on"))


def _refuse_adapter(model: str | None) -> None:
    """Raise UsageError for a model with an adapter on several machines, before anything is fetched."""
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.models.registry.adapters import split_adapter

    name = chosen_model(model, load_settings())
    if name is None:
        return
    _base, adapter = split_adapter(name)
    if adapter is not None:
        raise adapter_on_hosts(name)


def hosts_options(command: CommandFunction) -> CommandFunction:
    """Add --hosts and --split to a click command, which receives both as `hosts`, a `HostsChoice` or None."""

    @wraps(command)
    def with_choice(hosts: str | None, split: str | None, **arguments: Any) -> object:
        if hosts is None and split is not None:
            raise UsageError("--split needs --hosts")
        choice = None
        if hosts is not None:
            choice = HostsChoice(hosts, split or "auto")
            for model in arguments.get("models") or [arguments.get("model")]:
                if model is None and _continues_session(arguments):
                    continue  # the settings' model is not used; `load_on_hosts` checks the session's
                _refuse_adapter(model)
        return command(hosts=choice, **arguments)

    split = click.option(
        "--split",
        type=click.Choice(SPLIT_NAMES),
        metavar="|".join(SPLIT_NAMES),
        help="Way to divide the model among --hosts [auto, by prediction].",
    )
    hosts = click.option(
        "--hosts",
        metavar="FILE|NAME,...",
        shell_complete=files,
        help="Machines that share the model: a hostfile of mlx.launch, or names for ssh: localhost,mac2.",
    )
    return hosts(split(with_choice))

"""Coding agents and their settings for one run: arguments, environment variables and files in a temporary folder.

A new agent is a row of `AGENTS`, and a function from the server's model to its `AgentSetup`. Each must outrank the
user's own settings without changing their files. `tests/app/cli/test_launch.py` checks all.

The variables and options are those of the agents' own documentation:

    codex     `-c key=value` overrides config.toml for one run
    claude    ANTHROPIC_BASE_URL and the variables of its models; `--settings` outranks the user's file
    opencode  OPENCODE_CONFIG_CONTENT is merged over all files
    pi        `-e FILE` loads an extension, which may register a provider
    aider     options outrank its files and .env
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

PROVIDER = "headrace"
_ANY_KEY = "none"  # for agents that want a key where the server wants none
_OUTPUT_SHARE = 4  # a quarter of the context is left for an answer, in agents that have to know
_MAX_OUTPUT = 32_000  # tokens


class Endpoint(Struct, frozen=True):
    """A server's model, as an agent has to know it.

    url: without /v1.
    key: None if the server needs none.
    context: tokens of prompt and answer together; None if unknown.
    """

    url: str
    model: str
    context: int | None
    key: str | None = None

    @property
    def max_output(self) -> int | None:
        """Tokens of an answer, for agents that reserve them."""
        return None if self.context is None else min(_MAX_OUTPUT, self.context // _OUTPUT_SHARE)


class AgentSetup(Struct, frozen=True):
    """Arguments, variables and files that an agent is started with.

    arguments: before the user's own.
    variables: to set; None removes one.
    files: text by name, in a temporary folder; {folder} in an argument is its path.
    """

    arguments: Sequence[str] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> list[str]:
        """Write the files to an empty folder, and return the arguments."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        return [argument.replace("{folder}", str(folder)) for argument in self.arguments]


class Agent(Struct, frozen=True):
    """A coding agent.

    program: its command.
    install: the command that installs it.
    setup: returns what it is started with.
    """

    program: str
    install: str
    setup: Callable[[Endpoint], AgentSetup]


def _codex(endpoint: Endpoint) -> AgentSetup:
    provider = f"model_providers.{PROVIDER}"
    settings = {
        "model": endpoint.model,
        "model_provider": PROVIDER,
        f"{provider}.name": PROVIDER,
        f"{provider}.base_url": f"{endpoint.url}/v1",
        f"{provider}.wire_api": "responses",
    }
    if endpoint.key is not None:
        settings[f"{provider}.env_key"] = "HEADRACE_API_KEY"
    arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={_toml(value)}")]
    if endpoint.context is not None:
        arguments += ["-c", f"model_context_window={endpoint.context}"]
    return AgentSetup(arguments, {"HEADRACE_API_KEY": endpoint.key})


def _toml(text: str) -> str:
    """Return a TOML string: JSON's escapes of ASCII text are TOML's, too."""
    return json.dumps(text)


def _claude(endpoint: Endpoint) -> AgentSetup:
    shared = {"ANTHROPIC_BASE_URL": endpoint.url, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "SMALL_FAST_MODEL")
    shared |= {f"ANTHROPIC_{name}": endpoint.model for name in models}
    shared |= {"CLAUDE_CODE_SUBAGENT_MODEL": endpoint.model}
    if endpoint.context is not None:
        names = ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW")
        shared |= dict.fromkeys(names, str(endpoint.context))
        shared |= {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_output)}
    # None removes them: they set another key, or choose another service.
    others: dict[str, str | None] = dict.fromkeys(
        ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")
    )
    # The settings file's `env` outranks variables, and arguments outrank the file. The key stays out of them: other
    # users of the machine see arguments.
    arguments = ["--settings", json.dumps({"env": shared}), "--model", endpoint.model]
    return AgentSetup(arguments, {**shared, **others, "ANTHROPIC_AUTH_TOKEN": endpoint.key or _ANY_KEY})


def _opencode(endpoint: Endpoint) -> AgentSetup:
    model: dict[str, object] = {"name": endpoint.model}
    if endpoint.context is not None:
        model["limit"] = {"context": endpoint.context, "output": endpoint.max_output}
    name = f"{PROVIDER}/{endpoint.model}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.key or _ANY_KEY},
        "models": {endpoint.model: model},
    }
    settings = {"provider": {PROVIDER: provider}, "model": name, "small_model": name}
    return AgentSetup((), {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _pi(endpoint: Endpoint) -> AgentSetup:
    model: dict[str, object] = {
        "id": endpoint.model,
        "name": endpoint.model,
        "reasoning": False,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        # The second numbers stand for a server that does not tell its context.
        "contextWindow": endpoint.context or 32_768,
        "maxTokens": endpoint.max_output or 8_192,
    }
    provider = {
        "baseUrl": f"{endpoint.url}/v1",
        "apiKey": endpoint.key or _ANY_KEY,
        "api": "openai-completions",
        "models": [model],
    }
    text = f"export default function (pi) {{ pi.registerProvider({json.dumps(PROVIDER)}, {json.dumps(provider)}); }}\n"
    arguments = ["-e", "{folder}/headrace.js", "--provider", PROVIDER, "--model", endpoint.model]
    return AgentSetup(arguments, {}, {"headrace.js": text})


def _aider(endpoint: Endpoint) -> AgentSetup:
    name = f"openai/{endpoint.model}"
    url = f"{endpoint.url}/v1"
    arguments = ["--model", name, "--weak-model", name, "--openai-api-base", url, "--no-show-model-warnings"]
    files = {}
    if endpoint.context is not None:
        facts = {
            "max_input_tokens": endpoint.context,
            "max_output_tokens": endpoint.max_output,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        files = {"models.json": json.dumps({name: facts})}
        arguments += ["--model-metadata-file", "{folder}/models.json"]
    return AgentSetup(arguments, {"OPENAI_API_BASE": url, "OPENAI_API_KEY": endpoint.key or _ANY_KEY}, files)


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "pi": Agent("pi", "npm install -g @earendil-works/pi-coding-agent", _pi),
    "aider": Agent("aider", "python -m pip install aider-install && aider-install", _aider),
}

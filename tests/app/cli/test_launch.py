"""`headrace launch`: what agents are started with, their exit codes, and the end of the server."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.app.cli.launch.agents import AGENTS, Endpoint
from headrace.app.cli.launch.command import _run
from headrace.app.cli.launch.server import announced_address
from headrace.runtime.errors import HeadraceError
from tests.support.commands import HEADRACE, ForkedProcess
from tests.support.patience import PATIENCE_S
from tests.support.processes import engines
from tests.support.server_process import ServerProcess
from tests.support.tiny_chat import write_chat_model

NO_SERVER = "http://127.0.0.1:9"
_TALK = """
import json, os, sys, tomllib, urllib.request

def post(url, path, key, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def after(name):
    return sys.argv[sys.argv.index(name) + 1]

messages = [{"role": "user", "content": "hello"}]
"""
FAKES = {
    "codex": """
settings = {}
for name, value in zip(sys.argv, sys.argv[1:]):
    if name == "-c":
        key, _, text = value.partition("=")
        settings[key] = tomllib.loads("value = " + text)["value"]
url = settings["model_providers.headrace.base_url"]
assert settings["model_providers.headrace.wire_api"] == "responses"
key = os.environ.get(settings.get("model_providers.headrace.env_key", ""), "none")
model, context = settings["model"], settings["model_context_window"]
answer = post(url, "/responses", key, {"model": model, "input": "hello", "max_output_tokens": 3})
""",
    "claude": """
given = json.loads(after("--settings"))["env"]
assert all(os.environ[name] == value for name, value in given.items())
assert "ANTHROPIC_API_KEY" not in os.environ
url, model = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_MODEL"]
context = int(os.environ["CLAUDE_CODE_MAX_CONTEXT_TOKENS"])
body = {"model": model, "messages": messages, "max_tokens": 3}
answer = post(url, "/v1/messages", os.environ["ANTHROPIC_AUTH_TOKEN"], body)
""",
    "opencode": """
settings = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
provider, _, model = settings["model"].partition("/")
options = settings["provider"][provider]["options"]
context = settings["provider"][provider]["models"][model]["limit"]["context"]
body = {"model": model, "messages": messages, "max_tokens": 3}
answer = post(options["baseURL"], "/chat/completions", options["apiKey"], body)
""",
    "pi": """
text = open(after("-e")).read()
provider = json.loads(text[text.index('", {') + 3 : text.rindex("}") - 3])
assert after("--provider") in text
model, context = after("--model"), provider["models"][0]["contextWindow"]
body = {"model": model, "messages": messages, "max_tokens": 3}
answer = post(provider["baseUrl"], "/chat/completions", provider["apiKey"], body)
""",
    "aider": """
name = after("--model")
model, context = name.removeprefix("openai/"), json.load(open(after("--model-metadata-file")))[name]["max_input_tokens"]
body = {"model": model, "messages": messages, "max_tokens": 3}
answer = post(os.environ["OPENAI_API_BASE"], "/chat/completions", os.environ["OPENAI_API_KEY"], body)
""",
}
_REPORT = """
print(json.dumps({"answered": answer["model"], "model": model, "context": context, "arguments": sys.argv[-2:]}))
sys.exit(7)
"""


def fake(folder: Path, name: str, code: str) -> None:
    """Write an agent's program."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!{sys.executable}\n{_TALK}{code}")
    program.chmod(0o755)


def start(tmp_path: Path, *arguments: str | Path, **variables: str) -> "subprocess.Popen[str]":
    """Start `headrace launch` in a session of its own."""
    environment = {**os.environ, "HEADRACE_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "bin"), **variables}
    return ForkedProcess(
        [*HEADRACE, "launch", *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def launched(tmp_path: Path, *arguments: str | Path, **variables: str) -> Any:
    """Run `headrace launch` with an agent that reports, and return the report."""
    with start(tmp_path, *arguments, **variables) as process:
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7, errors
    return json.loads(out)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "tiny", context=5000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key."""
    folder = tmp_path_factory.mktemp("server")
    model = write_chat_model(folder / "tiny", context=5000)
    with ServerProcess(folder / "home", "-m", str(model), HEADRACE_API_KEY="s3cret") as process:
        yield process


@pytest.mark.sampled
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_reaches_a_running_server(tmp_path: Path, server: ServerProcess, agent: str) -> None:
    fake(tmp_path / "bin", agent, FAKES[agent] + _REPORT)
    arguments = [agent, "--url", server.root, "--", "-m", "more words"]
    report = launched(tmp_path, *arguments, HEADRACE_API_KEY="s3cret")
    assert server.process.poll() is None
    assert report == {"answered": "tiny", "model": "tiny", "context": 5000, "arguments": ["-m", "more words"]}


def test_a_server_is_started_and_ended(tmp_path: Path, model: Path) -> None:
    fake(tmp_path / "bin", "codex", FAKES["codex"] + _REPORT)
    report = launched(tmp_path, "codex", "--url", NO_SERVER, "-m", model, "--", "a", "b")
    assert (report["answered"], report["arguments"]) == ("tiny", ["a", "b"])
    if sys.platform == "linux":
        assert engines(tmp_path / "home") == []


def test_keys_are_not_among_the_arguments() -> None:
    endpoint = Endpoint("http://127.0.0.1:1", "tiny", 5000, "s3cret")
    for agent in AGENTS.values():
        setup = agent.setup(endpoint)
        assert not any("s3cret" in argument for argument in setup.arguments)


def test_no_context_is_set_for_the_agent_if_it_is_unknown() -> None:
    for agent in AGENTS.values():
        setup = agent.setup(Endpoint("http://127.0.0.1:1", "tiny", None))
        assert "None" not in f"{list(setup.arguments)} {[value for value in setup.variables.values() if value]}"


@pytest.mark.parametrize(("context", "output"), [(8192, 2048), (1 << 20, 32_000), (None, None)])
def test_a_quarter_of_the_context_is_left_for_an_answer(context: int | None, output: int | None) -> None:
    assert Endpoint("http://127.0.0.1:1", "tiny", context).max_output == output


def test_an_agent_killed_by_a_signal_has_the_exit_code_of_a_shell() -> None:
    assert _run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {}) == 137


def test_a_removed_variable_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of another service")
    code = "import os, sys; sys.exit('ANTHROPIC_API_KEY' in os.environ)"
    assert _run([sys.executable, "-c", code], {"ANTHROPIC_API_KEY": None}) == 0


def test_a_missing_program_is_one_line(tmp_path: Path) -> None:
    with start(tmp_path, "codex") as process:
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    assert errors.splitlines() == [
        "headrace: codex is not installed",
        "  hint: `npm install -g @openai/codex` installs it",
    ]


def test_a_model_that_cannot_be_loaded_is_an_error(tmp_path: Path, model: Path) -> None:
    fake(tmp_path / "bin", "codex", _REPORT)
    (model / "model.safetensors").write_bytes(b"broken")
    with start(tmp_path, "codex", "--url", NO_SERVER, "-m", model) as process:
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    assert "model.safetensors" in errors


@pytest.mark.parametrize("code", [1, 2])
def test_the_error_of_a_server_keeps_its_exit_code(code: int) -> None:
    program = f"import sys; print('headrace: broken', file=sys.stderr); sys.exit({code})"
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-S", "-c", program]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        with server, pytest.raises(HeadraceError, match="broken") as raised:
            announced_address(server, errors)
    assert raised.value.exit_code == code


_WAITS = """
import signal, time
def interrupted(*_):
    print("interrupted", flush=True)
    sys.exit(3)
signal.signal(signal.SIGINT, interrupted)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [(signal.SIGINT, True, 3), (signal.SIGTERM, False, 143), (signal.SIGKILL, False, -9)],
)
def test_signals_leave_no_process(
    tmp_path: Path, model: Path, number: signal.Signals, to_group: bool, code: int
) -> None:
    """Ctrl-C reaches the whole group, as in a terminal; it is the agent's to handle."""
    fake(tmp_path / "bin", "codex", _WAITS)
    with start(tmp_path, "codex", "--url", NO_SERVER, "-m", model) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3  # the agent, the server, its engine
        (os.killpg if to_group else os.kill)(process.pid, number)
        assert process.wait(PATIENCE_S) == code
        if number == signal.SIGINT:
            assert process.stdout.readline() == "interrupted\n"
        if number == signal.SIGKILL:
            children = [child for child in children if "serve" in _words(child) or "start.py" in _words(child)]
        _, alive = psutil.wait_procs(children, PATIENCE_S)
        assert alive == []
        if number == signal.SIGKILL:  # the agent keeps its terminal
            os.killpg(process.pid, signal.SIGKILL)


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""

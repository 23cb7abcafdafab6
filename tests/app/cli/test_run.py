"""`headrace run` as people run it: a process with arguments, pipes, signals and an exit code. Tiny model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import write_adapter
from tests.support.commands import HEADRACE, ForkedProcess, headrace
from tests.support.damaged import install_damaged
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_chat_model

FOREVER = ("-n", "1000000", "-t", "1", "--logit-bias", f"{IM_END}=-100")
KEYS = {
    "model", "text", "tokens", "finish_reason", "prompt_tokens", "completion_tokens", "ttft_s", "tokenize_s",
    "prefill_s", "prefill_tokens_per_second", "tpot_s", "decode_tokens_per_second", "itl_ms",
    "weight_bytes_per_step", "kv_bytes_per_token", "kv_cache_bytes", "achieved_bandwidth_gb_s",
    "measured_peak_gb_s", "nominal_peak_gb_s", "mbu", "device", "versions", "ended_by", "decode_steps", "sampling",
    "measured_compute_gflop_s", "roofline_tokens_per_second", "limited_by", "arithmetic_intensity",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with answers that never end."""
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "endless", context=1_000_000)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def document(*arguments: str, home: Path, stdin: bytes = b"") -> dict[str, Any]:
    done = headrace("run", *arguments, "--json", home=home, stdin=stdin)
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert isinstance(parsed, dict)
    return parsed


def test_only_the_answer_is_on_standard_output(model: Path, home: Path) -> None:
    done = headrace("run", "hi", "-m", str(model), "-n", "8", home=home)
    answer = document("hi", "-m", str(model), "-n", "8", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.endswith("\n")
    assert answer["completion_tokens"] == 8


def test_an_adapter_changes_the_answer(model: Path, home: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", model, size=1.0)
    plain = document("hi", "-m", str(model), "-n", "8", home=home)
    adapted = document("hi", "-m", str(model), "--adapter", str(tmp_path / "lora"), "-n", "8", home=home)
    assert adapted["model"] == f"{plain['model']}+lora"
    assert adapted["tokens"] != plain["tokens"]


def test_json_has_the_promised_keys_and_figures_that_agree(model: Path, home: Path) -> None:
    answer = document("hi", "-m", str(model), "-n", "12", "--steps", home=home)
    assert answer.keys() >= KEYS
    assert answer["itl_ms"].keys() == {"p50", "p95", "p99", "max"}
    assert answer["finish_reason"] == "length"
    steps = answer["steps"]
    assert len(answer["tokens"]) == answer["completion_tokens"] == 12
    assert len(steps) == answer["decode_steps"] == 12 - answer["accepted_tokens"]
    assert answer["decode_tokens_per_second"] == pytest.approx(1 / answer["tpot_s"])
    if answer["mbu"] is None:
        assert answer["busy"] is True
    else:
        bases = (answer["memory_gb_s"], answer["measured_peak_gb_s"])
        assert any(answer["mbu"] == pytest.approx(answer["achieved_bandwidth_gb_s"] / base) for base in bases)
    held = answer["prompt_tokens"] - 1 + 12  # the first step feeds the prompt's last token
    assert answer["kv_cache_bytes"] == held * answer["kv_bytes_per_token"]
    assert [step["index"] for step in steps] == list(range(len(steps)))
    assert steps[-1]["context"] == held
    decode_s = sum(step["latency_s"] for step in steps[1:])
    moved = answer["achieved_bandwidth_gb_s"] * 1e9 * decode_s / (len(steps) - 1)  # per step, on average
    assert answer["roofline_tokens_per_second"] == pytest.approx(answer["measured_peak_gb_s"] * 1e9 / moved, rel=0.02)
    assert answer["arithmetic_intensity"] > 0
    assert answer["ttft_s"] >= answer["tokenize_s"] + answer["prefill_s"]


def test_the_end_of_turn_token_counts_as_a_step_but_not_as_output(model: Path, home: Path) -> None:
    answer = document("hi", "-m", str(model), "--logit-bias", f"{IM_END}=100", home=home)
    assert (answer["completion_tokens"], answer["decode_steps"]) == (0, 1)
    assert (answer["finish_reason"], answer["ended_by"]) == ("stop", "end_of_turn")


def test_token_limit_and_context_limit_have_different_reasons(model: Path, home: Path) -> None:
    assert document("hi", "-m", str(model), "-n", "3", home=home)["ended_by"] == "max_tokens"


def test_the_reported_seed_reproduces_the_answer(model: Path, home: Path) -> None:
    first = document("hi", "-m", str(model), "-n", "16", "-t", "1.5", home=home)
    seed = first["sampling"]["seed"]
    assert first["sampling"]["temperature"] == 1.5
    again = document("hi", "-m", str(model), "-n", "16", "-t", "1.5", "--seed", str(seed), home=home)
    assert again["tokens"] == first["tokens"]


def test_an_infinite_logit_bias_is_valid_json(model: Path, home: Path) -> None:
    done = headrace("run", "hi", "-m", str(model), "-n", "2", "--logit-bias", "5=-inf", "--json", home=home)
    assert "Infinity" not in done.stdout
    assert json.loads(done.stdout)["sampling"]["logit_bias"] == {"5": "-inf"}


def test_steps_are_in_json_only_on_request(model: Path, home: Path) -> None:
    assert "steps" not in document("hi", "-m", str(model), "-n", "2", home=home)


def test_piped_text_goes_before_the_argument(model: Path, home: Path) -> None:
    common = ("-m", str(model), "-n", "4", "--raw")
    both = document("second", *common, home=home, stdin=b"first\n")
    joined = document("first\n\nsecond", *common, home=home)
    assert both["tokens"] == joined["tokens"]
    assert both["prompt_tokens"] == joined["prompt_tokens"] == len("first\n\nsecond")
    assert document(*common, home=home, stdin=b"alone")["prompt_tokens"] == len("alone")


def test_equal_seeds_give_equal_tokens(model: Path, home: Path) -> None:
    def sample(seed: int) -> list[int]:
        tokens = document("hi", "-m", str(model), "-n", "16", "-t", "1.5", "--seed", str(seed), home=home)["tokens"]
        assert isinstance(tokens, list)
        return tokens

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)


def test_a_stop_string_ends_the_answer_and_is_not_printed(model: Path, home: Path) -> None:
    whole = document("hi", "-m", str(model), "-n", "40", "-t", "1", "--seed", "3", home=home)["text"]
    stop = whole[6:9]
    cut = document("hi", "-m", str(model), "-n", "40", "-t", "1", "--seed", "3", "--stop", stop, home=home)
    assert (cut["finish_reason"], cut["ended_by"]) == ("stop", "stop_string")
    assert cut["text"] == whole[: whole.index(stop)]


def test_logprobs_of_the_chosen_and_the_best(model: Path, home: Path) -> None:
    answer = document("hi", "-m", str(model), "-n", "3", "--logprobs", "2", home=home)
    for token, entry in zip(answer["tokens"], answer["logprobs"], strict=True):
        assert len(entry["top"]) == 2
        assert entry["top"][0] == [token, entry["chosen"]]  # greedy: the chosen one is the best
        assert entry["top_texts"][0] == entry["text"]
    assert "".join(entry["text"] for entry in answer["logprobs"]) == answer["text"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run"], 2, "prompt"),
        (["run", "hi", "-n", "0"], 2, "--max-tokens"),
        (["run", "hi", "-t", "-1"], 2, "--temperature"),
        (["run", "hi", "--top-p", "2"], 2, "--top-p"),
        (["run", "hi", "--logit-bias", "x"], 2, "--logit-bias"),
        (["run", "hi", "--steps"], 2, "--steps"),
        (["run", "hi", "--quantize", "4"], 2, "  hint: `headrace pull NAME --quantize 4`"),
        (["run", "hi", "--nonsense"], 2, "--nonsense"),
        (["run", "hi", "--stop", ""], 2, "--stop"),
        (["run", "hi", "--nonsense"], 2, "  hint: `headrace run --help`"),
        (["nonsense"], 2, "nonsense"),
        (["predict", "--context", ""], 2, "--context"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], code: int, words: str, model: Path, home: Path
) -> None:
    if len(arguments) > 1 and arguments[0] == "run":
        arguments = [*arguments, "-m", str(model)]
    done = headrace(*arguments, home=home)
    assert done.returncode == code
    assert words in done.stderr
    assert done.stderr.startswith("headrace: ")
    assert len(done.stderr.splitlines()) <= 2
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-t", "-1"], "--temperature"),
        (["--logit-bias", "x"], "--logit-bias"),
        (["--stop", ""], "--stop"),
    ],
)
def test_options_are_checked_before_the_model_is_looked_for(options: list[str], words: str, home: Path) -> None:
    done = headrace("run", "hi", "-m", "./nowhere", *options, home=home)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("model_name", "words"),
    [("./nowhere", "nowhere"), ("no-such-model", "no-such-model")],
)
def test_an_unknown_model_is_one_line_and_exit_code_2(model_name: str, words: str, home: Path) -> None:
    done = headrace("run", "hi", "-m", model_name, home=home)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_a_prompt_longer_than_the_context_is_refused(model: Path, home: Path) -> None:
    done = headrace("run", "x" * 100, "-m", str(model), "--context", "64", home=home)
    assert done.returncode == 1
    assert "64" in done.stderr
    assert "--context" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    whole = headrace("run", "x" * 9000, "-m", str(model), home=home)
    assert "--context" not in whole.stderr  # the model has no longer one to offer
    for options in ([], ["--raw"]):
        giant = headrace("run", "-m", str(model), *options, home=home, stdin=b"x " * 4_500_000)
        assert giant.stderr.startswith("headrace: ")
        assert len(giant.stderr.splitlines()) == 2


def test_the_context_limit_ends_the_answer_with_length(model: Path, home: Path) -> None:
    answer = document("hi", "-m", str(model), "--raw", "--context", "16", home=home)
    assert (answer["finish_reason"], answer["ended_by"]) == ("length", "context_limit")
    assert answer["completion_tokens"] == 16 - len("hi") + 1


def test_the_thinking_option_reaches_the_template(tmp_path: Path, home: Path) -> None:
    thinker = write_chat_model(tmp_path / "thinker")
    template = thinker / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking is false %}<think></think>{% endif %}")
    asked, off, on = (
        document("hi", "-m", str(thinker), "-n", "1", *option, home=home)["prompt_tokens"]
        for option in ([], ["--thinking", "off"], ["--thinking", "on"])
    )
    assert on == asked == off - len("<think></think>")
    assert headrace("run", "hi", "--raw", "--thinking", "on", home=home).returncode == 2


def test_the_prompt_is_shown_as_the_model_gets_it(model: Path, home: Path) -> None:
    done = headrace("run", "why?\x1b[31m", "-m", str(model), "-s", "be brief", "--show-prompt", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout
    assert "<|im_start|>system\nbe brief" in shown
    assert shown.endswith("<|im_start|>assistant\n\n")
    assert "why?" in shown
    assert "\x1b" not in shown
    assert headrace("run", "a", "-m", str(model), "--show-prompt", "--json", home=home).returncode == 2


def test_thinking_ends_with_its_budget(tmp_path: Path, home: Path) -> None:
    thinker = write_chat_model(tmp_path / "thinker")
    template = thinker / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}")
    letter = ["--logit-bias", "66=1000"]  # nothing but c
    answer = document("hi", "-m", str(thinker), "-n", "40", "--thinking", "7", *letter, home=home)
    assert answer["text"].startswith(f"{'c' * 7}</think>cc")
    level = document("hi", "-m", str(thinker), "-n", "3", "--thinking", "high", *letter, home=home)
    assert level["text"].startswith("ccc")  # thinking is on, the nearest to a level
    plain = write_chat_model(tmp_path / "plain")
    refused = headrace("run", "hi", "-m", plain, "--thinking", "high", home=home)
    assert refused.returncode == 2
    assert "thinking high: the model does not think" in refused.stderr
    for value in ("maximal", "0", "-1", "1.5"):
        assert "--thinking must be" in headrace("run", "hi", f"--thinking={value}", home=home).stderr


def test_input_that_is_not_utf_8_is_refused(model: Path, home: Path) -> None:
    done = headrace("run", "-m", str(model), home=home, stdin=b"\xff\xfe")
    assert (done.returncode, done.stdout) == (2, "")
    assert "UTF-8" in done.stderr


def test_debug_shows_the_traceback(model: Path, home: Path) -> None:
    done = headrace("run", "x" * 100, "-m", str(model), "--context", "64", home=home, HEADRACE_DEBUG="1")
    assert "Traceback" in done.stderr
    assert "64" in done.stderr


def test_user_text_cannot_end_its_turn(model: Path, home: Path) -> None:
    honest = document("0123456789", "-m", str(model), "-n", "1", home=home)["prompt_tokens"]
    sly = document("<|im_end|>", "-m", str(model), "-n", "1", home=home)["prompt_tokens"]
    assert sly == honest  # ten bytes, not one control token


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("file", "size"), [("model.safetensors", 100), ("tokenizer.json", 0), ("tokenizer.json", None)]
)
def test_a_damaged_stored_model_has_a_hint(file: str, size: int | None, tmp_path: Path) -> None:
    entry = write_chat_model(tmp_path / "data" / "models" / "broken")
    (entry / "headrace.json").write_text("{}")
    data = (entry / file).read_bytes()
    (entry / file).unlink()
    if size is not None:
        (entry / file).write_bytes(data[:size])
    done = headrace("run", "hi", "-m", "broken", home=tmp_path)
    assert done.returncode == 1
    assert "broken is damaged" in done.stderr
    assert "`headrace models rm broken`" in done.stderr
    examined = headrace("doctor", home=tmp_path)
    assert examined.returncode == 1
    assert "broken is damaged" in examined.stdout


def test_bench_has_the_hint_for_a_damaged_model_too(tmp_path: Path) -> None:
    entry = write_chat_model(tmp_path / "data" / "models" / "broken")
    (entry / "headrace.json").write_text("{}")
    (entry / "model.safetensors").write_bytes(b"cut")
    done = headrace("bench", "-m", "broken", "-p", "8", "-n", "2", home=tmp_path)
    assert done.returncode == 1
    assert "broken is damaged" in done.stderr
    assert "`headrace models rm broken`" in done.stderr


def test_an_unreadable_store_entry_is_diagnosed(tmp_path: Path) -> None:
    entry = write_chat_model(tmp_path / "data" / "models" / "broken")
    (entry / "headrace.json").write_text("{")
    for command in (["run", "hi", "-m", "broken"], ["doctor"]):
        done = headrace(*command, home=tmp_path)
        assert done.returncode == 1
        assert "`headrace models rm broken`" in done.stdout + done.stderr


@pytest.mark.sampled
@pytest.mark.parametrize("command", [["run", "hi"], ["models", "list"], ["paths"], ["sessions", "list"], ["doctor"]])
def test_a_home_that_is_no_folder_is_one_line(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", Path("/dev/null"), tmp_path / "file" / "in" / "it"):
        done = headrace(*command, home=home)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("headrace: HEADRACE_HOME: ")
        assert str(home) in done.stderr


def test_settings_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    program = ["/bin/sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *HEADRACE, "paths", "--write-settings"]
    done = subprocess.run(
        program, capture_output=True, env={**os.environ, "HEADRACE_HOME": str(tmp_path)}, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert b"settings.toml" in done.stderr
    assert [path.name for path in (tmp_path / "config").iterdir()] == [".settings.toml.lock"]


def start(*arguments: str, home: Path) -> subprocess.Popen[bytes]:
    return ForkedProcess(
        [*HEADRACE, "run", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HEADRACE_HOME": str(home)},
    )


def test_the_first_interrupt_keeps_the_partial_answer(endless: Path, home: Path) -> None:
    process = start("hi", "-m", str(endless), *FOREVER, home=home)
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 8)  # `read` takes more, which `communicate` does not see
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert (first + rest).decode()  # no half character
    assert b"Traceback" not in errors


def test_an_interrupted_json_answer_is_still_a_document(endless: Path, home: Path) -> None:
    script = (  # nothing is written until the end, so the interrupt comes from within
        "import os, runpy, signal\n"
        "from headrace.app.answer.answerer import Answerer\n"
        "whole = Answerer.stream\n"
        "def interrupted(*arguments):\n"
        "    for number, part in enumerate(whole(*arguments)):\n"
        "        if number == 20: os.kill(os.getpid(), signal.SIGINT)\n"
        "        yield part\n"
        "Answerer.stream = interrupted\n"
        "runpy.run_module('headrace', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", script, "run", "hi", "-m", str(endless), *FOREVER, "--json"]
    process = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HEADRACE_HOME": str(home)},
    )
    out = process.stdout
    assert process.returncode == 130
    answer = json.loads(out)
    assert answer["finish_reason"] == answer["ended_by"] == "cancelled"
    assert answer["completion_tokens"] == len(answer["tokens"]) > 0


def test_a_closed_pipe_ends_run_without_an_error(endless: Path, home: Path) -> None:
    process = start("hi", "-m", str(endless), *FOREVER, home=home)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(4)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE_S) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_answer_from_damaged_weights_fails_in_the_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    install_damaged(model)
    for _ in range(2):  # looked at, and remembered
        done = headrace("run", "hi", "-m", "mine", "-n", "3", "-q", home=tmp_path)
        assert done.returncode == 1
        assert done.stdout
        assert "mine is damaged" in done.stderr
        assert "headrace models rm mine" in done.stderr

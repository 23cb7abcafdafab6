"""Time to first token turn by turn: a long conversation with the default model in the real app.

    python -m tests.bench.turns [--turns 20] [--rounds 3] [--pauses 0,0.6]

Every question has about as many tokens as the one before, so what grows is the past it is read against. `--pauses`:
seconds between the last letter of a question and Enter; the app reads ahead in pauses of typing (0 leaves no time to).
Per pause, the median over rounds of the stored TTFT of turns 2 and the last, and their ratio. A benchmark for people:
nothing here passes or fails.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from headrace.runtime.metrics.telemetry import Summary
from tests.bench.ui_tax import Terminal, newest_messages, prepare

_QUESTION = (
    "Question {turn}: tell me about the mill on the river, its wheel, the people who worked there, what they ate, how "
    "the seasons changed their work, and why the miller's daughter left for the city in the year {year}. Answer in a "
    "few sentences, please, and name two birds."
)
_ANSWER_TOKENS = 50
_PATIENCE_S = 120.0


def talk(home: Path, turns: int, pause_s: float) -> list[Summary]:
    """The figures of every answer of one conversation."""
    env = prepare(home, _ANSWER_TOKENS, panel=True)
    terminal = Terminal([sys.executable, "-m", "headrace", "chat"], (120, 40), env)
    try:
        terminal.read_until(b"message, or")
        terminal.read_until(b"loaded in")
        for turn in range(1, turns + 1):
            terminal.type(_QUESTION.format(turn=turn, year=1800 + turn))
            terminal.read_for(pause_s)
            terminal.type("\r")
            deadline = time.monotonic() + _PATIENCE_S
            while len(_answers(home)) < turn:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"turn {turn} never ended")
                terminal.read_for(0.2)
            terminal.read_for(1.0)  # as a reader would
        return _answers(home)
    finally:
        terminal.leave()


def _answers(home: Path) -> list[Summary]:
    messages = newest_messages(home)
    return [message.metrics for message in messages if message.role == "assistant" and message.metrics]


def main() -> None:
    """Talk and report."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--turns", type=int, default=20)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--pauses", default="0,0.6")
    given = options.parse_args()
    pauses = [float(pause) for pause in given.pauses.split(",")]
    found: dict[float, list[list[Summary]]] = {pause: [] for pause in pauses}
    for _ in range(given.rounds):
        for pause in pauses:
            with tempfile.TemporaryDirectory() as folder:
                found[pause].append(talk(Path(folder), given.turns, pause))
    for pause, rounds in found.items():
        second, last = (statistics.median(talk[turn].ttft_s or 0.0 for talk in rounds) for turn in (1, -1))
        metrics = rounds[0][-1]
        reused = f"{metrics.reused_tokens} of {metrics.prompt_tokens} tokens reused"
        print(
            f"Enter {pause:g} s after the last letter: TTFT of turn 2 {second * 1e3:.0f} ms, of turn {given.turns} "
            f"{last * 1e3:.0f} ms ({last / second:.1f} times; {reused})"
        )


if __name__ == "__main__":
    main()

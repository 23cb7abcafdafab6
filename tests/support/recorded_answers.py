"""Recorded greedy answers of another implementation: a JSON file with one line per prompt and per step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answer:
    """`steps[n]` holds the peer's best (token, logit) pairs after prompt and n tokens of its own, best first."""

    prompt: list[int]
    steps: list[list[tuple[int, float]]]

    @property
    def tokens(self) -> list[int]:
        return [best[0][0] for best in self.steps]


def read(path: Path) -> dict[str, Answer]:
    """Answers by prompt name."""
    return {
        name: Answer(each["prompt"], [[(token, logit) for token, logit in step] for step in each["steps"]])
        for name, each in json.loads(path.read_text())["answers"].items()
    }


def write(path: Path, recorded_with: str, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what `read` reads; `recorded_with` names the implementation and its version."""
    parts = []
    for name, each in answers.items():
        steps = ",\n      ".join(json.dumps(step) for step in each["steps"])
        prompt = json.dumps(each["prompt"])
        parts.append(f'    {json.dumps(name)}: {{\n    "prompt": {prompt},\n    "steps": [\n      {steps}\n    ]}}')
    body = ",\n".join(parts)
    path.write_text(f'{{\n  "recorded_with": {json.dumps(recorded_with)},\n  "answers": {{\n{body}\n  }}\n}}\n')

"""Prompts for parity runs on the default model: prose, code, digits, emoji, other scripts, a chat turn, a long text."""


def _chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


_CODE = '''import heapq

def dijkstra(graph: dict[str, list[tuple[str, float]]], start: str) -> dict[str, float]:
    """Shortest distance from start to every reachable node."""
    best = {start: 0.0}
    queue = [(0.0, start)]
    while queue:
'''

_STOPS = (
    "the mill below the weir",
    "a lock with two pairs of gates",
    "the aqueduct over the valley",
    "a tunnel that smells of moss",
    "the reservoir behind the hill",
    "a swing bridge that nobody opens",
    "the old pumping station",
    "a basin full of reeds",
    "the house of the lock keeper",
    "a field of sunflowers",
)
_LONG = "A walk along the canal, written down in the evening.\n\n" + "\n".join(
    f"Stop {number}: after {3 * number + 2} minutes we came to {stop}. "
    f"The water stood {number * 7 % 5 + 1} hand widths below the edge, and we met {number * 11 % 6} people there. "
    f"Someone had painted the number {number * number + 40} on the wall, and next to it a small {colour} fish."
    for number, (stop, colour) in enumerate(
        zip(_STOPS, ("red", "blue", "green", "white", "black") * 2, strict=True), start=1
    )
)

PROMPTS: dict[str, str] = {
    "prose": "The headrace of a water mill is the channel that",
    "question": _chat("Why is the sky blue? Answer in two sentences."),
    "code": _CODE,
    "digits": "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73,",
    "emoji": "Weather report: Monday ☀️ 24°C, Tuesday 🌧️ 17°C, Wednesday ⛈️ 15°C, Thursday 🌤️ 21°C, Friday",
    "french": "Il était une fois, dans un petit village au bord de la rivière, un meunier qui",
    "japanese": "日本の首都は東京です。フランスの首都は",
    "russian": "Столица России — Москва. Столица Франции —",
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "known_for": "',
    "table": "| country | capital |\n|---|---|\n| Italy | Rome |\n| Norway | Oslo |\n| Japan |",
    "long": _LONG + "\n\nWhat we will remember of this walk is",
}

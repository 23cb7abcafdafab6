"""Rank 0 of tests: loads a model on hosts, and says on standard output in which phase it is.

    python -m tests.app.hosts.driver MODEL HOSTS SPLIT PHASE

It stays in PHASE (load, prefill, decode, idle) until it is killed or another rank is lost. Phase `join` begins when the
ranks are told to join the ring. While it decodes, it cuts the control channel itself in phase `cut`, and in phase
`hang` no longer has the other rank take part in passes.
"""

import socket
import sys
import time

from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import AnswerOptions
from headrace.app.config.load_options import HostsChoice
from headrace.app.hosts.load import load_on_hosts
from headrace.app.hosts.start import say_lost, start_ranks
from headrace.models.registry.resolve import resolve
from headrace.runtime.ranks import pass_limit
from headrace.runtime.ranks.group import Group
from tests.support.tiny_chat import IM_END


def main(model: str, hosts: str, split: str, phase: str) -> None:
    choice = HostsChoice(hosts, split)
    resolved = resolve(model)
    if phase == "load":  # ranks are connected, and nothing is read
        _ = start_ranks(choice, resolved, say_lost)
        _wait("load")
    if phase == "join":
        join = Group.join
        Group.join = lambda *names: (print("join", flush=True), join(*names))[1]  # type: ignore[method-assign]
    loaded, ranks = load_on_hosts(choice, resolved)
    answerer = Answerer(loaded)
    if phase in ("idle", "join"):
        _wait("idle")
    prompt = answerer.encode([{"role": "user", "content": "tell " * (700 if phase == "prefill" else 1)}])
    print("prefill", flush=True)
    while True:
        options = AnswerOptions(max_tokens=3000, temperature=0, logit_bias={IM_END: -100.0})
        for number, _ in enumerate(answerer.stream(answerer.prepare(prompt, options))):
            if number == 5:
                print(phase if phase in ("cut", "hang") else "decode", flush=True)
            if number == 9 and phase == "hang":
                pass_limit.LEAST_S = 0.5
                ranks.leader.tell = lambda _record: None  # type: ignore[method-assign]
            if number == 9 and phase == "cut":
                sys.stdin.read()  # until the test has found the other rank
                ranks.leader._links[1]._socket.shutdown(socket.SHUT_RDWR)


def _wait(phase: str) -> None:
    print(phase, flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

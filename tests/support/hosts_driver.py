"""Rank 0 of tests: loads a model on hosts, and says on standard output in which phase it is.

    python -m tests.support.hosts_driver MODEL HOSTS SPLIT PHASE

`killed_hosts.Run` starts it, and waits for the line that names PHASE. It stays in that phase until it is killed or
another rank is lost:

    load      the ranks are connected, and have read nothing
    join      the ranks are told to join the ring; idle follows
    idle      the model is loaded
    prefill   of a prompt of several chunks
    decode    one answer after another
    cut       decode; then it cuts the control channel itself, once its standard input is closed
    hang      decode; then the other rank gets no more passes
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

# Events of an answer after which the phase is announced, and after which `cut` and `hang` begin
_ANNOUNCED_AT = 5
_HARMED_AT = 9


def main(model: str, hosts: str, split: str, phase: str) -> None:
    choice = HostsChoice(hosts, split)
    resolved = resolve(model)
    if phase == "load":
        _ = start_ranks(choice, resolved, say_lost)
        _wait("load")
    if phase == "join":
        _announce_join()
    loaded, ranks = load_on_hosts(choice, resolved)
    answerer = Answerer(loaded)
    if phase in ("idle", "join"):
        _wait("idle")
    words = 1
    if phase == "prefill":
        words = 700  # a prefill that lasts until the test has found the other rank
    prompt = answerer.encode([{"role": "user", "content": "tell " * words}])
    print("prefill", flush=True)
    decode_phase = "decode"
    if phase in ("cut", "hang"):
        decode_phase = phase
    while True:
        options = AnswerOptions(max_tokens=3000, temperature=0, logit_bias={IM_END: -100.0})
        for number, _ in enumerate(answerer.stream(answerer.prepare(prompt, options))):
            if number == _ANNOUNCED_AT:
                print(decode_phase, flush=True)
            if number == _HARMED_AT and phase == "hang":
                pass_limit.LEAST_S = 0.5  # so that the test does not wait for eight seconds
                ranks.leader.tell = lambda _record: None  # type: ignore[method-assign]
            if number == _HARMED_AT and phase == "cut":
                sys.stdin.read()  # until the test has found the other rank
                ranks.leader._links[1]._socket.shutdown(socket.SHUT_RDWR)


def _announce_join() -> None:
    """Have `Group.join` print the phase before it joins."""
    join = Group.join

    def announced(*names: str) -> Group:
        print("join", flush=True)
        return join(*names)

    Group.join = announced  # type: ignore[method-assign, assignment]


def _wait(phase: str) -> None:
    """Announce a phase, and stay in it until a signal ends the process."""
    print(phase, flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

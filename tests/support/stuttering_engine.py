"""A process that replaces the engine and sends given bytes in given pieces. Started by `EngineLink`.

It is told by the names of ModelSpecs: `say N` sends N whole messages in one go, `half N` and `rest` the two parts of
one that carries N bytes, `stop` and `die` end in the signals of that name, `leave` in exit code 3. `starve` ends as
MLX does where a thread of Metal's own is told that memory ran out, `abort` in the same signal. `hang up` closes the
connection and stays. `lose` ends as an engine on several machines does.
"""

import os
import pickle
import select
import signal
import socket
import sys
from pathlib import Path

sys.path.append(str(Path(sys.argv[1]).parent))
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.events import LoadProgress
from headrace.app.engine.wire import Channel


def main(descriptor: int) -> None:
    """Run commands until the socket closes."""
    connection = socket.socket(fileno=descriptor)
    channel = Channel[LoadProgress, ModelSpec](connection)
    rest = b""
    while channel.ended_at is None:
        select.select([connection], [], [])
        for command in channel.receive():
            assert command.name is not None
            what, _, number = command.name.partition(" ")
            if what == "say":
                for i in range(int(number)):
                    channel.send(LoadProgress("saying", i, None), waits=True)
            elif what == "half":
                body = pickle.dumps(LoadProgress("x" * int(number), 0, None))
                whole = len(body).to_bytes(8, "big") + body
                connection.sendall(whole[: len(whole) // 2])
                rest = whole[len(whole) // 2 :]
            elif what == "rest":
                connection.sendall(rest)
            elif what == "hang":
                connection.close()
                signal.pause()
            elif what == "leave":
                sys.exit(3)
            elif what == "lose":
                print("headrace: rank 1 (mac2) has closed the connection\n  hint: x", file=sys.stderr, flush=True)
                os._exit(1)
            elif what == "starve":
                print("[METAL] Command buffer execution failed: Insufficient Memory", file=sys.stderr, flush=True)
                os.abort()
            else:
                os.kill(os.getpid(), {"stop": signal.SIGSTOP, "die": signal.SIGKILL, "abort": signal.SIGABRT}[what])


if __name__ == "__main__":
    main(int(sys.argv[2]))

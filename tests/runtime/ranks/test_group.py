"""Collectives of the ranks that share a model, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.runtime.ops import native
from tests.support.patience import PATIENCE_S
from tests.support.rank_process import hostfile

_RANK = """
import json, mlx.core as mx
from headrace.runtime.ranks.group import Group
group = Group.join("127.0.0.1")
x = mx.arange(6.0).reshape(2, 3) * (group.rank + 1)
other = 1 - group.rank
sent, received = group.send(x, other), group.receive((2, 3), mx.float32, other)
mx.eval(sent)
print(json.dumps([group._peer is not None, group.all_sum(x).tolist(), group.all_gather(x).tolist(), received.tolist()]))
"""


@pytest.mark.sampled
@pytest.mark.skipif(not native.status().available, reason="peers need the native kernels")
@pytest.mark.parametrize("stock", [False, True])
def test_two_ranks_have_a_connection_of_their_own_if_both_have_native_kernels(tmp_path: Path, stock: bool) -> None:
    hosts = hostfile(tmp_path / "hosts.json", 2)
    ranks = []
    for rank in range(2):
        own = {
            "MLX_RANK": str(rank),
            "MLX_HOSTFILE": str(hosts),
            **({"HEADRACE_KERNELS": "reference"} if stock and rank else {}),
        }
        command = [sys.executable, "-c", _RANK]
        ranks.append(subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True))
    answers = [json.loads(rank.communicate(timeout=PATIENCE_S)[0]) for rank in ranks]
    one = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    two = [[2 * number for number in row] for row in one]
    three = [[3 * number for number in row] for row in one]
    for rank, (peer, total, gathered, received) in enumerate(answers):
        assert peer == (not stock)
        assert (total, gathered, received) == (three, [*one, *two], one if rank else two)

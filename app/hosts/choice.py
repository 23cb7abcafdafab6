"""The command line's choice of hosts; imports nothing."""

from dataclasses import dataclass

SPLITS = ("tensor", "pipeline", "auto")


@dataclass(frozen=True, slots=True)
class HostsChoice:
    """hosts: a hostfile or names, as after --hosts. split: one of SPLITS."""

    hosts: str
    split: str = "auto"

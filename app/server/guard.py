"""Checks of every request before it is read: host, origin and key.

A page in a browser can send requests to a server on this machine, also under a name that leads here (DNS rebinding).
So the Host header has to name this machine, and an Origin has to be allowed. With a key, any Host is accepted: such a
page does not know the key.

Guard: tests/app/server/test_guard.py.
"""

from collections.abc import Mapping
from hmac import compare_digest
from ipaddress import ip_address

from msgspec import Struct

from headrace.app.server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key."""


class Rules(Struct, frozen=True):
    """Rules of access.

    host: the address that the server listens on.
    key: that requests must have; None: none.
    origins: web pages that may call; `*`: any.
    """

    host: str
    key: str | None = None
    origins: frozenset[str] = frozenset()

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise ApiError for a request that is not allowed. headers: by lower-case name."""
        host = headers.get("host", "")
        if self.key is None and not _is_local(host, self.host):
            message = "the Host header does not name this machine; --api-key KEY allows any"
            raise ApiError(403, message, "forbidden_host")
        origin = headers.get("origin")
        if origin is not None and "*" not in self.origins and origin not in self.origins:
            message = "the Origin header names a page that is not allowed; --allow-origin URL allows it"
            raise ApiError(403, message, "forbidden_origin")
        preflight = method == "OPTIONS" and origin is not None  # browsers send it without the key
        if self.key is not None and path not in OPEN_PATHS and not preflight and not self._has_key(headers):
            raise ApiError(401, "a valid API key is needed", "invalid_api_key")

    def cors(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the response headers that let the asking page read a refusal, if its origin is allowed."""
        origin = headers.get("origin")
        if origin is None or not self.origins.intersection({"*", origin}):
            return {}
        return {"access-control-allow-origin": "*" if "*" in self.origins else origin, "vary": "Origin"}

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        assert self.key is not None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            key = token.strip()
        else:
            key = headers.get("x-api-key", "")
        return compare_digest(key.encode("utf-8", "replace"), self.key.encode("utf-8", "replace"))


def is_loopback(host: str) -> bool:
    """Return whether an address or name is this machine's own, which no other machine reaches."""
    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local(value: str, host: str) -> bool:
    """Return whether a Host header names this machine, with any port."""
    name = value.strip()
    if name.startswith("["):
        name, end, port = name[1:].partition("]")
        if not end or (port and not (port.startswith(":") and port[1:].isdigit())):  # [::1].example.com
            return False
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    return is_loopback(name) or name == host

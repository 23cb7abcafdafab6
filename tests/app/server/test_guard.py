"""Host, Origin and key: what is let in."""

import pytest

from headrace.app.server.errors import ApiError
from headrace.app.server.guard import Rules, is_loopback

LOCAL = Rules("127.0.0.1")
KEYED = Rules("0.0.0.0", key="s3cret")


def status(rules: Rules, path: str = "/v1/models", method: str = "GET", **headers: str) -> int:
    try:
        rules.check(method, path, {name.replace("_", "-"): value for name, value in headers.items()})
    except ApiError as error:
        return 0 if "s3cret" in error.message else error.status
    return 200


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "127.9.9.9", "[::1]:8080", "[::1]"])
def test_local_host_headers_are_accepted(host: str) -> None:
    assert status(LOCAL, host=host) == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example:8080", "127.0.0.1.evil.example", "10.0.0.1", "[::2]", "::1:x:"]
)
def test_other_hosts_are_refused_without_a_key(host: str) -> None:
    assert status(LOCAL, host=host) == 403
    assert status(Rules("127.0.0.1", key="k"), host=host, authorization="Bearer k") == 200


def test_origins_are_refused_unless_allowed() -> None:
    allowed = Rules("127.0.0.1", origins=frozenset({"http://localhost:3000"}))
    assert status(LOCAL, host="localhost", origin="http://localhost:3000") == 403
    assert status(LOCAL, host="localhost", origin="null") == 403
    assert status(allowed, host="localhost", origin="http://localhost:3000") == 200
    assert status(allowed, host="localhost", origin="http://localhost:3001") == 403
    assert status(Rules("127.0.0.1", origins=frozenset("*")), host="localhost", origin="https://a.example") == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"authorization": "Bearer s3cret"}, 200),
        ({"authorization": "bearer s3cret"}, 200),
        ({"authorization": "Bearer s3cre"}, 401),
        ({"authorization": "Basic s3cret"}, 401),
        ({"authorization": "Bearer é"}, 401),
        ({"x_api_key": "s3cret"}, 200),
        ({"x_api_key": "S3cret"}, 401),
    ],
)
def test_a_key_is_needed_if_there_is_one(headers: dict[str, str], expected: int) -> None:
    assert status(KEYED, host="anything", **headers) == expected
    assert status(KEYED, "/health", host="anything", **headers) == 200


def test_a_preflight_of_an_allowed_page_needs_no_key() -> None:
    rules = Rules("0.0.0.0", key="s3cret", origins=frozenset({"http://a"}))
    assert status(rules, method="OPTIONS", origin="http://a") == 200
    assert status(rules, method="OPTIONS", origin="http://b") == 403
    assert status(rules, method="OPTIONS") == 401


def test_addresses_reachable_from_other_machines_are_known() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.2", "example.com", "")))


@pytest.mark.parametrize("host", ["[::1].example.com", "[::1]x", "[::1]:80.example.com", "[::1", "[::1]:"])
def test_a_name_that_begins_like_an_address_is_no_address(host: str) -> None:
    assert status(LOCAL, host=host) == 403


def test_a_refusal_names_the_header_and_the_flag() -> None:
    with pytest.raises(ApiError, match=r"Host header .* --api-key"):
        LOCAL.check("GET", "/v1/models", {"host": "host.docker.internal:8080"})
    with pytest.raises(ApiError, match=r"Origin header .* --allow-origin"):
        LOCAL.check("GET", "/v1/models", {"host": "localhost", "origin": "vscode-webview://1a"})

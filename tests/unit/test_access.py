"""Whose a request is, with keys and without."""

from __future__ import annotations

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from tokenwire.frontend import access, intake
from tokenwire.frontend.access import GRANT, grant_of, key_name_of
from tokenwire.frontend.kept import owner_of
from tokenwire.frontend.ledger import Ledger
from tokenwire.frontend.quotas import Quotas
from tokenwire.protocol.api_keys import ApiKey

LEDGER = Ledger.create()
QUOTAS = Quotas(LEDGER, lambda _name, _limit: None, lambda _name, _kind, _number: None)


def of(name: str, key: str) -> web.Request:
    """Return a request that was let in with a key of *name*."""
    headers = {"Authorization": f"Bearer {key}"}
    request = make_mocked_request("POST", "/v1/completions", headers=headers)
    request[GRANT] = QUOTAS.enter(ApiKey(name, b""))
    return request


def asked(**headers: str) -> web.Request:
    """Return a request whose key nobody has looked at."""
    return make_mocked_request("POST", "/v1/completions", headers=headers)


def identity_of(request: web.Request) -> str | None:
    """Return whose a request is."""
    return access.identity_of(request, grant_of(request))


def tenant_of(request: web.Request) -> bytes:
    """Return the same, as it waits for its turn."""
    return intake.tenant_of(request, identity_of(request))


def test_a_request_is_its_key_names() -> None:
    """Whichever key of that name it has; another name is somebody else."""
    first, second, other = of("a", "1"), of("a", "2"), of("b", "1")
    assert identity_of(first) == identity_of(second) != identity_of(other)
    assert tenant_of(first) == tenant_of(second) != tenant_of(other)
    assert key_name_of(first) == "a"
    assert grant_of(first) is not None


def test_without_keys_it_is_its_headers() -> None:
    """Or its address's, where it has none; no header makes it one of a name."""
    given, none = asked(Authorization="Bearer x"), asked()
    assert identity_of(given) == "Bearer x"
    assert identity_of(none) is None
    assert tenant_of(given) != tenant_of(none)
    assert owner_of(identity_of(none)) == b""
    assert (key_name_of(given), grant_of(given)) == (None, None)
    for text in ("a", "\\0a", "%00a", "Bearer a"):
        forged = asked(Authorization=text)
        assert identity_of(forged) != identity_of(of("a", "1"))
        assert owner_of(identity_of(forged)) != owner_of(identity_of(of("a", "1")))

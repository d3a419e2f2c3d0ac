"""Who may talk to a server: the rules on Host, Origin and token, as one check of a request's headers.

A server on loopback is reachable by every web page that the user opens: a page can send requests to 127.0.0.1, and through a
DNS name that resolves to 127.0.0.1 (DNS rebinding) it can even read the answers. The Host header then holds that DNS name,
and the Origin header names the page; so both are checked. A server that listens beyond loopback must have a token.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from urllib.parse import parse_qs

from ..errors import ConfigError
from .address import is_loopback

MIN_TOKEN = 8


def token_from(variable: str | None, setting: str) -> str | None:
    """The token in the environment variable that `setting` names, if it names one. Raises ConfigError if there is no token."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token or not token.isascii() or any(letter.isspace() for letter in token):
        raise ConfigError(f"{setting} names {variable}, but that variable holds no token: set it to the server's")
    return token


def check_token(token: str, what: str = "the token") -> None:
    """Raises ConfigError for a token that is too short, or that a header cannot hold."""
    if not token.isascii() or len(token) < MIN_TOKEN or any(letter.isspace() for letter in token):
        raise ConfigError(f"{what} must have {MIN_TOKEN} characters or more, in ASCII and without spaces")


class Guard:
    """The rules of one server. `own_pages`: the server's own HTML pages may send requests to it.

    A program shows the token in the Authorization header. With `cookie`, a browser may show it in the cookie of that name, or
    in the query as `token=...`, as in the address that the server prints. A browser's request that can change something (any
    method but GET and HEAD) must then name its Origin. `keyed`: the server asks for a key itself, beside this check.

    Raises ConfigError if `host` is not loopback and there is no token, or if the token is not usable. `cure` ends the sentence
    that asks for a token, such as "set AGENTFLY_SEARCH_TOKEN".
    """

    def __init__(
        self,
        host: str,
        token: str | None = None,
        *,
        own_pages: bool = False,
        cookie: str | None = None,
        cure: str = "set a token",
        keyed: bool = False,
    ) -> None:
        if not is_loopback(host) and not (token or keyed):
            raise ConfigError(f"a server on {host} can be reached from other machines and needs a token: {cure}")
        if token:
            check_token(token)
        self.local = is_loopback(host)
        self._token = token
        self._own_pages = own_pages
        self._cookie = cookie
        self._cure = cure

    @property
    def has_token(self) -> bool:
        return bool(self._token)

    def refuse(self, headers: Sequence[tuple[str, str]], method: str = "GET", query: str = "") -> tuple[int, str] | None:
        """The status and sentence to refuse a request with, or None if it may pass."""
        by_name: dict[str, list[str]] = {}
        for name, value in headers:
            by_name.setdefault(name.lower(), []).append(value.strip())
        hosts = by_name.get("host", [])
        if len(hosts) != 1:
            return 400, "a request has one Host header"
        if self.local and not is_loopback(re.sub(r":\d{0,5}$", "", hosts[0])):
            return 403, "this server answers requests for localhost alone"
        if "origin" in by_name and not (self._own_pages and by_name["origin"] == [f"http://{hosts[0]}"]):
            return 403, "web pages of other origins may not connect"
        if not self._token or same_token(by_name.get("authorization", [""])[0], f"Bearer {self._token}"):
            return None
        if not (self._in_cookie(by_name.get("cookie", [])) or self.in_query(query)):
            return 401, f"the token is missing or wrong: {self._cure}"
        if method not in ("GET", "HEAD") and "origin" not in by_name:
            return 403, "a page that changes something must name its Origin"
        return None

    def in_query(self, query: str) -> bool:
        """Whether the query of a request shows the token. The server then sets its cookie and redirects to the bare address."""
        if not self._token or self._cookie is None:
            return False
        return any(same_token(given, self._token) for given in parse_qs(query[:4096]).get("token", ()))

    def _in_cookie(self, headers: Sequence[str]) -> bool:
        if not self._token or self._cookie is None:
            return False
        pairs = (part.strip().partition("=") for header in headers for part in header.split(";"))
        return any(name == self._cookie and same_token(value, self._token) for name, _, value in pairs)


def same_token(given: str, wanted: str) -> bool:
    """Whether a stranger's token is the wanted one; takes the same time for each of a length."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())

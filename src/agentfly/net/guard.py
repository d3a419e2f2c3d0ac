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


class Guard:
    """The rules of one server. `own_pages`: the server's own HTML forms may post to it.

    Raises ConfigError if `host` is not loopback and there is no token, or if the token is not usable. `cure` ends the sentence
    that asks for a token, such as "set AGENTFLY_SEARCH_TOKEN".
    """

    def __init__(self, host: str, token: str | None = None, *, own_pages: bool = False, cure: str = "set a token") -> None:
        if not is_loopback(host) and not token:
            raise ConfigError(f"a server on {host} can be reached from other machines and needs a token: {cure}")
        if token and (not token.isascii() or len(token) < MIN_TOKEN or any(letter.isspace() for letter in token)):
            raise ConfigError(f"the token must have {MIN_TOKEN} characters or more, in ASCII and without spaces")
        self.local = is_loopback(host)
        self._token = token
        self._own_pages = own_pages
        self._cure = cure

    @property
    def has_token(self) -> bool:
        return bool(self._token)

    def refuse(self, headers: Sequence[tuple[str, str]]) -> tuple[int, str] | None:
        """The status and sentence to refuse a request with, or None if it may pass."""
        found: dict[str, list[str]] = {}
        for name, value in headers:
            found.setdefault(name.lower(), []).append(value.strip())
        hosts = found.get("host", [])
        if len(hosts) != 1:
            return 400, "a request has one Host header"
        if self.local and not is_loopback(re.sub(r":\d{0,5}$", "", hosts[0])):
            return 403, "this server answers requests for localhost alone"
        if "origin" in found and not (self._own_pages and found["origin"] == [f"http://{hosts[0]}"]):
            return 403, "web pages of other origins may not connect"
        if self._token:
            given = found.get("authorization", [""])[0].encode("utf-8", "replace")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                return 401, f"the token is missing or wrong: {self._cure}"
        return None

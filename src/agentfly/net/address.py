"""Host names and URLs: which hosts are this machine, and which URLs a setting may hold."""

from __future__ import annotations

from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def is_loopback(host: str | None) -> bool:
    """Whether a host name means this machine, by its spelling alone: nothing is resolved."""
    return host is not None and host.strip("[]").lower() in LOOPBACK


def is_url(text: str, schemes: tuple[str, ...] = ("http", "https")) -> bool:
    """Whether `text` is a URL with a host, and without a user name or password."""
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0 and not (parts.username or parts.password)
    except ValueError:  # such as a port that is not a number
        return False


def url_of(scheme: str, host: str, port: int) -> str:
    """The URL of a server, with the brackets that an IPv6 address needs."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

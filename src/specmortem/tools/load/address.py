"""Where requests may go: this machine, or a host that the caller named."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from specmortem.errors import BadInputError
from specmortem.tools.load.text import printable


def base_url(url: str, allowed_hosts: Collection[str] = ()) -> str:
    """The server's root without a trailing `/v1`, after a check of its host.

    Raises BadInputError for what is not a plain http(s) address, holds credentials, or is neither this machine nor
    one of `allowed_hosts`.
    """
    shown = printable(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise BadInputError(f"--url {shown}: {error}; expected for example http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        raise BadInputError(f"--url {shown} is no http address; expected for example http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise BadInputError("--url holds credentials, which would be stored; give a key with --api-key-env")
    if parts.query or parts.fragment:
        raise BadInputError(f"--url {shown}: give the server's root, without a query or a fragment")
    _check_host(host, allowed_hosts)
    netloc = f"[{host}]" if ":" in host else host
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{netloc}{'' if port is None else f':{port}'}{path}"


def _check_host(host: str, allowed_hosts: Collection[str]) -> None:
    if is_loopback(host) or host in {name.strip("[]").lower() for name in allowed_hosts}:
        return
    raise BadInputError(
        f"{printable(host)} is not this machine; to send load there, which its owner must have agreed to, "
        f"add --allow-host {printable(host)}"
    )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine: a loopback address, or `localhost` where it stands for nothing else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        if host != "localhost":
            return False
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def api_key(variable: str | None) -> str:
    """The API key in an environment variable; empty where no variable is named. Its value is in no message.

    Raises BadInputError when the variable is unset, empty, or no header could carry it.
    """
    if variable is None:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise BadInputError(f"--api-key-env {printable(variable)}: that environment variable is not set")
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise BadInputError(
            f"--api-key-env {printable(variable)}: the key holds characters that no header can carry"
        )
    return key

"""Addresses in options, HOST:PORT."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from protocol.settings.machine import WILDCARDS
from protocol.short_repr import short_repr


def check_host_name(host: str) -> None:
    """Raises ValueError if Python cannot look up this host name or address."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ValueError(
            f"{short_repr(host)} is not the name or address of a host"
        ) from error


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT, with an IPv6 address as host in brackets.

    Raises:
        ValueError: `address` has a different form, or its host is a wildcard or no
            valid name.
    """
    try:
        parts = urlsplit(f"//{address}")
        host = parts.hostname
        port = parts.port
        check_host_name(host or "")
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != address or parts.username:
        raise ValueError(
            f"{short_repr(address)} is not HOST:PORT; write for example 10.0.0.1:29500"
        )
    if host in WILDCARDS:
        raise ValueError(
            f"other processes cannot connect to {host}, which means every address of a "
            "machine; give a name or one address of the machine"
        )
    return host, port


def _check_address(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, AfterValidator(_check_address)]

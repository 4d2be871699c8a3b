"""Free TCP ports of this machine."""

from __future__ import annotations

import socket

__all__ = ["bindable", "free_port"]


def free_port() -> int:
    """A port that is free on all addresses now."""
    return bindable(0)


def bindable(port: int) -> int:
    """``port``, or any for 0, if it can be bound on all addresses.

    Raises:
        OSError: it cannot.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))
        return int(sock.getsockname()[1])

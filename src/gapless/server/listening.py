"""The listening socket, and who may reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import stat

from gapless.errors import ConfigError
from gapless.server.options import ServerOptions

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))
BACKLOG = 2048


def bind(options: ServerOptions) -> socket.socket:
    """The listening socket.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        if options.uds is not None:
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(options.uds).st_mode):
                    raise ConfigError(f"uds={options.uds!r}: a file that is no socket is there, and stays there")
                if socket_is_dead(options.uds):
                    os.unlink(options.uds)
            bound.bind(options.uds)
        else:
            family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
            bound = socket.socket(family, socket.SOCK_STREAM)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((options.host, options.port))
        bound.listen(BACKLOG)
    except OSError as error:
        where = options.uds or f"{options.host}:{options.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error
    bound.setblocking(False)
    return bound


def socket_is_dead(path: str) -> bool:
    """Whether a Unix socket was left by a process that is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def inode(path: str) -> tuple[int, int] | None:
    """What makes a file another one than any that had its path before; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def tls(options: ServerOptions) -> ssl.SSLContext | None:
    """The context of a server that speaks TLS.

    Raises:
        ConfigError: the certificate or the key cannot be read, or they do not belong together.
    """
    if options.ssl_certfile is None:
        return None

    def no_password() -> str:  # without it a question would wait for an answer on standard input
        raise ConfigError(f"ssl_keyfile={options.ssl_keyfile or options.ssl_certfile!r} asks for a password: remove it")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, no_password)
    except OSError as error:  # SSLError is one
        files = f"ssl_certfile={options.ssl_certfile!r}, ssl_keyfile={options.ssl_keyfile!r}"
        raise ConfigError(f"{files}: {error.strerror or error}") from error
    return context


def is_local(options: ServerOptions) -> bool:
    """Whether only this machine can reach the server."""
    if options.uds is not None or options.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        return False


def allowed_hosts(options: ServerOptions) -> frozenset[str] | None:
    """Names for the Host header; None for any."""
    if options.allowed_hosts is not None:
        names = frozenset(name.strip().lower() for name in options.allowed_hosts.split(","))
        return None if "*" in names else names
    if options.uds is None and is_local(options):
        return LOCAL_NAMES | {options.host}
    return None

"""The job for workers on other machines: each of their processes fetches it once.

An executor offers no more than to run a task somewhere. It does not say where, and cannot give
something to each worker once. So the job does not travel through the executor at all. Its tasks
say where the loader is, and a worker process that neither has the job nor finds its file connects
to the loader's process and copies the file, byte for byte. It makes no difference then which
executor it is, which worker gets which task, and which of them die: the next process that needs
the job fetches it.

Client and server know the job's token, and prove it to each other, by a keyed hash of a challenge,
before a byte of the job is sent or unpickled::

    client                                     server
    connects                        --------->
                                    <---------  challenge
    hash of it, another challenge   --------->
                                    <---------  hash of it, the job file

The connection stays open as long as both sides live. When the loader is closed, or its process is
dead, so is the connection, and the worker lets go of the job.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from minloader._memory.job_file import JobAddress, JobFile

logger = logging.getLogger("minloader")

CONNECT_SECONDS = 10.0
"""How long one address of the loader is tried, and how long it waits for the proof."""

STALL_SECONDS = 60.0
"""How long a transfer may stand still. A consumer that holds the interpreter delays its begin."""

KEEPALIVE_SECONDS = 60
"""After so much silence the connection is probed, so that no router forgets it."""

_HASH = 32  # bytes of a challenge, and of the answer to it


class JobServer:
    """Serves a job file to workers on other machines, in threads of the parent.

    Args:
        job_file: what to serve.
    """

    def __init__(self, job_file: JobFile) -> None:
        self._job_file = job_file
        self._pid = os.getpid()
        self._listener: socket.socket | None = None
        self._hosts: tuple[str, ...] = ()
        self._clients: set[socket.socket] = set()

    def open(self) -> tuple[tuple[str, ...], int]:
        """Begin to serve, unless it does so already.

        Returns:
            Names and addresses of this machine, the likeliest first, and the port.

        Raises:
            OSError: the system allows no listening.
        """
        if self._listener is None:
            self._hosts, self._listener = _hosts(), _listen()
            self._acceptor = _start_thread(self._accept, self._listener)
            self._port: int = self._listener.getsockname()[1]
        return self._hosts, self._port

    def close(self) -> None:
        """End all connections; the workers let go of the job then. The job file comes after."""
        if self._listener is None or os.getpid() != self._pid:
            return
        _end(self._listener)
        self._acceptor.join()
        for client in list(self._clients):
            _end(client)

    def _accept(self, listener: socket.socket) -> None:
        """Give each client a thread, until the listener is ended."""
        with listener:
            while True:
                try:
                    client = listener.accept()[0]
                    # A descriptor of its own: it is not closed under a transfer.
                    file = open(self._job_file.duplicate(), "rb")  # noqa: SIM115
                except OSError as error:
                    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        return
                    logger.warning("a worker cannot fetch the dataset: %s", error)  # no descriptors
                    threading.Event().wait(1)
                    continue
                self._clients.add(client)
                _start_thread(self._serve, client, file)

    def _serve(self, client: socket.socket, file: BinaryIO) -> None:
        """Give one client the job file, if it knows the token, and stay until it goes."""
        try:
            with client, file:
                client.settimeout(CONNECT_SECONDS)
                if not _check_client(client, self._job_file.address.token):
                    return
                client.settimeout(STALL_SECONDS)
                client.sendfile(file)
                _keep(client)
                client.recv(1)
        except OSError as error:
            logger.debug("a worker that fetched the dataset is gone: %s", error)
        finally:
            self._clients.discard(client)


def _start_thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    name = "minloader-job-server"
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # it is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _hosts() -> tuple[str, ...]:
    """Return what other machines may call this one, the likeliest first."""
    found = []
    # The address of the interface by which others are reached. These two are reserved for
    # examples; connecting a datagram socket sends nothing.
    for family, other in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))
            found.append(probe.getsockname()[0])
    # The name, if the network knows it, is resolved where it is used, to all its addresses.
    return tuple(dict.fromkeys([*found, socket.gethostname(), *_interfaces(), "localhost"]))


def _interfaces() -> list[str]:
    """Return the addresses of the network interfaces.

    A cluster may have several networks, and no names.
    """
    if not sys.platform.startswith("linux"):
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in found if not address.startswith("127.")]


_SIOCGIFADDR = 0x8915


def _end(connection: socket.socket) -> None:
    """End a socket that a thread waits on, which then closes it."""
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)


def _keep(connection: socket.socket) -> None:
    """Let a connection wait for ever, unless the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)


def wait_for_end(connection: socket.socket) -> None:
    """Return when the loader at the other end is closed, or gone."""
    with connection, contextlib.suppress(OSError):
        connection.recv(1)


def _hash(token: bytes, role: bytes, challenge: bytes) -> bytes:
    return hmac.digest(token, role + challenge, "sha256")


def _check_client(client: socket.socket, token: bytes) -> bool:
    """Have the client prove that it knows the token; prove the same to it."""
    challenge = secrets.token_bytes(_HASH)
    client.sendall(challenge)
    with client.makefile("rb") as received:
        answer, theirs = received.read(_HASH), received.read(_HASH)
    if not hmac.compare_digest(answer, _hash(token, b"worker", challenge)):
        return False
    client.sendall(_hash(token, b"loader", theirs))
    return True


def _copy(connection: socket.socket, address: JobAddress) -> mmap.mmap:
    """Copy the job file from the other end, if that is the loader: it is unpickled here."""
    challenge = secrets.token_bytes(_HASH)
    with connection.makefile("rb") as received:
        answer = _hash(address.token, b"worker", received.read(_HASH))
        connection.sendall(answer + challenge)
        expected = _hash(address.token, b"loader", challenge)
        if not hmac.compare_digest(received.read(_HASH), expected):
            raise ConnectionError("somebody else answers there")
        connection.settimeout(STALL_SECONDS)
        mapping = mmap.mmap(-1, address.size, access=mmap.ACCESS_COPY)
        if received.readinto(mapping) < address.size:
            raise ConnectionError("the other side closed the connection")
    _keep(connection)
    return mapping


def fetch(
    address: JobAddress, hosts: tuple[str, ...], port: int
) -> tuple[mmap.mmap, socket.socket]:
    """Copy a job file from the machine where it is, into private memory of this process.

    Args:
        address: what to fetch.
        hosts: what that machine may be called, from :meth:`JobServer.open`.
        port: where it listens.

    Returns:
        The copy, and the connection, which ends when the loader does.

    Raises:
        ConnectionError: no address leads there; with the reason for each.
    """
    reasons = []
    for host in hosts:
        end: socket.socket | None = None
        try:
            end = socket.create_connection((host, port), CONNECT_SECONDS)
            return _copy(end, address), end
        except BaseException as error:
            if end is not None:
                end.close()
            if not isinstance(error, OSError):
                raise
            reasons.append(f"{host}: {error}")
    raise ConnectionError(
        f"the dataset is on another machine, and {socket.gethostname()} cannot fetch it from port "
        f"{port} of its loader ({'; '.join(reasons)}); the loader's machine must be reachable from "
        "the workers by TCP"
    )

"""The job for workers on other machines: each of their processes fetches it once.

What an executor offers is to run a task somewhere: not where, nor how to give something to each
worker once. So the job does not travel through the executor at all. Its tasks say where the loader
is, and a worker process that neither has the job nor finds its file connects to the loader's
process, proves by a keyed hash that it was sent, and copies the file, byte for byte. It makes no
difference then which executor it is, which worker gets which task, and which of them die: the
next process that needs the job fetches it.

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

from minloader._memory.job_file import JobAddress, JobFile

logger = logging.getLogger("minloader")

CONNECT_SECONDS = 10.0

"""How long one address of the loader is tried, and how long it waits for the proof."""


STALL_SECONDS = 60.0

"""How long a transfer may stand still. A consumer that holds the interpreter delays its begin."""


KEEPALIVE_SECONDS = 60

"""After so much silence the connection is probed, so that no router forgets it."""


_PROOF = 32  # bytes of a challenge, and of the answer to it


class JobServer:
    """Serves a job_file to workers on other machines, in threads of the parent.

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
        """Begins to serve, if it does not yet.

        Returns:
            Names and addresses of this machine, the likeliest first, and the port.

        Raises:
            OSError: the system allows no listening.
        """
        if self._listener is None:
            self._hosts, self._listener = _hosts(), _listen()
            address = self._job_file.address
            self._acceptor = threading.Thread(
                target=_receive,
                args=(self._listener, self._job_file.duplicate(), address, self._clients),
                name="minloader-job_server",
                daemon=True,
            )
            self._acceptor.start()
            self._port: int = self._listener.getsockname()[1]
        return self._hosts, self._port

    def close(self) -> None:
        """Ends all connections; the workers let go of the job then."""
        if self._listener is None or os.getpid() != self._pid:
            return
        _hang_up(self._listener)
        self._acceptor.join()
        for client in list(self._clients):
            _hang_up(client)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # it is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _hosts() -> tuple[str, ...]:
    """What other machines may call this one."""
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
    """Addresses of the network interfaces: a cluster may have several networks, and no names."""
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


def _hang_up(end: socket.socket) -> None:
    """Ends a socket that a thread waits on, which then closes it."""
    with contextlib.suppress(OSError):  # the other side was first
        end.shutdown(socket.SHUT_RDWR)


def _receive(
    listener: socket.socket, fd: int, address: JobAddress, clients: set[socket.socket]
) -> None:
    """Takes clients in until the listener is shut down."""
    with listener, open(fd, "rb") as file:
        while True:
            try:
                client = listener.accept()[0]
            except OSError as error:
                if listener.fileno() < 0 or not _is_listening(listener):
                    return
                logger.warning("a worker cannot fetch the dataset: %s", error)  # no descriptors
                threading.Event().wait(1)
                continue
            clients.add(client)
            # Each has a descriptor of its own: none is closed under a transfer.
            args = client, os.dup(file.fileno()), address, clients
            threading.Thread(
                target=_attend, args=args, name="minloader-job_server-client", daemon=True
            ).start()


def _is_listening(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _attend(
    client: socket.socket, fd: int, address: JobAddress, clients: set[socket.socket]
) -> None:
    """Gives one client the job file, if it was sent, and stays until it goes."""
    try:
        with client, open(fd, "rb") as file:
            client.settimeout(CONNECT_SECONDS)
            if not _check_client(client, address.token):
                return
            client.settimeout(STALL_SECONDS)
            client.sendfile(file)
            _keep(client)
            client.recv(1)
    except OSError as error:
        logger.debug("a worker that fetched the dataset is gone: %s", error)
    finally:
        clients.discard(client)


def _check_client(client: socket.socket, key: bytes) -> bool:
    """Has the client prove that it knows the key; proves the same to it."""
    challenge = secrets.token_bytes(_PROOF)
    client.sendall(challenge)
    answer, counter = _read(client, _PROOF), _read(client, _PROOF)
    if not hmac.compare_digest(answer, _proof(key, b"worker", challenge)):
        return False
    client.sendall(_proof(key, b"loader", counter))
    return True


def _proof(key: bytes, role: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, role + challenge, "sha256")


def _read(end: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _read_into(end, memoryview(data))
    return bytes(data)


def _read_into(end: socket.socket, view: memoryview) -> None:
    while view:
        got = end.recv_into(view)
        if got == 0:
            raise ConnectionError("the other side closed the connection")
        view = view[got:]


def _keep(end: socket.socket) -> None:
    """Lets a connection wait for ever, unless the other machine is gone."""
    end.settimeout(None)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)


def fetch(
    address: JobAddress, hosts: tuple[str, ...], port: int
) -> tuple[mmap.mmap, socket.socket]:
    """Copies a job file from the machine where it is, into private memory of this process.

    Args:
        address: what to fetch.
        hosts: what that machine may be called, from :attr:`JobServer.hosts`.
        port: where it listens.

    Returns:
        The copy, and the connection, which ends when the loader does.

    Raises:
        ConnectionError: no address leads there; with the reason for each.
    """
    reasons = []
    for host in hosts:
        try:
            end = socket.create_connection((host, port), CONNECT_SECONDS)
        except OSError as error:
            reasons.append(f"{host}: {error}")
            continue
        try:
            return _copy(end, address), end
        except OSError as error:
            reasons.append(f"{host}: {error}")
        except BaseException:
            end.close()
            raise
        end.close()
    raise ConnectionError(
        f"the dataset is on another machine, and {socket.gethostname()} cannot fetch it from port "
        f"{port} of its loader ({'; '.join(reasons)}); the loader's machine must be reachable from "
        "the workers by TCP"
    )


def _copy(end: socket.socket, address: JobAddress) -> mmap.mmap:
    """Fetches from whoever is at the other end, if that is the loader: it is unpickled here."""
    answer, challenge = (
        _proof(address.token, b"worker", _read(end, _PROOF)),
        secrets.token_bytes(32),
    )
    end.sendall(answer + challenge)
    if not hmac.compare_digest(_read(end, _PROOF), _proof(address.token, b"loader", challenge)):
        raise ConnectionError("somebody else answers there")
    end.settimeout(STALL_SECONDS)
    mapping = mmap.mmap(-1, address.size, access=mmap.ACCESS_COPY)
    view = memoryview(mapping)
    _read_into(end, view)
    view.release()
    _keep(end)
    return mapping


def wait_for_end(end: socket.socket) -> None:
    """Returns when the loader at the other end is closed, or gone."""
    with end, contextlib.suppress(OSError):
        end.recv(1)

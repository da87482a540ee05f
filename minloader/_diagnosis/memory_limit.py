"""What is said of a worker that has grown past ``worker_memory_limit``."""

from __future__ import annotations

from minloader._formats import format_bytes
from minloader._worker.messages import Reply


def too_large(reply: Reply, limit: int, place: str) -> str:
    """Say why a worker is replaced.

    Args:
        reply: what it sent.
        limit: bytes that it may have.
        place: the batch that it made last.
    """
    usage = reply.figures.usage
    at_start = usage.memory_at_start
    began = f" (it began with {format_bytes(at_start)})" if at_start else ""
    return (
        f"worker {reply.worker} (pid {reply.pid}) takes more than worker_memory_limit={limit}: it "
        f"has {format_bytes(usage.memory)} for itself{began} since {place}"
    )

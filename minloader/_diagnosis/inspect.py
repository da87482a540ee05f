"""A view into a loader, for the doctor, the audit and the tests.

No other module reads private attributes of another package in order to look at a loader. When the
internals change, this is the one file to adapt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from minloader._epochs.feed import is_of_drop_in
from minloader._loader import Loader
from minloader._pools.processes import ProcessPool
from minloader._worker.torch_stream import Stream


class WorkerView(NamedTuple):
    """A worker process that the loader started.

    Attributes:
        number: the worker's id, the same as ``get_worker_info().id`` in it.
        pid: its process id.
        process: the ``multiprocessing`` process object.
        is_ready: whether it has loaded the dataset, or never will since its executor is broken.
    """

    number: int
    pid: int
    process: Any
    is_ready: bool


def inspect(loader: Any) -> Inspection:
    """Look into a loader.

    Args:
        loader: a :class:`minloader.Loader`, or a :class:`minloader.torch.DataLoader` that has
            been iterated.

    Raises:
        TypeError: it is neither, or the DataLoader has made no Loader yet.
    """
    inner = loader if isinstance(loader, Loader) else getattr(loader, "_loader", None)
    if not isinstance(inner, Loader):
        raise TypeError(f"there is no Loader in {loader!r}")
    return Inspection(inner)


def with_arguments(loader: Any, **arguments: Any) -> Loader:
    """Return a Loader of the same batches with some other arguments, as if it was made with these.

    Args:
        loader: a :class:`minloader.Loader`, which is closed and itself made anew, or a
            :class:`minloader.torch.DataLoader`. It has not been iterated.
        arguments: those of a Loader, by name.
    """
    if not isinstance(loader, Loader):
        names = {"mp_context": "multiprocessing_context"}  # as torch has it
        made: Loader = loader._as_loader(**{names.get(n, n): arguments[n] for n in arguments})
        return made
    epoch = loader.epoch
    given = loader._arguments[0] | {"num_workers": loader.num_workers} | arguments
    loader.close()
    del loader._end  # nor is it made yet
    Loader.__init__(loader, **given)  # whatever arguments a class of the user's has
    if epoch:
        loader.set_epoch(epoch)
    return loader


class Inspection:
    """A view of one loader, in the process that made it. It keeps the loader alive.

    ``loader.stats`` has what users can see too: ``num_workers``, the tasks in flight, how many
    workers were replaced, the slots and their bytes. Each property reads what is so at that moment.

    Attributes:
        counters: what is counted.
        group: the pools, with all that they are made from.
        executor: the loader's argument: "process", "thread" or the user's executor.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._course = loader._course
        self.counters = loader._shared.counters
        self.group = loader._shared.group
        self.executor = self.group.executor

    @property
    def sampler_used_up(self) -> bool:
        """Whether the sampler is an iterator that has served its one epoch."""
        return self._course.source.is_used_up

    @property
    def is_torchs(self) -> bool:
        """Whether a :class:`minloader.torch.DataLoader` made it.

        Then batches are made in one way by workers, and in another in the calling process.
        """
        return isinstance(self._loader.dataset, Stream) or is_of_drop_in(self._loader.sampler)

    @property
    def start_method(self) -> str:
        """How worker processes are started; "" where there are none of ours."""
        is_ours = self.executor == "process"
        return self.group.context.get_start_method() or "" if is_ours else ""

    # --- the pools and their workers

    @property
    def executors(self) -> list[Any]:
        """The executors of the process pools that are not removed yet; a pool's newest is last."""
        pools = [pool for pool in self.group.pools if isinstance(pool, ProcessPool)]
        return [executor for pool in pools for executor in pool._executors]

    @property
    def workers(self) -> list[WorkerView]:
        """The worker processes of all executors, with dead ones until their executor is removed."""
        return [
            WorkerView(
                number=executor.setup.infos[index].id,
                pid=process.pid,
                process=process,
                is_ready=bool(executor.broken or executor.heartbeats.last(index).task),
            )
            for executor in self.executors
            for index, process in enumerate(executor.workers)
        ]

"""Streams of ``minloader.torch.DataLoader``: the user counts their epochs, and may tell them.

Loaded with a job of such a loader. Nothing of torch is imported for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from minloader._protocols import has_epochs, is_stateful, known_state, state_of
from minloader._worker.messages import WorkerInfo
from minloader._worker.stream_reader import Copy, put_back
from minloader._worker.torch_conventions import number_of

NO_PASS = -1
"""Stands for a pass that was begun at a state."""


class Stream:
    """An ``IterableDataset``, whose epochs the user counts, as with torch: it hides ``set_epoch``.

    It passes ``state_dict`` and ``load_state_dict`` on, if the dataset has them.

    Args:
        dataset: the user's dataset.
        read_once: whether each epoch needs a new copy of the dataset.

    Attributes:
        is_told: whether the user tells it the epochs. Then it begins each as it is, and states are
            put back within an epoch alone: one from the end of an epoch would be of that.
        of_drop_in: tells who reads it what it is.
    """

    of_drop_in = True

    def __init__(self, dataset: Any, *, read_once: bool) -> None:
        self.dataset = dataset
        self.read_once = read_once
        self.is_told = has_epochs(dataset)

    @property
    def number(self) -> int | None:
        """The number of the epoch that the dataset shows; None: it shows none."""
        return number_of(self.dataset)

    def copied(self, info: WorkerInfo) -> DropInCopy:
        """Return what reads it, where an info holds."""
        return DropInCopy(info)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __deepcopy__(self, memo: Any) -> Stream:
        # The user tells the object itself.
        read_once = self.read_once or self.is_told
        return Stream(copy.deepcopy(self.dataset, memo), read_once=read_once)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            return getattr(self.dataset, name)
        raise AttributeError(name)


class DropInCopy(Copy):
    """A copy of a :class:`Stream`, in which one pass over its shard follows the other."""

    def __init__(self, info: WorkerInfo) -> None:
        super().__init__(info)
        self._at = 0  # where the pass was begun
        # The pass that has not ended, the stream's state and its number as that began: where the
        # user tells it its epochs, and Ctrl-C may come.
        self._told: tuple[int, Any, int | None] | None = None

    @property
    def stream(self) -> Any:
        dataset = self.items.dataset
        return getattr(dataset, "stream", dataset)

    def prepare(self, epoch: int, *, at: int, state: Any) -> bool:
        self._at = at
        if at and self.items.is_told and self._told is None:
            # If it is left, the next epoch begins as this one would have begun without the state.
            self._told = NO_PASS, copy.deepcopy(known_state(self.items)), None
        if at or not self.items.is_told:
            return super().prepare(epoch, at=at, state=state)
        is_put = state is not None and not self._is_at(state)
        super().prepare(epoch, at=at, state=None)  # it begins as it is
        return is_put

    def begin_epoch(self, pass_number: int, *, is_inline: bool) -> None:
        """Have it begin an epoch as it is, or behind one that was left, as that began."""
        stream = self.items
        if not stream.is_told:
            return
        told = self._told
        if told is not None and told[0] != pass_number:  # it was left
            number = stream.number  # what it was told since counts
            told = None if number is None else (pass_number, told[1], number)
        if told is None and is_inline:
            state = copy.deepcopy(known_state(stream))
            self._told = pass_number, state, stream.number
        elif told is not None:
            self._told = told
            _, state, number = told
            if state is not None:
                put_back(stream, state)
            if number is not None and stream.number != number:
                stream.dataset.set_epoch(number)

    def end(self, iterator: Any, read: int, state: Any) -> None:
        self._told = None
        if self._at and self.items.is_told and is_stateful(self.items):
            # Or it might begin its next epoch where it was put back, once it is told that.
            self.items.load_state_dict(state_of(self.items))
        super().end(iterator, read, state)

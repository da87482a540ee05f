"""The order of an epoch, as torch draws it.

Runs in the parent. Torch's samplers draw random numbers from torch's global generator, or from
generators of their own, when an epoch begins. Whoever restores these generators and begins the
samplers again gets the same order. So an epoch is known by its :class:`Start`, and begun from that
whenever it is begun: the first time, after an interrupt in the sampler, in a resumed run.
"""

from __future__ import annotations

import base64
import itertools
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler

from minloader._checks import brief_repr, has_epochs, is_stateful, state_of
from minloader._sampling.base import Sampler
from minloader._sampling.ranks import with_inner
from minloader._sampling.source import used_up

MOST_DRAWN = 10_000_000
"""Up to so many samples of a random sampler with its own generator are drawn as an epoch begins."""


class Start(NamedTuple):
    """All that the order of an epoch depends on, just before its sampler is begun.

    Attributes:
        own: states of the generators of the loader and of its samplers.
        shared: state of torch's global generator.
        seeded: whether a seed is drawn when the sampler was begun: the one that torch's loader
            gives its workers.
        twice: whether the sampler is then begun once more, as torch's loader does with new workers.
        told: the epoch that the sampler, or the stream, was set to, if it has any.
        begun: in a state, whether the epoch had begun.
    """

    own: list[torch.Tensor]
    shared: torch.Tensor
    seeded: bool
    twice: bool
    told: int | None
    begun: bool = False

    def encode(self) -> dict[str, Any]:
        """Return a part of a state, fit for JSON."""
        tensors = {"own": [_to_text(each) for each in self.own], "shared": _to_text(self.shared)}
        return self._asdict() | tensors

    @classmethod
    def decode(cls, known: Any) -> Start:
        """Undo :meth:`encode`.

        Raises:
            ValueError: the state is damaged.
        """
        try:
            told = known["told"]
            if told is not None and int(told) != told:
                raise ValueError("told must be the number of an epoch, or None")
            torch.Generator().set_state(_from_text(known["shared"]))  # or it is of another size
            return cls(
                own=[_from_text(text) for text in known["own"]],
                shared=_from_text(known["shared"]),
                seeded=bool(known["seeded"]),
                twice=bool(known["twice"]),
                told=told,
                begun=bool(known["begun"]),
            )
        except (LookupError, TypeError, ValueError, RuntimeError, zlib.error) as error:
            raise ValueError(f"the state is damaged: {error!r}, in {brief_repr(known)}") from error


def _to_text(state: torch.Tensor) -> str:
    return base64.b85encode(zlib.compress(state.numpy().tobytes())).decode()


def _from_text(text: str) -> torch.Tensor:
    data = bytearray(zlib.decompress(base64.b85decode(text)))
    return torch.frombuffer(data, dtype=torch.uint8)


class Order:
    """What a sampler of torch's kind yields, as a sampler for :class:`minloader.Loader`.

    The loader tells it the number of the epoch, and it knows how that one starts. The sampler's own
    ``set_epoch`` is called by the user, as with torch. A sampler with ``state_dict`` and
    ``load_state_dict`` is put back by these, also where torch makes batches of it, and any other is
    read again.

    Args:
        sampler: torch's.
        owner: the loader's own generator.

    Attributes:
        starts: how epochs start, by their numbers in the loader.
    """

    def __init__(self, sampler: Iterable[Any], owner: torch.Generator | None) -> None:
        self.sampler = sampler
        self.starts: dict[int, Start] = {}
        # Torch's reads just what a batch needs.
        self._stateful: Any = sampler.sampler if type(sampler) is BatchSampler else sampler
        self._has_state = is_stateful(self._stateful) and not _is_read_again(self._stateful)
        self._owner = owner
        self._number = 0
        self._last: Items | None = None
        self._has_given = False
        self._is_left = False  # whether the last epoch leaves nothing for the next
        self._loaded: Any = None  # state that the next epoch begins from, or goes on from

    # --- how an epoch starts

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that an epoch's order may depend on, without torch's global one.

        Samplers that are told the epoch seed theirs from it, and some make it only then.
        """
        found = [self._owner]
        for each in with_inner(self.sampler):
            if not has_epochs(each):
                found.append(getattr(each, "generator", None))
        known = dict.fromkeys(each for each in found if isinstance(each, torch.Generator))
        return [each for each in known if each is not torch.default_generator]

    def check(self, start: Start) -> None:
        """Refuse a start of a loader with other generators.

        Raises:
            ValueError: it is one.
        """
        here = len(self.generators)
        if here != len(start.own):
            raise ValueError(
                f"the state has {len(start.own)} generators of the loader and its samplers, but "
                f"here are {here}; make them as they were when the state was taken"
            )

    # --- a sampler for the loader

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch in the loader."""
        self._number = epoch

    def __len__(self) -> int:
        if isinstance(self.sampler, Sampler):
            raise TypeError("not before the epoch has begun: the one before may have left some")
        return len(self.sampler)  # type: ignore[arg-type]

    def leave(self) -> None:
        """Have the last epoch leave nothing for the next: the consumer has not seen its end."""
        self._is_left = True

    def __iter__(self) -> Iterator[Any]:
        self._last = last = self._begin()
        self._is_left = False
        return last

    def _begin(self) -> Items:
        """Begin the epoch as it starts.

        Torch's global generator is drawn from if it is just there, as it is when the epoch is begun
        for the first time. Otherwise it stays as it is. An interrupt leaves nothing drawn.
        """
        start = self.starts[self._number]
        before = torch.get_rng_state()
        is_there = torch.equal(before, start.shared)
        for generator, state in zip(self.generators, start.own, strict=True):
            generator.set_state(state)
        try:
            torch.set_rng_state(start.shared)
            items = self._begun(start)
            if not is_there:
                torch.set_rng_state(before)
            return items
        except BaseException:
            torch.set_rng_state(before)
            for generator, state in zip(self.generators, start.own, strict=True):
                generator.set_state(state)
            raise

    def _begun(self, start: Start) -> Items:
        stateful = is_stateful(self)
        is_within = self._put(start)
        items = iter(self.sampler)
        if start.seeded:
            draw_seed(self._owner)
        if start.twice and not stateful:
            items = iter(self.sampler)
        found = Items(items, is_within=is_within)
        if not stateful:  # its state must be that of what was given
            found.draw(self._at_once)
            read = self._stateful
            if found.is_empty and self._has_given and iter(read) is read and not has_epochs(read):
                raise used_up("the sampler", read)
            self._has_given = self._has_given or not found.is_empty
        return found

    def _put(self, start: Start) -> bool:
        """Put the sampler to where the epoch begins, or goes on; return whether it goes on."""
        loaded, self._loaded = self._loaded, None
        is_within = False
        if loaded is not None:
            self._stateful.load_state_dict(loaded["state"])
            is_within = loaded["within"]
        elif isinstance(self._stateful, Sampler) and self._is_left:
            self._stateful._forget()  # however far it was drawn
        if start.told is not None and not is_within:
            tell(start.told, *with_inner(self.sampler))
        return is_within

    @property
    def _at_once(self) -> int:
        """How many items are drawn as the epoch begins.

        Most samplers draw a seed, or all they need, with the first. Torch's random one draws from
        its generator until its end. With a generator of its own, later epochs draw from that too,
        and their order must not depend on how far this one was read.
        """
        sampler = self._stateful
        has_own = type(sampler) is RandomSampler and sampler.generator is not None
        if has_own and sampler.num_samples <= MOST_DRAWN:
            return int(sampler.num_samples) + 1  # the end is drawn, too
        return 1

    # --- its state, if it has one

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict") and self._has_state:
            return self._state if name == "state_dict" else self._load
        raise AttributeError(name)

    def _state(self) -> dict[str, Any] | None:
        if self._is_left:
            return None  # the next epoch begins with nothing of the one before
        within = self._last is not None and self._last.is_within
        state = state_of(self._stateful)
        return None if state is None else {"within": within, "state": state}

    def _load(self, state: Any) -> None:
        # Later: the sampler is set to an epoch before or after.
        self._loaded = state


def _is_read_again(sampler: Any) -> bool:
    """Return whether a sampler of ours reads one that draws from a generator, as torch's do.

    Its state would not have that. (With "rollover" it has what an epoch has left, and is kept.)
    """
    if not isinstance(sampler, Sampler) or getattr(sampler, "last_batch", "") == "rollover":
        return False
    return any(
        hasattr(each, "generator") and not has_epochs(each) and not is_stateful(each)
        for each in with_inner(sampler)
    )


class Raised(NamedTuple):
    """An error of the sampler, in the place of an item."""

    error: BaseException


class Items(Iterator[Any]):
    """Iterator over the items of an epoch, of which some may be drawn before it is their turn.

    Args:
        items: as the sampler gives them.
        is_within: whether some were given before these.

    Attributes:
        is_within: whether some were given, and it was not told that there are no more.
    """

    def __init__(self, items: Iterator[Any], *, is_within: bool) -> None:
        self.is_within = is_within
        self._items = items
        self._drawn: deque[Any] = deque()

    def __next__(self) -> Any:
        try:
            item = self._drawn.popleft() if self._drawn else next(self._items)
        except StopIteration:
            self.is_within = False
            raise
        self.is_within = True
        if type(item) is Raised:
            raise item.error
        return item

    @property
    def is_empty(self) -> bool:
        """Whether none is left of those that were drawn."""
        return not self._drawn

    def draw(self, most: int) -> None:
        """Draw some items. What the sampler raises comes in its turn."""
        try:
            # Not by islice(), which calls iter(): a sampler that is its own iterator would begin
            # anew.
            self._drawn.extend(map(next, itertools.repeat(self._items, most)))
        except Exception as error:
            self._drawn.append(Raised(error))


class EpochOrder(Order):
    """The order of a sampler of torch's kind, which follows from the number of the epoch alone."""

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which seeds the generators."""
        super().set_epoch(epoch)
        own = [_seeded(each.device, epoch) for each in self.generators]
        shared = _seeded("cpu", epoch)
        self.starts = {epoch: Start(own, shared, seeded=False, twice=False, told=None)}


def _seeded(device: Any, seed: int) -> torch.Tensor:
    """Return the state of a generator that was seeded."""
    return torch.Generator(device).manual_seed(seed).get_state()


def told_of(*all_told: Any, last: int | None) -> int | None:
    """Return the epoch that these were set to, if any of them wants to be told.

    Args:
        all_told: samplers, or a stream.
        last: what to take it for where none of them shows it.
    """
    wanting = [each for each in all_told if has_epochs(each)]
    epochs = [getattr(each, "epoch", None) for each in wanting]
    return next((epoch for epoch in epochs if isinstance(epoch, int)), last if wanting else None)


def tell(epoch: int, *all_told: Any) -> None:
    """Set to an epoch those of these that are set to another."""
    for each in all_told:
        if has_epochs(each) and getattr(each, "epoch", None) != epoch:
            each.set_epoch(epoch)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw what torch's loader draws as its base seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())

"""What samplers share: an order that can be repeated, ranks, and a state.

Samplers decide what a batch is. They run in the parent and yield lists of indices.

The order of an epoch depends on ``seed``, on the number of the epoch, and on the items that the
epoch before has left over (with ``last_batch="rollover"``). :class:`minloader.Loader` tells a
sampler the number by ``set_epoch``. An iterator keeps the epoch that it began with.

With ``world_size`` ranks, each in a process of its own, every rank plans the epoch of all of them
and yields its own share, so that ranks need not communicate. A *step* is one batch for each rank.
The batches of a step are of a like size, so that no rank waits for another. All ranks have been
given equally many batches. So each rank knows what all were given, and what remains to be dealt out
when there are more ranks or fewer.

::

    source.py  ── items ──>  a Run: the batches of one epoch  ── a batch a step ──>  this rank
                                    |
                                 run_state(): plain values. A run that begins there goes on alike

To write a sampler, derive from :class:`Sampler`, and give it a :class:`Run` of its own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from minloader._arguments import checked_bool, checked_choice, checked_int
from minloader._formats import brief_repr
from minloader._protocols import state_of
from minloader._sampling.ranks import MOST_RANKS, with_inner
from minloader._sampling.reader import Resettable
from minloader._sampling.seeding import derive
from minloader._sampling.source import ItemSource

VERSION = 1
"""Version of the states. To be raised whenever the same arguments lead to another order, or a
state gets another entry."""

RunState = dict[str, Any]
"""Where in an epoch a run is, as plain values, which nobody changes:

- ``between``: whether no epoch is under way, so that any epoch may begin there;
- ``batches``: number of batches that each rank was given in this epoch, or in the one that has
  ended;
- ``dropped``: number of samples that no rank gets: of the epoch that has ended, or of the windows
  before this one (see ``windows.py``);
- ``source``: where in the source it is, a ``ReadPosition``;
- ``begun``: number of batches that each rank had been given when it was there in the source;
- ``world_size_history``: the world sizes in which batches were given since then, if that was
  not always this one. Of each: the values of the attributes that decide how steps are dealt out
  (``_dealt_by``), and until which number of batches;
- ``left``: items that were read from the source, and not given yet;
- ``errors``: how many errors were raised of the window.
"""

NONE_GIVEN: RunState = {"batches": 0, "dropped": 0}
"""What was given of an epoch that begins."""


class Run(Iterator[Any]):
    """The batches of an epoch. It is no generator, so that it goes on after an error.

    Args:
        sampler: whose epoch it is.
        epoch: its number.
        start: where to begin.

    Attributes:
        batches: number of batches that each rank was given.
        dropped: number of samples that no rank gets, as far as is known.
        touched: whether a batch was asked for.
        ended: whether there are no more.
        is_of_loader: whether a loader has it, which reads ahead of the consumer.
    """

    is_of_loader = False

    def __init__(self, sampler: Any, epoch: int, start: RunState) -> None:
        self.sampler = sampler
        self.epoch = epoch
        self._reading = sampler._source.reader(epoch, start["source"])
        self._start = start | {"source": self._reading.position()}
        self.batches: int = start["batches"]
        self.dropped: int = start["dropped"]
        self.touched = False
        self.ended = False

    def __next__(self) -> Any:
        self.touched = True
        if self.ended:
            raise StopIteration
        try:
            batch = self._next()
        except StopIteration as error:
            if self.ended:
                raise
            raise RuntimeError("a function that the sampler called raised StopIteration") from error
        self.batches += 1
        return batch

    def _next(self) -> Any:
        """Return the next batch of this rank, or end."""
        raise NotImplementedError

    def run_state(self) -> RunState:
        """Return where this run is; when it has ended, where any other epoch begins.

        ``batches`` and ``dropped`` are those of this epoch in either case.
        """
        raise NotImplementedError

    def counts(self) -> tuple[int, int]:
        """Return how many batches a rank gets of the epoch, and how many samples none gets.

        Raises:
            TypeError: that is not known beforehand.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any] | None:
        """Return the sampler's state as of this run, whoever has begun another one since.

        None: it is of a user's class that has none, or knows that of a later run only.
        """
        sampler = self.sampler
        if type(sampler).state_dict is not Sampler.state_dict:  # of a user's class
            state: dict[str, Any] | None = state_of(sampler) if sampler._run is self else None
            return state
        run_state = self.run_state() if self.touched else self._start
        return {**sampler._identity(), "epoch": self.epoch, **run_state}


class Sampler(Resettable):
    """The seed, epoch, rank and state of a sampler."""

    # Names of the attributes that decide the order of an epoch, besides seed and world size.
    _arguments: tuple[str, ...] = ()
    # Names of those that decide how steps are dealt out to ranks. A state of other values can be
    # gone on from: if the world size is another, and if others are and the user allows that.
    _dealt_by: tuple[str, ...] = ("world_size",)
    _begin: type[Run]  # makes the batches of an epoch, from a RunState on
    sampler: Any = None  # what this one reads its items from
    _source: Any = ItemSource("nothing", 0)  # the same, or lazy lengths; of a mixture its parts

    def __init__(self, *, shuffle: bool, seed: int, rank: int, world_size: int) -> None:
        self.shuffle = checked_bool("shuffle", shuffle)
        self.seed = checked_int("seed", seed, 0)
        self.world_size = checked_int("world_size", world_size, 1, MOST_RANKS)
        self.rank = checked_int("rank", rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be below world_size={self.world_size}, got {self.rank}")
        self.epoch = 0
        self._run: Run | None = None  # made last
        # The epoch of that run, and where it began. If a state was loaded since, there is no run,
        # and this is where the next one begins.
        self._epoch_start: tuple[int, RunState] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator goes through, also in an inner sampler.

        A loaded position is kept if it is in this epoch. Another epoch begins with what the one
        before has left, if that had ended.

        Args:
            epoch: number of the epoch, from 0.

        Raises:
            TypeError, ValueError: ``epoch`` is not an int, or below 0.
        """
        self.epoch = checked_int("epoch", epoch, 0)
        loaded = self._epoch_start if self._run is None else None
        if loaded is None or loaded[0] != epoch:  # what was put back might begin anew
            self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        start = self._run_state()
        if self._run is not None and not start["between"]:
            start = self._beginning()
        if start["between"]:
            start = start | NONE_GIVEN
        self._epoch_start = (self.epoch, start)
        self._run = self._begin(self, self.epoch, start)
        return self._run

    def __len__(self) -> int:
        """Return the number of batches of the epoch, the same for every rank.

        Raises:
            TypeError: it is not known beforehand.
        """
        return self._counts()[0]

    def __getstate__(self) -> dict[str, Any]:
        run = self._run
        start = self._epoch_start  # a copy begins where the epoch has begun
        if run is not None and run.ended:
            start = (run.epoch, run.run_state())
        return vars(self) | {"_run": None, "_epoch_start": start}

    def __repr__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if k[0] != "_" and v is not None}
        values = [f"{name}={brief_repr(value)}" for name, value in shown.items()]
        return f"<{type(self).__name__}({', '.join(values)})>"

    def __bool__(self) -> bool:
        return True  # whatever its length is, and whether that is known

    @property
    def dropped(self) -> int:
        """Number of samples of the epoch that no rank gets; before its end, as far as is known."""
        try:
            return self._counts()[1]
        except TypeError:
            return int(self._run_state()["dropped"])

    def _counts(self) -> tuple[int, int]:
        run_state = self._run_state()
        expected = self._begin(self, self.epoch, run_state).counts()
        if run_state["between"] and run_state["batches"]:  # the epoch has ended
            return run_state["batches"], run_state["dropped"]
        return expected

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the iterator made last, as a small dict that is fit for JSON.

        Before its first batch, and after its last, that is where an epoch begins.

        The dict has all that decides the order, so that ``load_state_dict`` can refuse a state that
        does not fit. Every rank has the same one.
        """
        if self._run is not None and self._run.is_of_loader:
            from minloader._diagnosis.rarely_meant import look_at_read_ahead

            look_at_read_ahead(self, self._run)
        return copy.deepcopy({**self._identity(), "epoch": self.epoch, **self._run_state()})

    def load_state_dict(self, state: dict[str, Any], allow: str | Iterable[str] = ()) -> None:
        """Make the next iterator continue from a state. Later ones begin anew.

        With another ``world_size``, or another value of what is allowed, what no rank was given is
        dealt out anew.

        Args:
            state: from ``state_dict`` of a sampler made with the same arguments, of any rank.
            allow: names of arguments that may be others than they were: what limits a batch.

        Raises:
            TypeError, ValueError: that is no state, or that of a sampler with another order; or
                ``allow`` names another argument. This sampler then stays as it was.
        """
        self._load(state, allow=allow)

    def _load(
        self,
        state: dict[str, Any],
        epoch: int = 0,
        more: int = 0,
        allow: str | Iterable[str] = (),
    ) -> None:
        """Load a state; if it is dealt out anew, one from which batches were delivered since.

        Args:
            state: as for ``load_state_dict``.
            epoch: the one that these batches are of.
            more: how many each rank was given.
            allow: as for ``load_state_dict``.
        """
        former = self._checked(state, self._checked_allowed(allow))
        state = copy.deepcopy(state)
        start = {name: state[name] for name in self._beginning()}
        if start["between"] and more:  # they are of an epoch that begins there
            start |= {"between": False, **NONE_GIVEN}
        else:
            epoch = state["epoch"]
        if former and not start["between"]:
            from minloader._sampling.dealt import anew

            start = anew(start, former, more)
        self._source.restore(start["source"], epoch)
        self.epoch = epoch
        self._run = None
        self._epoch_start = (epoch, start)

    # --- states

    def _beginning(self) -> RunState:
        """Return where an epoch begins if none before has left anything for it."""
        source = self._source.beginning()
        lists: RunState = {"world_size_history": [], "left": [], "source": source}
        return {"between": True, **NONE_GIVEN, "begun": 0, "errors": 0, **lists}

    def _history(self, run_state: RunState) -> list[list[Any]]:
        """Return the ``world_size_history``, with this world size at its end."""
        own = [getattr(self, name) for name in self._dealt_by]
        return [*run_state["world_size_history"], [*own, run_state["batches"]]]

    def _forget(self) -> None:
        """Have the next epoch begin with nothing that the one before has left."""
        self._run = None
        self._epoch_start = None
        self._source.forget()

    def inner_samplers(self) -> list[Any]:
        """Return the samplers that this one reads."""
        samplers: list[Any] = self._source.samplers()
        return samplers

    def _run_state(self) -> RunState:
        """Return where the present epoch is, or begins."""
        if self._epoch_start is None:
            return self._beginning()
        epoch, run_state = self._epoch_start
        run = self._run
        if run is not None and run.touched:
            epoch = run.epoch
            run_state = run.run_state()
        if epoch == self.epoch:
            return run_state
        return run_state | NONE_GIVEN if run_state["between"] else self._beginning()

    def _identity(self) -> dict[str, Any]:
        """Return all that decides the order of an epoch, as far as it is known."""
        names = ("world_size", "seed", *self._arguments)
        arguments = {name: getattr(self, name) for name in names}
        return {"sampler": type(self).__name__, "version": VERSION, **arguments}

    def _checked_allowed(self, allow: str | Iterable[str]) -> Sequence[str]:
        """Return the names of what may be another, or refuse them."""
        if not isinstance(allow, Iterable):
            raise TypeError(f"allow must be names of arguments, got {brief_repr(allow)}")
        names = [allow] if isinstance(allow, str) else list(allow)
        for name in names:
            checked_choice("allow", name, self._dealt_by)
        return names

    def _checked(self, state: Any, allowed: Sequence[str]) -> list[Any]:
        """Refuse what is no state of such a sampler; return what another one was dealt out by."""
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict from state_dict(), got {brief_repr(state)}")
        self._check_identity(state)
        self._check_run_state(state)
        own = {name: getattr(self, name) for name in self._dealt_by}
        former = [state[name] for name in own]
        is_dealt_anew = former != [*own.values()]
        if is_dealt_anew or state["world_size_history"]:
            from minloader._sampling.dealt import check  # few states need it

            check(own, state, allowed)
        try:
            self._source.check(state["source"], state["epoch"])
        except (LookupError, AttributeError) as error:
            raise ValueError(f"the state is damaged: {error!r}, in {brief_repr(state)}") from error
        return former if is_dealt_anew else []

    def _check_identity(self, state: dict[str, Any]) -> None:
        """Refuse a state of a sampler with another order, whatever that was dealt out by."""
        identity = self._identity()
        for name in (*identity, "epoch", *self._beginning()):
            if name not in state:
                from minloader._diagnosis.mistakes import no_state_of_a_sampler

                raise no_state_of_a_sampler(self, state, name)
        for name, here in identity.items():
            if name not in self._dealt_by and state[name] != here:
                from minloader._diagnosis.mistakes import other_argument

                raise other_argument(name, here, state[name])

    def _check_run_state(self, state: dict[str, Any]) -> None:
        """Refuse a state that is no RunState."""
        for name in ("epoch", "batches", "begun", "errors", "dropped"):
            checked_int(name, state[name], 0, sys.maxsize)
        for name in ("world_size_history", "left"):
            if not isinstance(state[name], list | tuple):
                raise ValueError(f"{name} must be a list, got {brief_repr(state[name])}")
        checked_bool("between", state["between"])
        begun = state["begun"]
        batches = 0 if state["between"] else state["batches"]
        if begun > batches:
            raise ValueError(f"begun must be at most {batches}, got {begun}")

    def _derive(self, *case: int) -> int:
        """Return what an epoch, or a part of it, is shuffled by: the numbers say which."""
        depth = len(with_inner(self))  # another one than a sampler of the kind below
        return derive("order", type(self).__name__, depth, self.seed, *case)

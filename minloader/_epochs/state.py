"""How far a run has come: what a state says of an epoch, and how another run goes on from it.

::

                 draw()                          delivered
     sampler ----------> undelivered batches ---------------> known by their absence
                 |       {ordinal: (sampler state, item)}
                 |
      position: ordinal of the next item

Every epoch has a *ledger*, in which the epoch's iterator (``epoch.py``) notes each item that it
draws, and from which it removes each batch that it hands over. A state follows from the ledger
alone, so a loader keeps the ledger of the epoch that was begun last, not the iterator.

Guarantees:

* A state counts what the consumer was given, not what was read ahead.
* A note of a state takes a few µs, in the thread that iterates. The state itself is worked out
  when the note is called, any number of times, in any thread.
* Of a sampler that can be put back (``state_dict`` and ``load_state_dict``) a state has the
  sampler's own state from a little before the first batch that was not delivered, and how many
  items to draw from there. Any other sampler is read from its beginning, without loading what its
  items stand for.
* If a thread reads ahead of the consumer (:func:`minloader.prefetch`), the thread's iterator
  stands nearest to the consumer. :class:`Progress` points to it, and it says what was delivered.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from minloader._checks import check_int, is_stateful, part_meant, shown
from minloader._sampling.base import Sampler, ranks_of

VERSION = 2
"""Version of the states. In those of version 1 ``sampler`` and ``stream`` were not in a tuple."""

State = dict[str, Any]
Note = Callable[[], State]

STATE_COST = 100
"""A sampler is asked for its state only if it last took less than this fraction of the time since
then. A run that goes on draws a few items more instead."""


class SamplerState(NamedTuple):
    """A state of a sampler.

    Attributes:
        at: how many items had been drawn when it was taken.
        state: as the sampler gave it.
    """

    at: int
    state: Any


class Progress:
    """How far the consumer of an iterator has come. It outlives the iterator.

    Attributes:
        ledgers: of an iterator of a loader: those of the epochs that were begun, the consumer's
            first.
        note: of an iterator that reads ahead of the consumer: the state as of the batch that the
            consumer was given last.
        nearest: the progress of an iterator that reads this one ahead of the consumer.
    """

    def __init__(self, note: Note | None = None) -> None:
        self.ledgers: deque[Ledger] = deque()
        self.note = note
        self.nearest: Progress | None = None


def latest_note(progress: Progress | None, own: Callable[[], Note]) -> Note:
    """Return the state as of what the consumer was given.

    Args:
        progress: of the iterator that was begun last.
        own: notes the state as of what that iterator handed over, to whomever.
    """
    nearest = progress
    while nearest is not None and nearest.nearest is not None:
        nearest = nearest.nearest
    note = None if nearest is None else nearest.note  # once: the consumer may be at its end
    return own() if note is None else note


class Ledger:
    """Reads the sampler for one epoch, and knows what of it was not delivered yet.

    Args:
        epoch: number of the epoch.
        sampler: what to read.
        items: the same, made to refuse a second pass where that would be empty.
        tell_epoch: tells the sampler the number of the epoch.
        state: where to begin, if not at the beginning.

    Attributes:
        position: ordinal of the next item.
        ended: whether there are no more items.
        undelivered: for each batch that was drawn and not delivered, in their order, a state of
            the sampler from there or before, and the item.
        fruitful: whether any batch was delivered, by this run or an earlier one.
        over: whether the consumer was told that there are no more batches.
        left: whether the iterator is gone.
    """

    def __init__(
        self,
        epoch: int,
        sampler: Any,
        items: Iterable[Any],
        tell_epoch: Callable[[int], None] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.epoch = epoch
        self.position = 0
        self.ended = False
        self.undelivered: dict[int, tuple[SamplerState | None, Any]] = {}
        self.fruitful = state is not None
        self.over = False
        self.left = False
        self._sampler = sampler if is_stateful(sampler) else None
        # Our samplers tell the truth before their first item and behind their last. Others may
        # still be, or already be, in another epoch.
        self._is_exact = isinstance(sampler, Sampler)
        self._ranks = ranks_of(sampler)  # each has other items, and the state of one serves all
        self._unopened: Any = sampler, items, tell_epoch, state
        self._items: Iterator[Any] = iter(())
        self._done: list[tuple[int, int]] = []  # from, to: delivered by an earlier run
        self._peeked: list[Any] = []  # drawn while going on, and still to be given
        self._last: tuple[int, Any] | None = None
        self._state: SamplerState | None = None
        self._state_due = 0.0

    def open(self) -> None:
        """Begin to read, where the state was taken if there is one. Harmless when repeated.

        Raises:
            RuntimeError: the sampler is an iterator that is used up.
            ValueError: the sampler does not give what it gave when the state was taken.
        """
        if self._unopened is None:
            return
        sampler, items, tell_epoch, state = self._unopened
        ended, self.ended = self.ended, True  # what cannot be begun is over
        if tell_epoch is not None:
            tell_epoch(self.epoch)
        if state is not None and state["sampler"]:
            self._state = SamplerState(**state["sampler"])
            self.position = self._state.at
            _put_back(sampler, self._state)
        self._items = iter(items)  # once: some samplers begin anew with each
        self.ended = ended
        if self._state is not None:
            _check_put_back(sampler, self._items, self._state)
        if state is not None:
            self._go_on(state)
        self._unopened = None  # it knows the loader, which knows this ledger

    def close(self) -> None:
        """Let go of what is read. The state can still be noted."""
        self.left = True
        self._items = iter(())

    @property
    def under_way(self) -> bool:
        """Whether the consumer is in this epoch, at its last batch too."""
        return not self.left and not self.over

    @property
    def is_adjoining(self) -> bool:
        """Whether the next item follows on the last one, with nothing to leave out between."""
        return not self._done or self._done[0][0] > self.position

    def begin_task(self) -> None:
        """Ask the sampler for its state, here, unless that was done not long ago."""
        now = time.perf_counter()
        sure = self._is_exact or (self._last is not None and not self.ended)
        if self._sampler is not None and sure and now >= self._state_due and not self._peeked:
            try:
                self._state = SamplerState(self.position, copy.deepcopy(self._sampler.state_dict()))
            except NotImplementedError:  # inherited, but not meant
                self._sampler = None
            self._state_due = now + STATE_COST * (time.perf_counter() - now)

    def draw(self) -> Any:
        """Return the next item.

        Raises:
            StopIteration: there are no more.
        """
        while not self.is_adjoining:
            self._next()
            if self.position == self._done[0][1]:
                del self._done[0]
        item = self._next()
        self.undelivered[self.position - 1] = self._state, item
        return item

    def _next(self) -> Any:
        if self._peeked:
            item = self._peeked.pop()
        else:
            try:
                item = next(self._items)
            except StopIteration:
                self.ended = True
                raise
        self._last = self.position, item
        self.position += 1
        return item

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Draw up to where the state was taken, and check that the items are still the same."""
        batches = state["batches"]
        self._done = [(start, stop) for start, stop in state["beyond"]]
        if state["ended"]:
            self.position, self.ended = batches, True
            return
        ordinal, expected = state["check"] or (-1, None)
        last = max(batches - 1, ordinal)
        if self._state is not None and not self._is_exact:
            # The generator of a sampler must begin, or what was put back would hold for the next.
            last = max(last, batches)
        try:
            while self.position <= last:
                here, item = self.position, self._next()
                here_too = digest(item), self._ranks and digest(self._ranks)
                if here == ordinal and expected not in (None, *here_too):
                    raise ValueError(
                        f"the state does not fit: item {here} of the sampler is {shown(item)}, "
                        "but it was another one when the state was taken; the order must follow "
                        "from the sampler's arguments and set_epoch alone, and these be as they "
                        "were (also seed and number of ranks), or the sampler must have state_dict "
                        "and load_state_dict"
                    )
        except StopIteration:
            if self.position >= max(batches, ordinal + 1):
                return
            raise ValueError(
                f"the state does not fit: it is at batch {batches}, but the sampler has ended "
                f"after {self.position}"
            ) from None
        if self.position > batches:  # one was looked at, and not delivered
            self.position, self._peeked = batches, [item]

    def note(self) -> Note:
        """Note what has been delivered so far."""
        undelivered = self.undelivered.copy()  # in one step: another thread may ask for a state
        ended = self.ended and not undelivered
        if undelivered:
            first = next(iter(undelivered))
            state, item = undelivered[first]
            check: tuple[int, Any] | None = first, item
        else:
            first, state = self.position, None
            check = (first, self._peeked[0]) if self._peeked else self._last
            if self._is_exact or not ended:
                self.begin_task()
                state = self._state
        if check is not None and self._ranks is not None:
            check = check[0], self._ranks
        reached = undelivered, self.position, tuple(self._done)  # which goes on changing
        return partial(_place, first, reached, ended, state, check)


def _place(first: int, reached: Any, ended: bool, state: SamplerState | None, check: Any) -> State:
    """Work out the part of a state that says where in the epoch it is.

    Args:
        first: ordinal of the first batch that was not delivered.
        reached: ordinals of all batches that were drawn and not delivered, ascending; the ordinal
            of the next item; ranges of ordinals that an earlier run delivered.
        ended: whether there are no more items.
        state: of the sampler, at the first batch or before.
        check: an ordinal and its item, to recognize the order by.
    """
    undelivered, position, done = reached
    beyond, stop = [], first
    for ordinal in (*undelivered, position):
        if ordinal > stop:
            beyond.append([stop, ordinal])
        stop = max(stop, ordinal + 1)
    beyond += [[max(start, position), stop] for start, stop in done if stop > position]
    return {
        "batches": first,
        "beyond": beyond,
        "ended": ended,
        "sampler": state and {"at": state.at, "state": copy.deepcopy(state.state)},
        "check": [check[0], digest(check[1])] if check else None,
    }


def beginning(sampler: Any) -> Note:
    """Note the place where an epoch of a sampler begins that has been told its number."""
    state = None
    if isinstance(sampler, Sampler):
        state = SamplerState(0, sampler.state_dict())
    return partial(_place, 0, ((), 0, ()), False, state, None)


def has_begun(state: Mapping[str, Any]) -> bool:
    """Return whether anything of the state's epoch was delivered."""
    places = state["stream"][0]["shards"] if "stream" in state else [state]
    return any(place["batches"] or place["ended"] for place in places)


def in_one_shape(state: State) -> State:
    """Return a state whose keys are the same at any time, for torch's distributed checkpoints.

    These know a state by the path of each of its leaves, and a new loader's state is the template
    that one is read into. A tuple is a leaf to them, whatever is in it.
    """
    return {
        key: (value,) if key in ("sampler", "stream") else value for key, value in state.items()
    }


def digest(item: Any) -> str | None:
    """Return what tells plain items (numbers, strings, lists of them) apart; None of others."""
    try:
        text = json.dumps(item, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


# --- a state that is loaded


def _put_back(sampler: Any, known: SamplerState) -> None:
    try:
        sampler.load_state_dict(copy.deepcopy(known.state))  # some empty what they are given
    except StopIteration as error:
        raise ValueError(
            f"the state does not fit: the sampler, {shown(sampler)}, has ended before it was where "
            "the state was taken"
        ) from error


def _check_put_back(sampler: Any, items: Any, known: SamplerState) -> None:
    """Check that a sampler that is its own iterator says again what it said then."""
    if items is sampler and sampler.state_dict() != known.state:
        raise ValueError(
            f"the sampler, {shown(sampler)}, does not return to the state that it gave: "
            f"{shown(sampler.state_dict())}, not {shown(known.state)}; its load_state_dict is at "
            "fault (lhotse's does so after filter() of a sampler: filter the cuts instead)"
        )


def check_sampler(state: State, sampler: Any, length: int | None) -> None:
    """Refuse a state whose sampler was another one, as far as that can be told.

    Args:
        state: a checked one. If it is of another world size, it becomes one of the sampler's.
        sampler: the loader's, which has been told the state's epoch.
        length: number of its batches in that epoch; None if that is not known.
    """
    if state["sampler"] is not None and not is_stateful(sampler):
        raise ValueError(
            f"the state has one of its sampler, but the sampler here, {shown(sampler)}, has no "
            "load_state_dict; give the loader the sampler that the state was taken with"
        )
    if state["sampler"] is not None and isinstance(sampler, Sampler):
        known = state["sampler"]["state"]
        if isinstance(known, dict) and known.get("world_size") != sampler.world_size:
            _deal_anew(state, sampler)
        else:
            sampler.load_state_dict(known)  # says itself what differs
        return
    if None not in (length, state["length"]) and length != state["length"]:
        raise ValueError(
            f"the sampler has {length} batches in epoch {state['epoch']}, but the state is of one "
            f"with {state['length']}; give the loader the sampler that the state was taken with"
        )


def _deal_anew(state: State, sampler: Sampler) -> None:
    """Make a state of another world size one of the sampler's, if the sampler can do that."""
    known = state["sampler"]["state"]
    if state["beyond"]:
        raise ValueError(
            f"world_size is {sampler.world_size}, but the state is of world_size "
            f"{known.get('world_size')} and has batches that were delivered before their turn "
            "(in_order=False), which are others in each rank; end the epoch with as many ranks as "
            "it had, or take a state from between epochs"
        )
    sampler._load(known, state["batches"])
    state["sampler"] = {"at": state["batches"], "state": sampler.state_dict()}
    state["check"] = None  # what comes next is another batch now


def check_state(state: Any, seed: int | None, *, stream: bool) -> State:
    """Refuse a state that cannot be one, or is not for this loader; return a copy of it.

    Args:
        state: what was given as one.
        seed: the loader's; None if it takes any.
        stream: whether the loader's dataset is a stream.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() gave, a dict, got {shown(state)}")
    if not {"version", "seed"} <= state.keys():
        part = part_meant(state, {"version", "seed", "epoch"})
        raise ValueError(f"this is no state of a Loader, but has keys {shown(list(state))}{part}")
    if isinstance(state.get("sampler"), str):
        raise ValueError(
            f"this is the state of a {state['sampler']}, not of a Loader; give what the loader's "
            "state_dict() returned, which has it inside"
        )
    check_version(state, VERSION)
    if seed is not None and state.get("seed") != seed:
        raise ValueError(
            f"the state is of a loader with seed={state.get('seed')!r}, but this one has "
            f"seed={seed}; make it with that seed, or with seed=None, which takes the state's"
        )
    kinds = "a sampler", "a stream (an iterable dataset)"
    if ("stream" in state) != stream:
        raise ValueError(
            f"the state is of a loader with {kinds['stream' in state]}, but this one has "
            f"{kinds[stream]}"
        )
    try:
        return _copied(state)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the state is damaged: {error!r}, in {shown(dict(state))}") from error


def check_version(state: Mapping[str, Any], newest: int) -> None:
    """Refuse a state that a later minloader has saved."""
    if state["version"] not in range(1, newest + 1):
        raise ValueError(
            f"the state is of version {state['version']!r}, but this minloader reads versions up "
            f"to {newest}; load it with the minloader that saved it"
        )


def _copied(state: Mapping[str, Any]) -> State:
    """Copy a state, with all that will be needed."""
    if state["version"] > 1:  # see in_one_shape; JSON makes a list of a tuple
        state = {k: v[0] if k in ("sampler", "stream") else v for k, v in state.items()}

    def numbers(source: Mapping[str, Any], *names: str) -> State:
        return {name: check_int(name, source[name], 0) for name in names}

    known = {"version": VERSION, **numbers(state, "seed", "epoch")}
    if "stream" in state:
        stream = state["stream"]
        places = [
            numbers(place, "batches", "at")
            | {"ended": bool(place["ended"]), "state": copy.deepcopy(place["state"])}
            | {"next": copy.deepcopy(place.get("next"))}
            for place in stream["shards"]
        ]
        turn = check_int("turn", stream["turn"], 0)
        places[turn]  # there must be such a shard
        return known | {
            "stream": {"turn": turn, "shards": places, "batch_size": stream["batch_size"]}
        }
    sampler, check = state["sampler"], state["check"]
    if sampler is not None:
        sampler = numbers(sampler, "at") | {"state": copy.deepcopy(sampler["state"])}
    return known | {
        **numbers(state, "batches"),
        "beyond": [[int(start), int(stop)] for start, stop in state["beyond"]],
        "ended": bool(state["ended"]),
        "length": state["length"],
        "sampler": sampler,
        "check": None if check is None else [int(check[0]), check[1]],
    }

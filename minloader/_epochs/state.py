"""How far a run has come: what ``state_dict`` says of an epoch, and how it is gone on with.

A state counts what the consumer was given, not what was read ahead. For a sampler that can be
put back (``state_dict`` and ``load_state_dict``) it has the sampler's own state from a little
before the first batch that was not delivered, and how many items to draw from there; any other
sampler is read from its beginning, without loading what its items stand for.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from minloader._checks import check_int, is_stateful, shown

VERSION = 1

Place = dict[str, Any]

"""The part of a state that says where in the epoch it is."""


Note = Callable[[], Place]

"""A place noted in passing, which takes a few µs; worked out when it is called, any number of
times, in any thread."""


MARK_COST = 100

"""A sampler is asked for its state only if it last took less than this fraction of the time since
then; drawing a few items more mends what is missed."""


class Mark(NamedTuple):
    """What a sampler said of itself after some of its items."""

    at: int
    state: Any


class Reader:
    """Reads a sampler for one epoch.

    Args:
        items: from the sampler.
        sampler: what they are from.
        position: ordinal of the first of the items.
        known: whether the sampler is of a kind that tells the truth before its first item and
            behind its last. Others may still be, or already be, in another epoch.

    Attributes:
        position: ordinal of the next item.
        ended: whether there are no more.
    """

    def __init__(
        self, items: Iterator[Any], sampler: Any = None, position: int = 0, *, known: bool = False
    ) -> None:
        self._items = items
        self._sampler = sampler if is_stateful(sampler) else None
        self._known = known
        self._drawn = False
        self.position = position
        self.ended = False
        self._done: list[tuple[int, int]] = []  # from, to: delivered in an earlier life
        self._ahead: list[Any] = []  # drawn by resume()
        self._last: Any = None
        self._mark: Mark | None = None
        self._mark_due = 0.0

    @property
    def adjoins(self) -> bool:
        """Whether the next item follows on the last one, with nothing to leave out between."""
        return not self._done or self._done[0][0] > self.position

    def mark(self) -> Mark | None:
        """A state of the sampler, here or not far back; None if it has none to give."""
        now = time.perf_counter()
        sure = self._known or (self._drawn and not self.ended)
        if self._sampler is not None and sure and now >= self._mark_due and not self._ahead:
            try:
                self._mark = Mark(self.position, copy.deepcopy(self._sampler.state_dict()))
            except NotImplementedError:  # inherited, but not meant
                self._sampler = None
            self._mark_due = now + MARK_COST * (time.perf_counter() - now)
        return self._mark

    def draw(self) -> Any:
        """The next item.

        Raises:
            StopIteration: there are no more.
        """
        while not self.adjoins:
            self._next()
            if self.position == self._done[0][1]:
                del self._done[0]
        return self._next()

    def _next(self) -> Any:
        if self._ahead:
            item = self._ahead.pop()
        else:
            try:
                item = next(self._items)
            except StopIteration:
                self.ended = True
                raise
        self.position += 1
        self._last, self._drawn = item, True
        return item

    def resume(self, place: Mapping[str, Any]) -> None:
        """Draws up to where a state was taken, and looks whether the items are still the same."""
        batches = place["batches"]
        if self._sampler is not None and place["sampler"] is not None:
            self._mark = Mark(**place["sampler"])
        self._done = [(start, stop) for start, stop in place["beyond"]]
        if place["ended"]:
            self.position, self.ended = batches, True
            return
        ordinal, expected = place["check"] or (-1, None)
        last = max(batches - 1, ordinal)
        if self._mark is not None and not self._known:
            # The generator of a sampler must begin, or what was put back would hold for the next.
            last = max(last, batches)
        try:
            while self.position <= last:
                here, item = self.position, self._next()
                if here == ordinal and expected not in (None, digest(item)):
                    raise ValueError(
                        f"the state does not fit: item {here} of the sampler is {shown(item)}, "
                        "but it was another one when the state was taken; the order must follow "
                        "from the sampler's arguments and set_epoch alone, or the sampler must "
                        "have state_dict and load_state_dict"
                    )
        except StopIteration:
            if self.position >= max(batches, ordinal + 1):
                return
            raise ValueError(
                f"the state does not fit: it is at batch {batches}, but the sampler has ended "
                f"after {self.position}"
            ) from None
        if self.position > batches:  # one looked at, not delivered
            self.position, self._ahead = batches, [item]

    def note(self) -> Note:
        """Where it is when all that was drawn has been delivered."""
        check = None
        if self._ahead:
            check = self.position, self._ahead[0]
        elif self._drawn:
            check = self.position - 1, self._last
        mark = self.mark() if self._known or not self.ended else None
        return self.note_before(self.position, mark, [], check, ended=self.ended)

    def note_before(
        self,
        ordinal: int,
        mark: Mark | None,
        undone: list[tuple[int, int]],
        check: tuple[int, Any] | None,
        *,
        ended: bool = False,
    ) -> Note:
        """Where it is when ``ordinal`` is the first batch that was not delivered.

        Args:
            ordinal: of that batch.
            mark: of the sampler, there or before.
            undone: first ordinal, and the one after the last, of all that was not delivered.
            check: an ordinal and its item.
            ended: whether there are no more items.
        """
        done = tuple(self._done)  # which goes on changing
        return partial(_place, ordinal, mark, undone, check, ended, self.position, done)


def _place(
    ordinal: int,
    mark: Mark | None,
    undone: list[tuple[int, int]],
    check: tuple[int, Any] | None,
    ended: bool,
    position: int,
    done: tuple[tuple[int, int], ...],
) -> Place:
    beyond, reached = [], ordinal
    for start, stop in [*sorted(undone), (position, position)]:
        if start > reached:
            beyond.append([reached, start])
        reached = max(reached, stop)
    beyond += [[max(a, position), b] for a, b in done if b > position]
    return {
        "batches": ordinal,
        "beyond": beyond,
        "ended": ended,
        "sampler": mark and {"at": mark.at, "state": copy.deepcopy(mark.state)},
        "check": [check[0], digest(check[1])] if check else None,
    }


def digest(item: Any) -> str | None:
    """What tells plain items (numbers, strings, lists of them) apart; None of any other."""
    try:
        text = json.dumps(item, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


class _Epoch(Protocol):
    epoch: int

    @property
    def under_way(self) -> bool: ...
    def note(self) -> Note | None: ...


class Bookmark:
    """Where the consumer is in an epoch. It outlives the iterator, which leaves its last place.

    Attributes:
        epoch: number of the epoch.
        last: where the iterator was left; None if the epoch was over.
    """

    def __init__(self, iterator: _Epoch) -> None:
        self.epoch = iterator.epoch
        self.last: Note | None = None
        self._iterator = weakref.ref(iterator)

    def note(self) -> Note | None:
        """Where the consumer is now; None when the epoch is over."""
        iterator = self._iterator()
        return self.last if iterator is None else iterator.note()

    @property
    def under_way(self) -> bool:
        """Whether there may be batches to come."""
        iterator = self._iterator()
        return iterator is not None and iterator.under_way


def check_state(state: Any, seed: int | None, shards: int | None) -> dict[str, Any]:
    """Refuses a state that cannot be one, or is not for this loader.

    Args:
        state: what was given as one.
        seed: the loader's; None if it takes any.
        shards: of the loader's stream; None if it has a sampler.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() gave, a dict, got {shown(state)}")
    if state.get("version") != VERSION:
        raise ValueError(
            f"the state is of version {state.get('version')!r}, but this minloader reads version "
            f"{VERSION}; load it with the minloader that saved it"
        )
    if seed is not None and state.get("seed") != seed:
        raise ValueError(
            f"the state is of a loader with seed={state.get('seed')!r}, but this one has "
            f"seed={seed}; make it with that seed, or with seed=None, which takes the state's"
        )
    kinds = "a sampler", "a stream (an iterable dataset)"
    if ("stream" in state) != (shards is not None):
        raise ValueError(
            f"the state is of a loader with {kinds['stream' in state]}, but this one has "
            f"{kinds[shards is not None]}"
        )
    try:
        return _checked(state)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the state is damaged: {error!r}, in {shown(dict(state))}") from error


def _checked(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, with all that will be needed."""
    known = {"version": VERSION, "seed": check_int("seed", state["seed"], 0)}
    known["epoch"] = check_int("epoch", state["epoch"], 0)
    if "stream" in state:
        stream = state["stream"]
        places = [
            {
                "batches": check_int("batches", place["batches"], 0),
                "ended": bool(place["ended"]),
                "at": check_int("at", place["at"], 0),
                "state": copy.deepcopy(place["state"]),
            }
            for place in stream["shards"]
        ]
        turn = check_int("turn", stream["turn"], 0)
        places[turn]  # there must be such a shard
        return known | {
            "stream": {"turn": turn, "shards": places, "batch_size": stream["batch_size"]}
        }
    sampler, check = state["sampler"], state["check"]
    if sampler is not None:
        at = check_int("at", sampler["at"], 0)
        sampler = {"at": at, "state": copy.deepcopy(sampler["state"])}
    return known | {
        "batches": check_int("batches", state["batches"], 0),
        "beyond": [[int(start), int(stop)] for start, stop in state["beyond"]],
        "ended": bool(state["ended"]),
        "length": state["length"],
        "sampler": sampler,
        "check": None if check is None else [int(check[0]), check[1]],
    }

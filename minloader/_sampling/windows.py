"""One engine for samplers that plan by lengths: windows of samples become batches.

::

    lengths, or an inner sampler  ──>  window  ──>  plan(costs)  ──>  numbers of samples, and where
          (source.py)                                                 each batch begins and ends

An array of lengths is one window. Lazy lengths, and the items of an inner sampler, are read window
by window. Nothing is carried over from one to the next. So a place is that of the source where the
window begins, and a run that goes on reads no more than one window again.

A *leg* is what is given in one world size. If that changes in a window, the legs before are planned
again as they were then, and what they have left is planned as if it were all.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice, starmap
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minloader._checks import check_choice, check_iterable, shown
from minloader._errors import without_frames
from minloader._sampling.base import Place, Run, Sampler
from minloader._sampling.seeding import Piece
from minloader._sampling.source import ItemSource, look_up, plain

Plan = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Numbers of entries; where each batch begins in them; and where it ends. Step after step, the
batches of its ranks in their order."""

WINDOW = 10_000
"""Number of lazy lengths, or of an inner sampler's items, that are read ahead to be planned. More
of them make tighter buckets, fuller rows and better shuffling, but the first batch waits for all of
them."""


PIECES = 1 << 24
"""Into how many pieces a sample may be split. A length beyond that is a mistake."""


@dataclass
class Window:
    """Samples that are planned together. An *entry* is a sample, or a piece of one.

    Attributes:
        costs: of the entries, above 0.
        samples: number of the sample of each entry; None: they are the same.
        spans: where each entry starts and stops in its sample; None: they are whole.
        names: what the samples are called: of an array of lengths ``range(n)``, their numbers.
    """

    costs: NDArray[Any]
    samples: NDArray[Any] | None
    spans: NDArray[Any] | None
    names: Sequence[Any]

    def items(self, entries: NDArray[Any]) -> list[Any]:
        """Return the items of a batch."""
        samples = entries if self.samples is None else self.samples[entries]
        items: list[Any] = samples.tolist()
        if not isinstance(self.names, range):
            items = [self.names[sample] for sample in items]
        if self.spans is None:
            return items
        spans = zip(items, *self.spans[entries].T.tolist(), strict=True)
        return list(starmap(Piece, spans))


class Dealt:
    """What a leg of an epoch gives of a window. Its batches are planned as they are asked for.

    Args:
        plans: begins to plan: returns the first steps, the next ones, and so on.
        entries: which entries of the window are planned.
        begun: number of batches that each rank was given before them.
        ranks: how many there are.

    Attributes:
        begun: as given.
        there: number of entries that ranks may get; those that no rank does are dropped.
        legs: that leg and later ones, if the leg goes on in the next window.
    """

    def __init__(
        self,
        plans: Callable[[], Iterator[Plan]],
        entries: NDArray[Any],
        begun: int,
        ranks: int,
    ) -> None:
        self.begun = begun
        self.there = len(entries)
        self.legs: list[Any] = []
        self._begin = plans
        self._entries = entries
        self._ranks = ranks
        self._lock = threading.RLock()  # another thread may ask for the length
        self._coming: Iterator[Plan] | None = None
        self._plans: list[Plan] = []
        self._counts: list[int] = []  # of batches, up to the end of each plan

    def _plan_more(self) -> bool:
        """Plan the next steps; return whether there are any."""
        if self._coming is None:
            self._plans.clear()
            self._counts.clear()
            self._coming = self._begin()
        before = len(self._counts)
        try:
            self._plans.extend(islice(self._coming, 1))  # in one step, which nothing interrupts
        except BaseException:
            self._coming = None  # what was interrupted is over: it is planned again
            raise
        while len(self._counts) < len(self._plans):
            _, starts, _ = self._plans[len(self._counts)]
            self._counts.append((self._counts[-1] if self._counts else 0) + len(starts))
        return len(self._counts) > before

    def _plan_all(self) -> None:
        while self._plan_more():
            pass

    def batch(self, number: int) -> NDArray[Any] | None:
        """Return the entries of a batch, of those of all ranks; None if there are fewer."""
        with self._lock:
            while not self._counts or number >= self._counts[-1]:
                if not self._plan_more():
                    return None
            at = bisect_right(self._counts, number)
            numbers, starts, stops = self._plans[at]
            place = number - (self._counts[at - 1] if at else 0)
        return self._entries[numbers[starts[place] : stops[place]]]

    @property
    def end(self) -> int:
        """Number of batches that each rank was given after those of the window."""
        with self._lock:
            self._plan_all()
            return self.begun + (self._counts[-1] if self._counts else 0) // self._ranks

    @property
    def dropped(self) -> int:
        """Number of samples of the window that no rank gets."""
        with self._lock:
            self._plan_all()
            given = sum(int((stops - starts).sum()) for _, starts, stops in self._plans)
            return self.there - given


class WindowSampler(Sampler):
    """A sampler that plans by lengths, and may plan the items of an inner sampler by theirs.

    Args:
        lengths: an array, a sequence, an iterable, or with a sampler what its items are looked up
            in.
        sampler: the inner sampler.
        long: what to do with a sample that costs more: "refuse", "drop", and perhaps "split".
        ranks: whether to shuffle, seed, rank and world size.
    """

    _kind: tuple[str, type, str] = "uif", Real, "number"  # what lengths may be: dtypes, type, words
    _ways: tuple[str, ...] = "refuse", "drop"
    _limits: tuple[str, ...]  # arguments of which one is given: the most that a sample may cost
    cost: Callable[[Any], float] | None = None

    def __init__(self, lengths: Any, sampler: Any, long: str, *ranks: Any) -> None:
        super().__init__(*ranks)
        self.long = check_choice("long", long, self._ways)
        self._length_of: Callable[[Any], Any] | None = None
        self._all: Window | None = None  # None: they are not known beforehand
        self._dealt: tuple[Any, Dealt] | None = None  # of all, the last time
        self.lengths: str | None = None  # what tells them from others
        self.n: int | None = None
        if sampler is not None:
            check_iterable("sampler", sampler)
            self.sampler, self._source = sampler, ItemSource("sampler", sampler)
            self._length_of = look_up(lengths)
            self.lengths = "of a sampler"
        elif isinstance(lengths, Mapping):
            raise TypeError(
                f"lengths is a mapping, {shown(lengths)}, whose keys are no lengths; give "
                "sampler=list(lengths) too, for batches of its keys"
            )
        elif isinstance(lengths, str) or not isinstance(lengths, Iterable):
            raise TypeError(f"lengths must be an iterable of numbers, got {shown(lengths)}")
        elif isinstance(lengths, Sized):
            self.n = len(lengths)
            self._all, errors = self._window(lengths, range(self.n))
            for error in errors:
                raise error
            digest = blake2b(self._all.costs.data, digest_size=16)
            if self._all.samples is not None:
                digest.update(self._all.samples.data)
            self.lengths = digest.hexdigest()
        else:
            self._source = ItemSource("lengths", lengths)

    def _foreseen(self, place: Place) -> tuple[int, int]:
        if self._all is None:
            raise TypeError("lengths are read lazily, so the number of batches is not known")
        dealt = self._deal(self._all, self.epoch, place)
        return dealt.end, dealt.dropped

    # --- what samplers of this kind must have

    def _plan(self, costs: NDArray[Any], rng: np.random.Generator, by: Any) -> Iterator[Plan]:
        """Yield the batches of entries, some whole steps at a time.

        Args:
            costs: of the entries, above 0 and at most the limit.
            rng: what to draw from.
            by: what steps are dealt out by: a dict of all attributes, with those named in
                ``_dealt_by`` as they were then.
        """
        raise NotImplementedError

    def _limit(self, by: Any) -> tuple[str, float]:
        """Return what an entry may cost at most where steps are dealt out by ``by``; its name."""
        return next((name, by[name]) for name in self._limits if by[name])

    # --- windows

    def _window(self, lengths: Any, names: Sequence[Any]) -> tuple[Window, list[Exception]]:
        """Return the window of some samples, and the errors of those that it leaves out.

        Args:
            lengths: of the samples; for a length may stand the error of looking it up.
            names: what the samples are called.
        """
        dtypes, kind, word = self._kind
        limit_name, limit = self._limit(vars(self))
        each = lengths if hasattr(lengths, "__array__") else list(lengths)
        errors: dict[int, Exception] = {}
        try:
            values = np.asarray(each)
        except ValueError:  # some are sequences
            values = np.empty((0, 0))
        if values.ndim != 1 or (values.size and values.dtype.kind not in dtypes):
            numbers = [plain(one) for one in each]
            for n, one in enumerate(numbers):
                if isinstance(one, Exception):
                    errors[n] = one
                elif not isinstance(one, kind) or isinstance(one, bool):
                    name = shown(names[n])
                    errors[n] = TypeError(
                        f"lengths must be one {word} for each sample, got {shown(one)} for {name}"
                    )
                numbers[n] = 0 if n in errors else _for_numpy(one)
            values = np.array(numbers)
        wrong = ~(values >= 0)  # NaN is wrong too
        failed: dict[int, Exception] = {}
        costs = self._price(np.where(wrong, 0, values) if wrong.any() else values, failed)
        errors |= {n: failed[n] for n in failed if not wrong[n]}
        wrong[list(errors)] = True
        most, what = limit, f"{limit_name}={limit:g}"
        if self.long == "split":
            most, what = limit * PIECES, f"{limit * PIECES:g} with {limit_name}={limit:g}"
        too_long = (costs > most) & (self.long != "drop")
        others = " or ".join(f"long={way!r}" for way in self._ways if way != self.long)
        for at in np.flatnonzero(wrong | too_long)[:WINDOW].tolist():
            price = f" and costs {costs[at]:g}" if too_long[at] and costs[at] != values[at] else ""
            advice = f"; raise {limit_name}, leave that sample out, or give {others}"
            error = ValueError(
                f"lengths[{names[at]!r}] is {values[at]}{price}, but must be at least 0 and at "
                f"most {what}{advice if too_long[at] else '; leave that sample out'}"
            )
            errors.setdefault(at, error)
        if self.long == "split":  # else an entry is left out where its window is planned
            wrong |= too_long
        samples = spans = None
        if wrong.any():
            samples = np.flatnonzero(~wrong)
            costs = costs[samples]
        if self.long == "split":
            pieces, spans = _cut(costs, int(limit))
            samples = pieces if samples is None else samples[pieces]
            costs = np.maximum(1, spans[:, 1] - spans[:, 0])
        elif not costs.all():  # what costs nothing would let batches grow without end
            costs = np.where(costs == 0, min(1, limit), costs)
        return Window(costs, samples, spans, names), [errors[at] for at in sorted(errors)]

    def _price(self, lengths: NDArray[Any], errors: dict[int, Exception]) -> NDArray[Any]:
        """Return what samples cost, at least 0, for their lengths, which are at least 0.

        Args:
            lengths: of the samples.
            errors: gets those of samples that have no cost, by the number of the sample.
        """
        if self.cost is None:  # in a type that is wide enough: small ones would overflow
            small = np.min_scalar_type(lengths.max(initial=0))
            return lengths.astype(np.float64 if lengths.dtype.kind == "f" else small)
        distinct, where = np.unique(lengths, return_inverse=True)
        costs = np.zeros(len(distinct))
        for number, length in enumerate(distinct.tolist()):  # Python's: any callable will do
            try:
                cost = self.cost(length)
                if not isinstance(cost, Real) or isinstance(cost, bool) or not 0 <= cost < math.inf:
                    raise ValueError(
                        "cost must give a finite number of at least 0, but for the length "
                        f"{length} it gave {shown(cost)}"
                    )
                costs[number] = cost
            except Exception as error:
                errors |= dict.fromkeys(np.flatnonzero(where == number).tolist(), error)
        return costs[where]

    def _deal(self, window: Window, epoch: int, place: Place) -> Dealt:
        """Return the batches of a window after those of the legs before."""
        is_drawn = self.shuffle or self.world_size > 1 or place["legs"]
        key = epoch if is_drawn else 0, place["legs"]
        if window is self._all and self._dealt is not None and self._dealt[0] == key:
            return self._dealt[1]
        n, begun = len(window.costs), place["begun"]
        left = np.arange(n, dtype=np.min_scalar_type(-n - 1))
        legs = self._legs(place)
        for part, (*values, until) in enumerate(legs):
            by = vars(self) | dict(zip(self._dealt_by, values, strict=True))
            fits = left[window.costs[left] <= self._limit(by)[1]]
            case = epoch, place["begun"], part
            plans = partial(self._plans_of, window.costs[fits], case, by)
            dealt = Dealt(plans, fits, begun, by["world_size"])
            if self.long == "drop":
                dealt.there = len(left)
            count = (until - begun) * by["world_size"]
            if part == len(legs) - 1 or (count and dealt.batch(count - 1) is None):
                break
            given = [entries for n in range(count) if (entries := dealt.batch(n)) is not None]
            left = left[np.isin(left, np.concatenate([left[:0], *given]), invert=True)]
            begun = until
        dealt.legs = legs[part:-1]
        if window is self._all:
            self._dealt = key, dealt
        return dealt

    def _plans_of(self, costs: NDArray[Any], case: tuple[int, ...], by: Any) -> Iterator[Plan]:
        """Begin to plan entries, in the order of a case."""
        return self._plan(costs, np.random.default_rng(self._derive(*case)), by)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_dealt": None}  # a plan that was begun is planned again


def _for_numpy(number: Any) -> Any:
    """Return a number such that numpy finds a type for it and any others."""
    if number < 2**62:
        return max(-1, number)
    try:
        return float(number)
    except OverflowError:  # of an int of hundreds of digits
        return math.inf


def _cut(lengths: NDArray[Any], capacity: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the sample of each piece, shape ``(n,)``, and its start and stop, shape ``(n, 2)``."""
    stops = lengths.astype(np.int64)
    counts = np.maximum(1, -(-stops // capacity))
    samples = np.repeat(np.arange(len(stops)), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(samples)) - firsts[samples]) * capacity
    return samples, np.stack([starts, np.minimum(starts + capacity, stops[samples])], axis=1)


class _Batches(Run):
    """The batches of an epoch, window by window."""

    def __init__(self, sampler: WindowSampler, epoch: int, place: Place) -> None:
        super().__init__(sampler, epoch, place)
        self._window = sampler._all
        self._dealt: Dealt | None = None
        self._found: list[Any] = []  # what was read of the window, until that is whole
        self._numbers: list[int] = []  # where in the source that is
        self._failed: list[Exception] = []  # errors that are still to be raised
        self._errors: int = place["errors"]  # of the window, that were raised
        self._forgiven = self._errors  # by an earlier run

    def place(self) -> Place:
        numbers = {"batches": self.batches, "dropped": self.dropped, "errors": self._errors}
        return self._place | numbers | {"between": self.ended}

    def length(self) -> int:
        """Return the number of batches of the epoch, of lengths that are all known."""
        if self.ended:
            return self.batches
        assert self._window is not None
        dealt = self._dealt
        if dealt is None:
            dealt = self.sampler._deal(self._window, self.epoch, self._place)
        return dealt.end

    def _next(self) -> list[Any]:
        while True:
            if self._failed and not self._forgiven:
                self._errors += 1
                raise self._failed.pop(0)
            if self._failed:
                self._forgiven -= 1
                del self._failed[0]
            elif self._window is None:
                self._read()
            else:
                if self._dealt is None:
                    self._dealt = self.sampler._deal(self._window, self.epoch, self._place)
                dealt, sampler = self._dealt, self.sampler
                at = (self.batches - dealt.begun) * sampler.world_size + sampler.rank
                entries = None if dealt.legs else dealt.batch(at)
                if entries is not None:
                    return self._window.items(entries)
                self._turn(dealt.end, dealt.dropped, dealt.legs)

    def _read(self) -> None:
        """Read the next window, or the rest of it where an error has interrupted that."""
        sampler, reading, found = self.sampler, self._reading, self._found
        first, before = reading.read, len(found)
        try:
            reading.take(found, WINDOW - before)
        except Exception as error:
            if reading.ended:  # it cannot be begun, which is no error of a window
                raise
            self._failed.append(error)
        finally:
            self._numbers += range(first, first + len(found) - before)
        if reading.ended or len(found) >= WINDOW:
            names, lengths = self._numbers, found
            if sampler._length_of is not None:
                names, lengths = found, list(map(sampler._length_of, found))
            self._window, errors = sampler._window(lengths, names)
            self._failed += errors
            self._found, self._numbers = [], []
        for failed in self._failed:
            without_frames(failed)

    def _turn(self, end: int, dropped: int, legs: list[Any]) -> None:
        """Begin another window, behind the one that was given; or end."""
        reading, place = self._reading, self.sampler._beginning()
        self._errors = self._forgiven = 0
        self.dropped += dropped
        if self._window is self.sampler._all or reading.ended:
            self._place = place | {"source": reading.over()}
            self.ended = True
            raise StopIteration
        self._window = self._dealt = None
        self._place = place | {"begun": end, "legs": legs, "source": reading.place()}


WindowSampler._begin = _Batches

"""One engine for samplers that plan by lengths: windows of samples become batches.

::

    lengths, or an inner sampler  ──>  window  ──>  plan(costs)  ──>  numbers of samples, and where
          (source.py)                                                 each batch begins and ends

A *window* is the samples that are planned together. An array of lengths is one window. Lazy
lengths, and the items of an inner sampler, are read window by window. Nothing is carried over from
one window to the next. So a state says where the source stood when the window began, and how many
batches were given since. A run that goes on from a state reads that window again, and no more.

If the world size changes within a window, what was given with each former one is planned again as
it was planned then (see ``world_size_history`` in ``base.py``). The samples that were not given are
planned as if they were all there are.
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
from numbers import Integral, Real
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minloader._arguments import as_float, check_iterable, checked_choice
from minloader._errors import breaks_in, without_frames
from minloader._formats import brief_repr
from minloader._protocols import is_array_like
from minloader._sampling.base import Run, RunState, Sampler
from minloader._sampling.lengths import look_up
from minloader._sampling.seeding import Piece
from minloader._sampling.source import ItemSource, encoded

Plan = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Some steps: the numbers of their entries; where each batch begins in these; and where it ends.
The batches come step after step, and within a step rank after rank."""

WINDOW = 10_000
"""Number of lazy lengths, or of an inner sampler's items, that are read ahead to be planned. More
of them make tighter buckets, fuller rows and better shuffling, but the first batch waits for all of
them."""

PIECES = 1 << 24
"""Into how many pieces a sample may be split. A length beyond that is a mistake."""

MOST = 2**62
"""What rows may hold at most, and a sample that is split: sums of two still fit into 64 bits."""


@dataclass
class Window:
    """Samples that are planned together. An *entry* is a sample, or a piece of one.

    Attributes:
        costs: what each entry costs, above 0.
        samples: number of the sample of each entry; None where entry n is sample n.
        spans: where each entry starts and stops in its sample; None where entries are whole
            samples.
        names: what the sampler yields for each sample: of an array of lengths ``range(n)``.
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


class PlannedWindow:
    """The batches of a window with one world size. They are planned as they are asked for.

    Args:
        begin: begins to plan: returns an iterator over the plans, each behind the number of batches
            up to its end.
        entries: which entries of the window are planned.
        batches_before: number of batches that each rank was given before these.
        ranks: how many there are.

    Attributes:
        batches_before: as given.
        num_samples: number of entries that ranks may get; those that no rank gets are dropped.
        unfinished_history: what is left of the ``world_size_history`` for the next window: this
            world size and later ones; [] unless what was given with it goes on there.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[tuple[int, Plan]]],
        entries: NDArray[Any],
        batches_before: int,
        ranks: int,
    ) -> None:
        self.batches_before = batches_before
        self.num_samples = len(entries)
        self.unfinished_history: list[Any] = []
        self._begin = begin
        self._entries = entries
        self._ranks = ranks
        self._lock = threading.RLock()  # another thread may ask for the length
        self._next_plans: Iterator[tuple[int, Plan]] | None = None
        self._plans: list[tuple[int, Plan]] = []

    def _plan_more(self) -> bool:
        """Plan the next steps; return whether there are any."""
        if self._next_plans is None:
            self._plans.clear()
            self._next_plans = self._begin()
        before = len(self._plans)
        try:
            # In one step, which nothing interrupts.
            self._plans.extend(islice(self._next_plans, 1))
        except BaseException:
            self._next_plans = None  # an iterator that was interrupted is over: plan again
            raise
        return len(self._plans) > before

    @property
    def _num_planned(self) -> int:
        """Number of batches that are planned, of all ranks."""
        return self._plans[-1][0] if self._plans else 0

    def _plan_all(self) -> None:
        while self._plan_more():
            pass

    def batch(self, number: int) -> NDArray[Any] | None:
        """Return the entries of a batch, by its number among those of all ranks.

        Returns:
            None if there are fewer batches.
        """
        with self._lock:
            while number >= self._num_planned:
                if not self._plan_more():
                    return None
            at = bisect_right(self._plans, number, key=itemgetter(0))
            end, (numbers, starts, stops) = self._plans[at]
        first = end - len(starts)
        span = slice(starts[number - first], stops[number - first])
        return self._entries[numbers[span]]

    @property
    def batches_after(self) -> int:
        """Number of batches that each rank was given after those of the window."""
        with self._lock:
            self._plan_all()
            return self.batches_before + self._num_planned // self._ranks

    @property
    def dropped(self) -> int:
        """Number of samples of the window that no rank gets."""
        with self._lock:
            self._plan_all()
            given = sum(int((stops - starts).sum()) for _, (_, starts, stops) in self._plans)
            return self.num_samples - given


class WindowSampler(Sampler):
    """A sampler that plans by lengths, and may plan the items of an inner sampler by theirs.

    Args:
        lengths: an array, a sequence, an iterable, or with a sampler what its items are looked up
            in.
        sampler: the inner sampler.
        long: what to do with a sample that costs more: "refuse", "drop", and perhaps "split".
        shuffle: whether each epoch has another order.
        seed: non-negative int.
        rank: number of this rank, from 0.
        world_size: number of ranks.
    """

    _length_type: type = Real
    _long_choices: tuple[str, ...] = ("refuse", "drop")
    _cost_limits: tuple[str, ...]  # arguments of which one is given: what a sample may cost at most
    cost: Callable[[Any], float] | None = None

    def __init__(
        self,
        lengths: Any,
        sampler: Any,
        long: str,
        *,
        shuffle: bool,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        self.long = checked_choice("long", long, self._long_choices)
        self._length_of: Callable[[Any], Any] | None = None
        self._all: Window | None = None  # None: they are not known beforehand
        self._last_planned: tuple[Any, PlannedWindow] | None = None  # of all, and of which epoch
        self.lengths_digest: str | None = None  # which tells them from others
        self.n: int | None = None
        if sampler is not None:
            check_iterable("sampler", sampler)
            self.sampler = sampler
            self._source = ItemSource("sampler", sampler)
            self._length_of = look_up(lengths)
            self.lengths_digest = "of a sampler"
        elif isinstance(lengths, Mapping):
            raise TypeError(
                f"lengths is a mapping, {brief_repr(lengths)}, whose keys are no lengths; give "
                "sampler=list(lengths) too, for batches of its keys"
            )
        elif isinstance(lengths, str) or not _has_items(lengths):
            raise TypeError(f"lengths must be an iterable of numbers, got {brief_repr(lengths)}")
        elif isinstance(lengths, Sized):
            self._take_all(lengths)
        else:
            self._source = ItemSource("lengths", lengths)

    def _take_all(self, lengths: Any) -> None:
        """Make one window of lengths that are all known."""
        self.n = len(lengths)
        self._all, errors = self._window(lengths, range(self.n))
        if errors:
            raise errors[0]
        digest = blake2b(self._all.costs.data, digest_size=16)
        if self._all.samples is not None:
            digest.update(self._all.samples.data)
        self.lengths_digest = digest.hexdigest()

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

    def _cost_limit(self, by: Any) -> tuple[str, float]:
        """Return what an entry may cost at most where steps are dealt out by ``by``; its name."""
        limits = ((name, by[name]) for name in self._cost_limits if by[name])
        return next(limits, ("", MOST))  # a state that is damaged has none

    # --- windows

    def _window_of(self, items: list[Any], numbers: list[int]) -> tuple[Window, list[Exception]]:
        """Return the window of what was read of the source; and errors, as :meth:`_window`.

        Args:
            items: lazy lengths, or items of an inner sampler.
            numbers: of these, as they came.
        """
        if self._length_of is None:
            return self._window(items, numbers)
        return self._window(list(map(self._length_of, items)), items)

    def _window(self, lengths: Any, names: Sequence[Any]) -> tuple[Window, list[Exception]]:
        """Return the window of some samples, and the errors of those that it leaves out.

        Args:
            lengths: of the samples; for a length may stand the error of looking it up.
            names: what the sampler yields for each sample.
        """
        limit = self._cost_limit(vars(self))[1]
        values, errors = self._numbers_of(lengths, names)
        wrong = ~(values >= 0)  # NaN is wrong too
        failed: dict[int, Exception] = {}
        costs = self._price(np.where(wrong, 0, values) if wrong.any() else values, failed)
        errors |= {n: failed[n] for n in failed if not wrong[n]}
        wrong[list(errors)] = True
        most = min(limit * PIECES, MOST) if self.long == "split" else limit
        too_long = (costs > most) & (self.long != "drop")
        for at in np.flatnonzero(wrong | too_long)[:WINDOW].tolist():
            if at not in errors:
                cost = costs[at] if too_long[at] else None
                errors[at] = self._out_of_bounds(names[at], values[at], cost)
        if self.long == "split":  # else an entry is left out where its window is planned
            wrong |= too_long
        samples = None
        spans = None
        if wrong.any():
            samples = np.flatnonzero(~wrong)
            costs = costs[samples]
        if self.long == "split":
            pieces, spans = _cut(costs, int(limit))
            samples = pieces if samples is None else samples[pieces]
            costs = np.maximum(1, spans[:, 1] - spans[:, 0])
        elif not costs.all():  # what costs nothing would let batches grow without end
            costs = np.where(costs == 0, min(1, limit), costs)
        window = Window(costs=costs, samples=samples, spans=spans, names=names)
        return window, [errors[at] for at in sorted(errors)]

    def _numbers_of(
        self, lengths: Any, names: Sequence[Any]
    ) -> tuple[NDArray[Any], dict[int, Exception]]:
        """Return lengths as an array, with 0 for those that are no numbers; and their errors."""
        wanted = self._length_type
        dtypes, word = ("ui", "int") if wanted is Integral else ("uif", "number")
        given = lengths if is_array_like(lengths) else list(lengths)
        errors: dict[int, Exception] = {}
        try:
            values = np.asarray(given)
        except ValueError:  # some are sequences
            values = np.empty((0, 0))
        if values.ndim == 1 and (not values.size or values.dtype.kind in dtypes):
            return values, errors
        numbers = [encoded(length) for length in given]
        for n, length in enumerate(numbers):
            if isinstance(length, Exception):
                errors[n] = length
            elif not isinstance(length, wanted) or isinstance(length, bool):
                errors[n] = TypeError(
                    f"lengths must be one {word} for each sample, got "
                    f"{brief_repr(length)} for {brief_repr(names[n])}"
                )
            numbers[n] = 0 if n in errors else _for_numpy(length)
        return np.array(numbers), errors

    def _out_of_bounds(self, name: Any, length: Any, cost: Any) -> ValueError:
        """Return the error for a length that is below 0, or of a sample that costs too much.

        Args:
            name: of the sample.
            length: of the sample.
            cost: of the sample; None where the length is below 0.
        """
        limit_name, limit = self._cost_limit(vars(self))
        most = f"{limit_name}={limit:g}"
        if self.long == "split":
            most = f"{min(limit * PIECES, MOST):g} with {most}"
        price = "" if cost is None or cost == length else f" and costs {cost:g}"
        advice = "leave that sample out"
        if cost is not None:
            others = [f"long={way!r}" for way in self._long_choices if way != self.long]
            advice = f"raise {limit_name}, leave that sample out, or give {' or '.join(others)}"
        return ValueError(
            f"lengths[{name!r}] is {length}{price}, but must be at least 0 and at most {most}; "
            f"{advice}"
        )

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
                is_number = isinstance(cost, Real) and not isinstance(cost, bool)
                if not is_number or not 0 <= as_float(cost) < math.inf:
                    raise ValueError(
                        "cost must give a finite number of at least 0, but for the length "
                        f"{length} it gave {brief_repr(cost)}"
                    )
                costs[number] = cost
            except Exception as error:
                if breaks_in(error):
                    raise
                errors |= dict.fromkeys(np.flatnonzero(where == number).tolist(), error)
        return costs[where]

    def _plan_window(self, window: Window, epoch: int, start: RunState) -> PlannedWindow:
        """Return the batches of a window that come after those of former world sizes.

        Args:
            window: what is planned.
            epoch: number of the epoch.
            start: where the run was when the window began.
        """
        is_drawn = self.shuffle or self.world_size > 1 or start["world_size_history"]
        key = (self.seed, epoch if is_drawn else 0, start["world_size_history"])
        if window is self._all and self._last_planned is not None and self._last_planned[0] == key:
            return self._last_planned[1]
        num_entries = len(window.costs)
        remaining = np.arange(num_entries, dtype=np.min_scalar_type(-num_entries - 1))
        batches_before = start["begun"]
        history = self._history(start)
        for part, (*values, until) in enumerate(history):
            by = vars(self) | dict(zip(self._dealt_by, values, strict=True))
            ranks = by["world_size"]
            fits = remaining[window.costs[remaining] <= self._cost_limit(by)[1]]
            case = (epoch, start["begun"], part)
            begin = partial(self._plans_of, window.costs[fits], case, by)
            planned = PlannedWindow(begin, fits, batches_before=batches_before, ranks=ranks)
            if self.long == "drop":
                planned.num_samples = len(remaining)
            num_given = (until - batches_before) * ranks
            is_last = part == len(history) - 1
            if is_last or (num_given and planned.batch(num_given - 1) is None):
                break  # this world size was given all that there is, and more in the next window
            batches = [planned.batch(number) for number in range(num_given)]
            given = [entries for entries in batches if entries is not None]
            if given:
                remaining = remaining[np.isin(remaining, np.concatenate(given), invert=True)]
            batches_before = until
        planned.unfinished_history = history[part:-1]
        if window is self._all:
            self._last_planned = (key, planned)
        return planned

    def _plans_of(
        self, costs: NDArray[Any], case: tuple[int, ...], by: Any
    ) -> Iterator[tuple[int, Plan]]:
        """Yield the plans of entries in the order of a case, as :class:`PlannedWindow` has them."""
        end = 0
        for plan in self._plan(costs, np.random.default_rng(self._derive(*case)), by):
            end += len(plan[1])
            yield end, plan

    def __getstate__(self) -> dict[str, Any]:
        # A plan that was begun is planned again.
        return super().__getstate__() | {"_last_planned": None}


def _has_items(lengths: Any) -> bool:
    """Return whether something is iterable, as an array of no dimension only seems to be."""
    return isinstance(lengths, Iterable) and getattr(lengths, "ndim", 1) > 0


def _for_numpy(number: Any) -> Any:
    """Return a number such that numpy finds a type for it and any others."""
    return max(-1, number) if number < MOST else as_float(number)


def _cut(lengths: NDArray[Any], capacity: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the sample of each piece, shape ``(n,)``, and its start and stop, shape ``(n, 2)``."""
    stops = lengths.astype(np.int64)
    counts = np.maximum(1, -(-stops // capacity))
    samples = np.repeat(np.arange(len(stops)), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(samples)) - firsts[samples]) * capacity
    return samples, np.stack([starts, np.minimum(starts + capacity, stops[samples])], axis=1)


class _WindowRun(Run):
    """The batches of an epoch, window by window: ``_start`` is where the present one began."""

    def __init__(self, sampler: WindowSampler, epoch: int, start: RunState) -> None:
        super().__init__(sampler, epoch, start)
        self._window = sampler._all
        self._planned: PlannedWindow | None = None
        self._items: list[Any] = []  # what was read of the window, until that is whole
        self._item_numbers: list[int] = []  # where in the source these are
        self._pending_errors: list[Exception] = []  # of the window, to be raised
        self._num_errors = 0  # of the window so far; an earlier run has raised the first of them

    def run_state(self) -> RunState:
        errors = max(self._num_errors, self._start["errors"])
        numbers = {"batches": self.batches, "dropped": self.dropped, "errors": errors}
        return self._start | numbers | {"between": self.ended}

    def counts(self) -> tuple[int, int]:
        if self.sampler._all is None:
            raise TypeError("what is batched is read lazily, so the number of batches is not known")
        if self.ended:
            return self.batches, self.dropped
        planned = self._planned
        if planned is None:
            planned = self.sampler._plan_window(self._window, self.epoch, self._start)
        return planned.batches_after, planned.dropped

    def _next(self) -> list[Any]:
        while True:
            if self._pending_errors:
                self._num_errors += 1
                if self._num_errors > self._start["errors"]:
                    raise self._pending_errors.pop(0)
                del self._pending_errors[0]
            elif self._window is None:
                self._read()
            else:
                sampler = self.sampler
                if self._planned is None:
                    self._planned = sampler._plan_window(self._window, self.epoch, self._start)
                planned = self._planned
                if not planned.unfinished_history:
                    step = self.batches - planned.batches_before
                    entries = planned.batch(step * sampler.world_size + sampler.rank)
                    if entries is not None:
                        return self._window.items(entries)
                self._end_window(planned)

    def _read(self) -> None:
        """Read the next window, or the rest of it where an error has interrupted that."""
        reading = self._reading
        items = self._items
        first = reading.next
        before = len(items)
        try:
            reading.add_to(items, WINDOW - before)
        except Exception as error:
            if reading.is_ended or breaks_in(error):  # the former is no error of a window
                raise
            self._pending_errors.append(error)
        finally:
            self._item_numbers += range(first, first + len(items) - before)
        if reading.is_ended or len(items) >= WINDOW:
            self._window, errors = self.sampler._window_of(items, self._item_numbers)
            self._pending_errors += errors
            self._items = []
            self._item_numbers = []
        for pending in self._pending_errors:
            without_frames(pending)

    def _end_window(self, planned: PlannedWindow) -> None:
        """Begin another window, behind the one that was given; or end."""
        reading = self._reading
        beginning = self.sampler._beginning()
        dropped = self.dropped + planned.dropped
        ended = self._window is self.sampler._all or reading.is_ended
        if ended:
            start = beginning | {"source": reading.following()}
        else:
            history = planned.unfinished_history
            numbers = {"begun": planned.batches_after, "world_size_history": history}
            start = beginning | numbers | {"source": reading.position()}
        # Only now, and without a call in between: a state may raise, and is asked for again then.
        self._start = start
        self.dropped = dropped
        self._num_errors = 0
        if ended:
            self.ended = True
            raise StopIteration
        self._window = None
        self._planned = None


WindowSampler._begin = _WindowRun

"""One engine for samplers that plan by lengths: windows of samples become batches.

::

    lengths, or an inner sampler  ──>  window  ──>  plan(costs)  ──>  numbers of samples, and where
          (source.py)                                                 each batch begins and ends

An array of lengths is one window. Lazy lengths, and the items of an inner sampler, are read window
by window. Nothing is carried over from one to the next. So a place is that of the source where the
window begins, and a run that goes on reads no more than one window again.

If the world size changes in a window, the steps that were given are planned again as they were
then, and what they have left is planned as if it were all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import starmap
from numbers import Real
from typing import TYPE_CHECKING, Any

from minloader._checks import check_bool, check_int, check_iterable, shown
from minloader._sampling.base import Place, Run, Sampler
from minloader._sampling.seeding import Piece
from minloader._sampling.source import Source, look_up, plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Plan = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
    """Numbers of entries; where each batch begins in them; and where it ends. Step after step, the
    batches of its ranks in their order."""

WINDOW = 10_000
"""Number of lazy lengths, or of an inner sampler's items, that are read ahead to be planned. More
of them make tighter buckets, fuller rows and better shuffling, but the first batch waits for all of
them."""


@dataclass
class Window:
    """Samples that are planned together. An *entry* is a sample, or a piece of one.

    Attributes:
        costs: of the entries, above 0.
        samples: number of the sample of each entry; None: they are the same.
        spans: where each entry starts and stops in its sample; None: they are whole.
        names: what the samples are called; None: by their numbers.
        dropped: number of samples that are too long.
    """

    costs: NDArray[Any]
    samples: NDArray[Any] | None
    spans: NDArray[Any] | None
    names: Sequence[Any] | None
    dropped: int

    def items(self, entries: NDArray[Any]) -> list[Any]:
        """Return the items of a batch."""
        samples = entries if self.samples is None else self.samples[entries]
        items: list[Any] = samples.tolist()
        if self.names is not None:
            items = [self.names[sample] for sample in items]
        if self.spans is None:
            return items
        spans = zip(items, *self.spans[entries].T.tolist(), strict=True)
        return list(starmap(Piece, spans))


class WindowSampler(Sampler):
    """A sampler that plans by lengths, and may plan the items of an inner sampler by theirs.

    Args:
        lengths: an array, a sequence, an iterable, or with a sampler what its items are looked up
            in.
        sampler: the inner sampler.
        limit: the most that a sample may cost, and what messages call that.
        long: what to do with a sample that costs more: "refuse", "drop", and perhaps "split".
        shuffle: whether each epoch has another order.
        ranks: seed, rank and world size.
    """

    _kind: tuple[str, type, str] = "uif", Real, "number"  # what lengths may be: dtypes, type, words
    _ways: tuple[str, ...] = "refuse", "drop"

    def __init__(
        self,
        lengths: Any,
        sampler: Iterable[Any] | None,
        limit: tuple[str, float],
        long: str,
        shuffle: bool,
        ranks: tuple[int, int, int],
    ) -> None:
        super().__init__(*ranks)
        if long not in self._ways:
            *others, last = map(repr, self._ways)
            raise ValueError(f"long must be {', '.join(others)} or {last}, got {shown(long)}")
        self.long = long
        self.shuffle = check_bool("shuffle", shuffle)
        self._limit_name, self._limit = limit
        self._length_of: Callable[[Any], Any] | None = None
        self._all: Window | None = None  # None: they are not known beforehand
        self._plans: tuple[Any, Plan, int] | None = None
        self.lengths: str | None = None  # what tells them from others
        self.n: int | None = None
        if sampler is not None:
            check_iterable("sampler", sampler)
            self.sampler, self._source = sampler, Source("sampler", sampler)
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
            costs = self._costs(lengths)
            self.lengths = _fingerprint(costs)
            self._all = self._window(costs, None)
        else:
            self._source = Source("lengths", lengths)

    def _foreseen(self, place: Place) -> tuple[int, int]:
        if self._all is None:
            raise TypeError("lengths are read lazily, so the number of batches is not known")
        (_, starts, _), dropped = self._planned(self._all, self.epoch, place)
        return _begun(place) + len(starts) // self.world_size, dropped

    # --- what samplers of this kind must have

    def _price(self, lengths: NDArray[Any]) -> NDArray[Any]:
        """Return what samples cost, at least 0, for their lengths, which are at least 0."""
        raise NotImplementedError

    def _cut(self, costs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return costs, samples and spans of the pieces of samples."""
        raise NotImplementedError

    def _plan(self, costs: NDArray[Any], rng: np.random.Generator, by: Any) -> Plan:
        """Return the batches of entries.

        Args:
            costs: of the entries, above 0 and at most the limit.
            rng: what to draw from.
            by: what steps are dealt out by: a dict of the arguments named in ``_dealt_by``.
        """
        raise NotImplementedError

    # --- windows

    def _costs(self, lengths: Any, names: Any = None) -> NDArray[Any]:
        """Return what samples cost, 0 for those to drop.

        Args:
            lengths: of the samples.
            names: what the samples are called; None: by their numbers.

        Raises:
            TypeError, ValueError: a length is impossible. Only the first is named.
        """
        import numpy as np

        dtypes, kind, word = self._kind
        each = lengths if hasattr(lengths, "__array__") else list(lengths)
        names = range(len(each)) if names is None else names
        try:
            values = np.asarray(each)
        except ValueError:  # some are sequences
            values = np.empty((0, 0))
        if values.ndim != 1 or (values.size and values.dtype.kind not in dtypes):
            numbers = [plain(one) for one in each]
            for name, one in zip(names, numbers, strict=True):
                if not isinstance(one, kind) or isinstance(one, bool):
                    raise TypeError(
                        f"lengths must be one {word} for each sample, got {shown(one)} for "
                        f"{shown(name)}"
                    )
            # Numbers of mixed types; none is too large for numpy then.
            values = np.array([max(-1, min(one, 2**62)) for one in numbers])
        wrong = ~(values >= 0)  # NaN is wrong too
        costs = self._price(np.where(wrong, 0, values) if wrong.any() else values)
        too_long = costs > self._limit
        if self.long == "refuse":
            wrong |= too_long
        if wrong.any():
            at = int(wrong.argmax())
            price = f" and costs {costs[at]:g}" if too_long[at] and costs[at] != values[at] else ""
            raise ValueError(
                f"lengths[{names[at]!r}] is {values[at]}{price}, but must be at least 0 and at "
                f"most {self._limit_name}={self._limit:g}; raise {self._limit_name}, leave that "
                "sample out, or give another value of long"
            )
        nothing = costs == 0
        if nothing.any() and self.long != "split":  # or batches would grow without end
            costs = np.where(nothing, min(1, self._limit), costs)
        if self.long == "drop" and too_long.any():
            costs = np.where(too_long, 0, costs)
        return costs

    def _window(self, costs: NDArray[Any], names: Sequence[Any] | None) -> Window:
        """Return the window of samples that have these costs."""
        import numpy as np

        dropped = len(costs) - int(np.count_nonzero(costs))
        if self.long == "split":
            costs, samples, spans = self._cut(costs)
            return Window(costs, samples, spans, names, 0)
        kept = np.flatnonzero(costs) if dropped else None
        return Window(costs if kept is None else costs[kept], kept, None, names, dropped)

    def _read_window(self, found: list[Any], numbers: list[int]) -> tuple[Window, list[Exception]]:
        """Return the window of what was read, and the errors of what is left out of it.

        Args:
            found: the items of an inner sampler, or lengths.
            numbers: where in the source they are.
        """
        errors: list[Exception] = []
        if self._length_of is None:
            pairs = list(zip(numbers, found, strict=True))
        else:
            pairs = []
            for item in found:
                try:
                    pairs.append((item, self._length_of(item)))
                except Exception as error:
                    errors.append(error)
        names, lengths = [name for name, _ in pairs], [length for _, length in pairs]
        try:
            return self._window(self._costs(lengths, names), names), errors
        except Exception:  # one after another, then
            costs: list[Any] = []
            names = []
            for name, length in pairs:
                try:
                    costs += self._costs([length], [name]).tolist()
                    names.append(name)
                except Exception as error:
                    errors.append(error)
        import numpy as np

        return self._window(np.array(costs), names), errors

    def _planned(self, window: Window, epoch: int, place: Place) -> tuple[Plan, int]:
        """Return the batches that the present ranks have of a window, and how many are dropped."""
        import numpy as np

        key = epoch if self.shuffle or self.world_size > 1 else 0, place["dealt"]
        if window is self._all and self._plans is not None and self._plans[0] == key:
            return self._plans[1:]
        n, begun = len(window.costs), 0
        left = np.arange(n, dtype=np.min_scalar_type(-n - 1))
        own = [*(getattr(self, name) for name in self._dealt_by), None]
        for part, (*values, until) in enumerate([*place["dealt"], own]):
            by = dict(zip(self._dealt_by, values, strict=True))
            rng = self._rng(epoch, place["window_at"]["batches"], part)
            numbers, starts, stops = self._plan(window.costs[left], rng, by)
            numbers = left[numbers]
            if until is not None:
                count = (until - begun) * by["world_size"]
                given = [numbers[span] for span in map(slice, starts[:count], stops[:count])]
                left = left[np.isin(left, np.concatenate([left[:0], *given]), invert=True)]
                begun = until
        dropped = window.dropped + len(left) - int((stops - starts).sum())
        if window is self._all:
            self._plans = key, (numbers, starts, stops), dropped
        return (numbers, starts, stops), dropped

    # --- epochs and states

    def _beginning(self) -> Place:
        window = {"batches": 0, "dropped": 0, "errors": 0}
        return super()._beginning() | {"dealt": [], "window_at": window}

    def _restore(self, epoch: int, place: Place) -> None:
        for name in "batches", "dropped", "errors":
            check_int(name, place["window_at"][name], 0)
        width = len(self._dealt_by) + 1
        if any(len(part) != width or type(part[-1]) is not int for part in place["dealt"]):
            raise ValueError(f"dealt must be parts of an epoch, got {shown(place['dealt'])}")
        super()._restore(epoch, place)

    def _dealt_anew(self, place: Place, former: dict[str, Any]) -> Place:
        given = place["batches"] - place["window_at"]["batches"]
        if given > (place["dealt"][-1][-1] if place["dealt"] else 0):
            place = place | {"dealt": [*place["dealt"], [*former.values(), given]]}
        return place


def _begun(place: Place) -> int:
    """Return how many batches there were before the present part of the epoch."""
    window: int = place["window_at"]["batches"]
    return window + (place["dealt"][-1][-1] if place["dealt"] else 0)


def _fingerprint(costs: NDArray[Any]) -> str:
    """Return what tells these costs from others."""
    from hashlib import blake2b

    digest = blake2b(digest_size=16)
    for start in range(0, len(costs), 1 << 16):
        digest.update(costs[start : start + (1 << 16)].astype("<f8").tobytes())
    return digest.hexdigest()


class _Batches(Run):
    """The batches of an epoch, window by window."""

    def __init__(self, sampler: WindowSampler, epoch: int, place: Place) -> None:
        super().__init__(sampler, epoch, place)
        self._place = place  # of the window, or of a part of it
        source = sampler._source
        self._reading: Any = None if source is None else source.read(epoch, place["source"])
        self._window = sampler._all
        self._plan: Any = None
        self._found: list[Any] = []  # what was read of the window, until that is whole
        self._numbers: list[int] = []
        self._failed: list[Exception] = []  # errors that are still to be raised
        self._errors: int = place["window_at"]["errors"]  # of the window, that were raised
        self._forgiven = self._errors  # by an earlier run

    def place(self) -> Place:
        window = self._place["window_at"] | {"errors": self._errors}
        return self._place | {"batches": self.batches, "window_at": window}

    def _next(self) -> list[Any]:
        sampler = self.sampler
        while True:
            if self._window is None:
                self._read()
            if self._failed:
                self._errors += 1
                raise self._failed.pop(0)
            if self._window is not None:
                if self._plan is None:
                    plan = sampler._planned(self._window, self.epoch, self._place)
                    self._plan, self._dropped = plan
                numbers, starts, stops = self._plan
                step = self.batches - _begun(self._place)
                at = step * sampler.world_size + sampler.rank
                if at < len(starts):
                    return self._window.items(numbers[starts[at] : stops[at]])
                self._turn()

    def _read(self) -> None:
        """Read the next window, or the rest of it where an error has interrupted that."""
        reading, found = self._reading, self._found
        first, before, errors = reading.read, len(found), []
        try:
            reading.take(found, WINDOW - before)
        except Exception as error:
            errors.append(error)
        finally:
            self._numbers += range(first, first + len(found) - before)
        if reading.ended or len(found) >= WINDOW:
            self._window, more = self.sampler._read_window(found, self._numbers)
            self._found, self._numbers = [], []
            errors += more
        known, self._forgiven = self._forgiven, max(0, self._forgiven - len(errors))
        del errors[:known]
        self._failed = errors

    def _turn(self) -> None:
        """Begin another window, behind the one that was given; or end."""
        dropped = self._place["window_at"]["dropped"] + self._dropped
        reading, place = self._reading, self.sampler._beginning()
        self._errors = self._forgiven = 0
        self._plan = None
        if reading is None or reading.ended:
            self._place = place if reading is None else place | {"source": reading.over()}
            self._end(dropped)
        self._window = None
        place["window_at"] |= {"batches": self.batches, "dropped": dropped}
        self._place = place | {"source": reading.place()}


WindowSampler._begin = _Batches

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
from typing import TYPE_CHECKING, Any, Protocol

from minloader._checks import check_bool, check_int, check_iterable, shown
from minloader._sampling.base import Place, Run, Sampler
from minloader._sampling.seeding import Piece
from minloader._sampling.source import BEGINNING, Source

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


class LookUp(Protocol):
    """A sequence, a mapping, or what else returns something for an item."""

    def __getitem__(self, item: Any, /) -> Any: ...


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
        ways: the values that ``long`` may have.
        shuffle: whether each epoch has another order.
        ranks: seed, rank and world size.
    """

    _kinds, _unit = "uif", "number"  # what lengths may be

    def __init__(
        self,
        lengths: Any,
        sampler: Iterable[Any] | None,
        limit: tuple[str, float],
        long: str,
        ways: Sequence[str],
        shuffle: bool,
        ranks: tuple[int, int, int],
    ) -> None:
        super().__init__(*ranks)
        if long not in ways:
            raise ValueError(
                f"long must be {', '.join(map(repr, ways[:-1]))} or {ways[-1]!r}, got {shown(long)}"
            )
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
            self._length_of = getattr(lengths, "__getitem__", lengths)
            if not callable(self._length_of):
                raise TypeError(
                    "lengths must have __getitem__ or be a function of an item, where there is a "
                    f"sampler, got {shown(lengths)}"
                )
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
            costs, wrong = self._examine(lengths)
            if wrong.any():
                at = int(wrong.argmax())
                raise self._complaint(at, next(x for n, x in enumerate(lengths) if n == at))
            self.lengths = _fingerprint(costs)
            self._all = self._window(costs, None)
        else:
            self._source = Source("lengths", lengths)

    def __len__(self) -> int:
        """Return the number of batches of the epoch, the same for every rank.

        Raises:
            TypeError: the lengths are lazy.
        """
        if self._all is None:
            raise TypeError("lengths are read lazily, so the number of batches is not known")
        between, place = self._position()
        if between and place["batches"]:  # the epoch has ended
            return int(place["batches"])
        (_, starts, _), _ = self._planned(self._all, self.epoch, place)
        return int(_begun(place) + len(starts) // self.world_size)

    def _to_drop(self) -> int:
        if self._all is None:
            raise TypeError("lengths are read lazily")
        return self._planned(self._all, self.epoch, self._position()[1])[1]

    # --- what samplers of this kind must have

    def _price(self, lengths: NDArray[Any]) -> NDArray[Any]:
        """Return what samples cost, at least 0, for their lengths, which are at least 0."""
        raise NotImplementedError

    def _cut(self, costs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return costs, samples and spans of the pieces of samples."""
        raise NotImplementedError

    def _plan(self, costs: NDArray[Any], epoch: int, rng: np.random.Generator, by: Any) -> Plan:
        """Return the batches of entries.

        Args:
            costs: of the entries, above 0 and at most the limit.
            epoch: number of the epoch.
            rng: what to draw from.
            by: what steps are dealt out by: a dict of the arguments named in ``_dealt_by``.
        """
        raise NotImplementedError

    # --- windows

    def _examine(self, lengths: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return what samples cost, 0 for those to drop; and which have an impossible length."""
        import numpy as np

        values = np.asarray(lengths if hasattr(lengths, "__array__") else list(lengths))
        if values.ndim != 1 or (values.size and values.dtype.kind not in self._kinds):
            each = list(lengths) if values.ndim else [values]
            good = [np.asarray(one).ndim == 0 and self._is_length(one) for one in each]
            if all(good):
                raise TypeError(
                    f"lengths must be one {self._unit} for each sample, got {shown(lengths)}"
                )
            return np.zeros(len(each)), ~np.array(good)
        wrong = ~(values >= 0)  # NaN is wrong too
        costs = self._price(np.where(wrong, 0, values) if wrong.any() else values)
        too_long = costs > self._limit
        if self.long == "refuse":
            wrong |= too_long
        nothing = costs == 0
        if nothing.any() and self.long != "split":  # or batches would grow without end
            costs = np.where(nothing, min(1, self._limit), costs)
        if self.long == "drop" and too_long.any():
            costs = np.where(too_long, 0, costs)
        return costs, wrong

    def _is_length(self, value: Any) -> bool:
        import numpy as np

        return np.asarray(value).dtype.kind in self._kinds

    def _complaint(self, name: Any, length: Any) -> Exception:
        """Return the error for an impossible length."""
        import numpy as np

        if not self._is_length(length) or np.asarray(length).ndim:
            return TypeError(
                f"lengths must be one {self._unit} for each sample, got {shown(length)} for "
                f"{shown(name)}"
            )
        price = ""
        if length >= 0 and (cost := self._price(np.array([length]))[0]) != length:
            price = f" and costs {cost:g}"
        return ValueError(
            f"lengths[{name!r}] is {length}{price}, but must be at least 0 and at most "
            f"{self._limit_name}={self._limit:g}; raise {self._limit_name}, leave that sample out, "
            "or give another value of long"
        )

    def _window(self, costs: NDArray[Any], names: Sequence[Any] | None) -> Window:
        """Return the window of samples that have these costs."""
        import numpy as np

        dropped = len(costs) - int(np.count_nonzero(costs))
        if self.long == "split":
            costs, samples, spans = self._cut(costs)
            return Window(costs, samples, spans, names, 0)
        kept = np.flatnonzero(costs) if dropped else None
        return Window(costs if kept is None else costs[kept], kept, None, names, dropped)

    def _planned(self, window: Window, epoch: int, place: Place) -> tuple[Plan, int]:
        """Return the batches that the present ranks have of a window, and how many are dropped."""
        import numpy as np

        key = epoch if self.shuffle or self.world_size > 1 else 0, place["dealt"]
        if window is self._all and self._plans is not None and self._plans[0] == key:
            return self._plans[1:]
        before = place["window_at"]["batches"]
        left, begun = np.arange(len(window.costs)), 0
        for part, (*former, until) in enumerate(place["dealt"]):
            by = dict(zip(self._dealt_by, former, strict=True))
            rng = self._rng(epoch, before, part)
            numbers, starts, stops = self._plan(window.costs[left], epoch, rng, by)
            count = (until - begun) * by["world_size"]
            given = [numbers[span] for span in map(slice, starts[:count], stops[:count])]
            left = np.delete(left, np.concatenate([[], *given]).astype(np.int64))
            begun = until
        own = {name: getattr(self, name) for name in self._dealt_by}
        rng = self._rng(epoch, before, len(place["dealt"]))
        if place["dealt"]:
            numbers, starts, stops = self._plan(window.costs[left], epoch, rng, own)
            numbers = left[numbers]
        else:
            numbers, starts, stops = self._plan(window.costs, epoch, rng, own)
        dropped = window.dropped + len(left) - int((stops - starts).sum())
        if window is self._all:
            self._plans = key, (numbers, starts, stops), dropped
        return (numbers, starts, stops), dropped

    # --- epochs and states

    def _beginning(self) -> Place:
        window = {"batches": 0, "dropped": 0, "errors": 0, "source": BEGINNING}
        return {"batches": 0, "dealt": [], "window_at": window}

    def _begin(self, epoch: int, place: Place) -> Run:
        return _Batches(self, epoch, place)

    def _restore(self, epoch: int, place: Place) -> None:
        window = place["window_at"]
        for name in "batches", "dropped", "errors":
            check_int(name, window[name], 0)
        width = len(self._dealt_by) + 1
        if any(len(part) != width for part in place["dealt"]) or any(
            type(part[-1]) is not int for part in place["dealt"]
        ):
            raise ValueError(f"dealt must be parts of an epoch, got {shown(place['dealt'])}")
        if self._source is not None:
            self._source.restore(epoch, window["source"])

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
        super().__init__(epoch, place)
        self._sampler = sampler
        self._place = place  # of the window, or of a part of it
        source = sampler._source
        known = place["window_at"]["source"]
        self._reading = None if source is None else source.read(epoch, known)
        self._window: Window | None = None
        self._plan: Any = None
        self._errors: int = place["window_at"]["errors"]
        self._forgiven = self._errors
        self._names: list[Any] = []  # of the window, until it is planned
        self._lengths: list[Any] = []

    def place(self) -> Place:
        window = {**self._place["window_at"], "errors": self._errors}
        return self._place | {"batches": self.batches, "window_at": window}

    def __next__(self) -> list[Any]:
        self.touched = True
        sampler = self._sampler
        while not self.ended:
            if self._window is None:
                self._read()
                continue
            numbers, starts, stops = self._plan
            step = self.batches - _begun(self._place)
            at = step * sampler.world_size + sampler.rank
            if at < len(starts):
                items = self._window.items(numbers[starts[at] : stops[at]])
                self.batches += 1
                return items
            self._turn()
        raise StopIteration

    def _turn(self) -> None:
        """Begin another window, behind the one that was given; or end."""
        window = self._place["window_at"]
        dropped = window["dropped"] + self._dropped
        self._window = self._plan = None
        if self._reading is None or self._reading.ended:
            self._end(dropped)
            return
        self._errors = self._forgiven = 0
        place = {"batches": self.batches, "dropped": dropped, "errors": 0}
        self._place = {"dealt": [], "window_at": place | {"source": self._reading.place()}}

    def _end(self, dropped: int) -> None:
        self._sampler._dropped = dropped
        self._place, self._errors = self._sampler._beginning(), 0
        if self._reading is not None:
            self._place["window_at"]["source"] = self._reading.over()
        self.ended = True

    def _read(self) -> None:
        """Read the next window, or the rest of it where an error has interrupted that."""
        sampler, reading = self._sampler, self._reading
        window = sampler._all
        if window is None and reading is not None:
            try:
                costs = self._next_costs(reading)
            except Exception:
                if self._forgiven:  # an earlier run has raised it
                    self._forgiven -= 1
                    return
                self._errors += 1
                raise
            if not len(costs):
                self._end(self._place["window_at"]["dropped"])
                return
            window = sampler._window(costs, self._names)
            self._names, self._lengths = [], []
        assert window is not None
        self._plan, self._dropped = sampler._planned(window, self.epoch, self._place)
        self._window = window

    def _next_costs(self, reading: Any) -> NDArray[Any]:
        """Return what the samples of the next window cost, once all of them have been read."""
        sampler, names, lengths = self._sampler, self._names, self._lengths
        while True:
            while len(lengths) < len(names):  # of an inner sampler
                item = names[len(lengths)]
                assert sampler._length_of is not None
                try:
                    lengths.append(sampler._length_of(item))
                except Exception as error:
                    del names[len(lengths)]
                    error.add_note(f"minloader: when the length of {shown(item)} was looked up")
                    raise
            if reading.ended or len(names) >= WINDOW:
                break
            if sampler._length_of is not None:
                reading.take(names, WINDOW - len(names))
                continue
            first, before = reading.read, len(lengths)
            try:
                reading.take(lengths, WINDOW - len(names))
            finally:
                names += range(first, first + len(lengths) - before)
        costs, wrong = sampler._examine(lengths)
        if wrong.any():
            at = int(wrong.argmax())
            raise sampler._complaint(names.pop(at), lengths.pop(at))
        return costs

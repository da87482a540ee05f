"""The order of an epoch, as torch draws it.

Runs in the parent. Torch's samplers draw random numbers from torch's global generator, or from
generators of their own, when an epoch begins. Those that people write draw from ``random`` and
numpy too, and some of them as they go. Whoever restores these generators and begins the samplers
again gets the same order. So an epoch is known by its :class:`Start`, and begun from that whenever
it is begun: the first time, after an interrupt in the sampler, in a resumed run.

The user tells samplers their epochs, as with torch. Only where a state is loaded each of them is
put back to what it said when the epoch began; whatever the user tells it after that counts.
"""

from __future__ import annotations

import copy
import itertools
import logging
import marshal
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from operator import call
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler

from minloader._arguments import checked_int
from minloader._epochs.feed import may_be_read_ahead
from minloader._errors import breaks_in
from minloader._formats import brief_repr
from minloader._protocols import has_epochs, is_stateful, state_of
from minloader._sampling.base import Sampler
from minloader._sampling.digest import digest
from minloader._sampling.ranks import with_inner
from minloader._sampling.reader import used_up
from minloader._worker.seeds import in_turn
from minloader._worker.torch_conventions import number_of
from minloader.torch import generators
from minloader.torch.generators import States

logger = logging.getLogger("minloader")

MOST_DRAWN = 10_000_000
"""Up to so many samples of a random sampler with its own generator are drawn as an epoch begins."""

MOST_MARKS = 1 << 17
MOST_MARKS_WITH_STATES = 1 << 10
"""Items that may be read ahead of the consumer and still be compared. Of those with states of
generators not so many are read ahead, and each has some 10 KB."""

MARSHAL_VERSION = 2
"""In later ones the bytes depend on who else has an object."""


class Start(NamedTuple):
    """All that the order of an epoch depends on, just before its sampler is begun.

    Attributes:
        own: states of the generators of the loader and of its samplers.
        shared: states of the global generators that the samplers may draw from.
        said: what each sampler says of where it is, see :func:`said_by`.
        seeded: whether a seed is drawn when the sampler was begun: the one that torch's loader
            gives its workers.
        twice: whether the sampler is then begun once more, as torch's loader does with new workers.
        begun: whether the epoch has begun.
        noted: states of the global generators when a state was taken, if this start was loaded from
            one before, and its epoch had not begun: a script that restores them seeds nothing.
    """

    own: list[torch.Tensor]
    shared: States
    said: list[Any]
    seeded: bool
    twice: bool
    begun: bool = False
    noted: States = {}  # noqa: RUF012  # nobody changes it

    def encode(self) -> dict[str, Any]:
        """Return a part of a state, fit for JSON."""
        return self._asdict() | {
            "own": list(map(generators.encode, self.own)),
            "shared": generators.encode_all(self.shared),
            "noted": generators.encode_all(self.noted),
        }

    @classmethod
    def decode(cls, known: Any) -> Start:
        """Undo :meth:`encode`.

        Raises:
            ValueError: the state is damaged.
        """
        try:
            shared = generators.decode_all(known["shared"])
            if "torch" not in shared:
                raise LookupError("torch")
            return cls(
                own=list(map(generators.decode, known["own"])),
                shared=shared,
                said=[_read_said(said) for said in known["said"]],
                seeded=bool(known["seeded"]),
                twice=bool(known["twice"]),
                begun=bool(known["begun"]),
                noted=generators.decode_all(known["noted"]),
            )
        except (LookupError, TypeError, ValueError, RuntimeError, zlib.error) as error:
            raise ValueError(f"the state is damaged: {error!r}, in {brief_repr(known)}") from error


def _read_said(said: Any) -> dict[str, Any] | None:
    if said is None:
        return None
    epoch = said["epoch"]
    return {"epoch": epoch and checked_int("epoch", epoch, 0), "state": said["state"]}


def said_by(part: Any) -> dict[str, Any] | None:
    """Return what a sampler, or a stream, says of where it is; None of one that says nothing.

    Returns:
        The number of its epoch and its state, each None if it has none.
    """
    number = number_of(part)
    state = None
    try:
        state = copy.deepcopy(state_of(part))
    except Exception as error:  # many have none before their first item
        if breaks_in(error):
            raise
        logger.debug("%s does not say where it is: %r", brief_repr(part), error)
    if number is None and has_epochs(part) and isinstance(state, Mapping):
        number = state.get("epoch", state.get("_epoch"))
    return None if number is None and state is None else {"epoch": number, "state": state}


def _is_within_epoch(part: Any) -> bool:
    """Return whether it is a sampler of ours that was read, not to its end: it begins anew next.

    So it is where Ctrl-C comes as an epoch begins, whose first item was drawn by then.
    """
    run = part._run if isinstance(part, Sampler) else None
    return run is not None and run.touched and not run.ended


class Order:
    """What a sampler of torch's kind yields, as a sampler for :class:`minloader.Loader`.

    The loader tells it the number of the epoch, and it knows how that one starts. A sampler with
    ``state_dict`` and ``load_state_dict`` is put back by these, also where torch makes batches of
    it, and any other is read again.

    Args:
        sampler: torch's.
        owner: the loader's own generator.
        stream: what is read in place of the sampler; None: the sampler is.

    Attributes:
        starts: how epochs start, by their numbers in the loader.
    """

    def __init__(
        self, sampler: Iterable[Any], owner: torch.Generator | None, stream: Any = None
    ) -> None:
        self.sampler = sampler
        self._stream = stream
        self.starts: dict[int, Start] = {}
        # Torch's reads just what a batch needs.
        self._stateful: Any = sampler.sampler if type(sampler) is BatchSampler else sampler
        self._has_state = is_stateful(self._stateful) and not _is_read_again(self._stateful)
        self._owner = owner
        self._number = 0
        self._last: Items | None = None
        self._last_number = -1
        self._has_given = False
        self._is_left = False  # whether the last epoch leaves nothing for the next
        self._goes_on_from: Any = None  # place within its epoch; None: the next pass begins one
        # The generators as they were when a state was loaded; None once an epoch has begun since.
        self._before_load: tuple[list[torch.Tensor], States] | None = None

    # --- how an epoch starts

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that an epoch's order may depend on, without the global ones.

        Samplers that are told the epoch seed theirs from it, and some make it only then.
        """
        found = [self._owner]
        for each in with_inner(self.sampler):
            if not has_epochs(each):
                found.append(getattr(each, "generator", None))
        known = dict.fromkeys(each for each in found if isinstance(each, torch.Generator))
        return [each for each in known if each is not torch.default_generator]

    def start_now(self, *, seeded: bool, twice: bool) -> Start:
        """Return how an epoch starts that begins now."""
        # Torch's own samplers, and ours, draw from torch's generator alone.
        names = ["torch"] if may_be_read_ahead(self.sampler) else generators.names()
        return Start(
            own=[each.get_state() for each in self.generators],
            shared=generators.states_of(names),
            said=self.said(),
            seeded=seeded,
            twice=twice,
        )

    def is_reseeded(self, start: Start) -> bool:
        """Return whether a generator was seeded since the start of the next epoch was noted."""
        former = [(start.own, start.shared), (start.own, start.noted)]
        if self._before_load is not None:
            former.append(self._before_load)
        own = [
            generators.is_reseeded(each.get_state(), states, each.device)
            for each, *states in zip(self.generators, *[own for own, _ in former], strict=False)
        ]
        shared = [
            generators.is_reseeded(now, [states[name] for _, states in former if name in states])
            for name, now in generators.states_of(start.shared).items()
        ]
        return any(own + shared)

    def said(self) -> list[Any]:
        """Return what each sampler, or the stream, says of where it is."""
        if self._stream is not None:  # its states are those of its shards
            return [{"epoch": number_of(self._stream), "state": None}]
        said = []
        for each in with_inner(self.sampler):
            known = said_by(each)
            if known and (self._is_left or _is_within_epoch(each)):
                known["state"] = None  # it would lead to where it was left
            said.append(known)
        return said

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

    def put_back(self, start: Start, state: Any) -> None:
        """Put each sampler back to what it said as an epoch began, or to where a state is of it.

        Args:
            start: of the epoch.
            state: of the sampler with a state, as :meth:`_state` gave it; None: there is none.
        """
        for each, said in self._parts(start):  # the outer first, which may tell the inner
            if said["epoch"] is not None and has_epochs(each):
                each.set_epoch(said["epoch"])
        self._put_states(start)
        if state is not None and self._has_state:
            if not isinstance(state, Mapping) or not state.keys() >= {"state", *BETWEEN}:
                raise ValueError(f"the state is damaged: {brief_repr(state)} is none of a sampler")
            has_said = any(
                each is self._stateful and said["state"] is not None
                for each, said in self._parts(start)
            )
            if state["given"] or not has_said:  # else it was put to what it said later
                self._stateful.load_state_dict(copy.deepcopy(state["state"]))
        self.starts = {}
        self._is_left = False
        self._before_load = (
            [each.get_state() for each in self.generators],
            generators.states_of(start.shared),
        )

    def _parts(self, start: Start) -> list[tuple[Any, dict[str, Any]]]:
        """Return the samplers, or the stream, with what each said then, if it said anything."""
        parts = with_inner(self.sampler) if self._stream is None else [self._stream]
        return [(each, said) for each, said in zip(parts, start.said, strict=False) if said]

    def _put_states(self, start: Start) -> None:
        for each, said in reversed(self._parts(start)):
            if said["state"] is not None and is_stateful(each):
                each.load_state_dict(copy.deepcopy(said["state"]))
            elif isinstance(each, Sampler):
                each._forget()  # the epoch before was left, and this one may have ended by now

    # --- a sampler for the loader

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch in the loader; put samplers back if it has begun."""
        self._number = epoch
        start = self.starts.get(epoch)
        if start is not None and start.begun and self._before_load is None:
            self._put_states(start)

    @property
    def is_put_back(self) -> bool:
        """Whether the next epoch begins from what the samplers have said."""
        start = self.starts.get(self._number)
        return self._before_load is not None or (start is not None and start.begun)

    def __len__(self) -> int:
        if isinstance(self.sampler, Sampler):
            raise TypeError("not before the epoch has begun: the one before may have left some")
        return len(self.sampler)  # type: ignore[arg-type]

    def leave(self) -> None:
        """Have the last epoch leave nothing for the next: the consumer has not seen its end."""
        self._is_left = True

    def __iter__(self) -> Iterator[Any]:
        self._last = last = self._begin()
        self._last_number = self._number
        self._is_left = False
        self._before_load = None
        return last

    def _begin(self) -> Items:
        """Begin the epoch as it starts.

        A global generator is drawn from if it is just there, as it is when the epoch is begun for
        the first time. Otherwise it stays as it is. An interrupt leaves nothing drawn.
        """
        start = self.starts[self._number]
        script = generators.states_of(start.shared)
        elsewhere = {
            name: state
            for name, state in script.items()
            if not generators.are_same(state, start.shared[name])
        }
        restore = generators.calls_for(script)
        for generator, state in zip(self.generators, start.own, strict=True):
            generator.set_state(state)
        try:
            generators.put(start.shared)
            items = self._begun(start)
            generators.put(elsewhere)
            self.starts[self._number] = start._replace(begun=True)
            return items
        except BaseException:
            deque(restore, 0)
            for generator, state in zip(self.generators, start.own, strict=True):
                generator.set_state(state)
            raise

    def _begun(self, start: Start) -> Items:
        place, self._goes_on_from = self._goes_on_from, None
        if place is None and self._is_left and isinstance(self._stateful, Sampler):
            self._stateful._forget()  # however far it was drawn
        items = iter(self.sampler)
        if start.seeded:
            draw_seed(self._owner)
        if start.twice and not self._has_state:
            items = iter(self.sampler)
        found = Items(items, {} if may_be_read_ahead(self.sampler) else start.shared)
        if place is not None:
            found.go_on(place)
            former = self._last if self._last_number == self._number else None
            if former is not None and self._before_load is None:
                found.go_on_behind(former)
        elif self._has_state:
            found.keep_own()
        else:  # the state of one that has any must be that of what was given
            found.draw(self._at_once)
            read = self._stateful
            if found.is_empty and self._has_given and iter(read) is read and not has_epochs(read):
                raise used_up("the sampler", read)
            self._has_given = self._has_given or not found.is_empty
        return found

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
        state = state_of(self._stateful)
        if state is None:
            return None
        return {"state": state} | (BETWEEN if self._last is None else self._last.place())

    def _load(self, state: Any) -> None:
        # From between two epochs it was put back as a state was loaded, or the epoch began: what
        # the user has told it since counts.
        if state["given"]:
            self._stateful.load_state_dict(state["state"])
            self._goes_on_from = state


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


BETWEEN: dict[str, Any] = {"given": 0, "digest": 0, "generators": {}}
"""The place of a sampler that is not within an epoch."""


class Items(Iterator[Any]):
    """Iterator over the items of an epoch, of which some may be drawn before it is their turn.

    A sampler that has drawn from global generators has these for itself from its second item on:
    what it draws then depends on nothing else that draws, nor on when it is asked.

    Args:
        items: as the sampler gives them.
        before: the global generators that it may draw from, as the epoch began.

    Attributes:
        own: states of the generators that it has for itself, where it is now.
    """

    def __init__(self, items: Iterator[Any], before: States) -> None:
        self.own: States = {}
        self._items = items
        self._before = before  # until the first item was drawn
        self._drawn: deque[Any] = deque()
        self._given = 0  # items of the epoch so far
        self._digest = 0  # of all of these
        self._has_ended = False
        # Of each item, from some on: its ordinal, the digest up to it, and where it left ``own``.
        most = MOST_MARKS_WITH_STATES if before else MOST_MARKS
        self._marks: deque[tuple[int, int, States]] = deque(maxlen=most)
        self._delivered = 0
        self._last_delivered: States = {}  # where the last item that was delivered has left ``own``

    def __next__(self) -> Any:
        try:
            item = self._drawn.popleft() if self._drawn else self._next()
        except StopIteration:
            self._has_ended = True
            raise
        if type(item) is Raised:
            raise item.error
        self._digest = _digest_of(item, self._digest)
        self._marks.append((self._given, self._digest, self.own))
        self._given += 1
        return item

    @property
    def is_empty(self) -> bool:
        """Whether none is left of those that were drawn."""
        return not self._drawn

    def draw(self, most: int) -> None:
        """Draw some items. What the sampler raises comes in its turn."""
        draw = self._next if self._before else self._items.__next__
        try:
            # Not by islice(), which calls iter(): a sampler that is its own iterator would begin
            # anew.
            self._drawn.extend(map(call, itertools.repeat(draw, most)))
        except Exception as error:
            if breaks_in(error):
                raise
            self._drawn.append(Raised(error))

    def _next(self) -> Any:
        item = in_turn(self._next_by_own) if self.own else next(self._items)
        if self._before:
            now = self.own or generators.states_of(self._before)
            former, self._before = self._before, {}
            self.own = {
                name: state
                for name, state in now.items()
                if not generators.are_same(state, former[name])
            }
        return item

    def _next_by_own(self) -> Any:
        restore = generators.calls_for(generators.states_of(self.own))
        try:
            generators.put(self.own)
            try:
                return next(self._items)
            finally:
                self.own = generators.states_of(self.own)
        finally:
            deque(restore, 0)

    def keep_own(self) -> None:
        """Have it draw by its own generators from the first item on."""
        self.own = self._last_delivered = generators.states_of(self._before)

    def follow(self, delivered: int) -> None:
        """Have the script draw behind what the sampler has drawn for what was delivered.

        So it is with torch's loader without workers. A generator from which somebody else has drawn
        since the last call stays as it is.

        Args:
            delivered: number of items of the epoch that were delivered.
        """
        if not self.own:
            return
        script = generators.states_of(self.own)
        moved: States = {}
        last = self._last_delivered
        for ordinal, _, states in self._marks:
            if not self._delivered <= ordinal < delivered:
                continue
            for name, state in states.items():
                if name in last and generators.are_same(moved.get(name, script[name]), last[name]):
                    moved[name] = state
            last = states
        generators.put(moved)
        # Only now: after Ctrl-C it is done again.
        self._last_delivered = last
        self._delivered = delivered
        while self._marks and self._marks[0][0] < delivered - 1:
            self._marks.popleft()

    def digest_at(self, ordinal: int) -> str | None:
        """Return what all items up to one are recognized by; None if that is not known any more."""
        at = ordinal - self._marks[0][0] if self._marks else -1
        return f"{self._marks[at][1]:08x}" if 0 <= at < len(self._marks) else None

    def place(self) -> dict[str, Any]:
        """Return where this is, for :meth:`go_on`, fit for JSON."""
        if self._has_ended:
            return BETWEEN
        own = generators.encode_all(self.own)
        return {"given": self._given, "digest": self._digest, "generators": own}

    def go_on(self, place: Mapping[str, Any]) -> None:
        """Go on from where another has been."""
        self._given = self._delivered = checked_int("given", place["given"], 0)
        self._digest = checked_int("digest", place["digest"], 0)
        self._before = {}
        self.own = self._last_delivered = generators.decode_all(place["generators"])

    def go_on_behind(self, former: Items) -> None:
        """Know what another has given of the same epoch, of which some may not be delivered."""
        self._marks.extend(mark for mark in former._marks if mark[0] < self._given)
        self._delivered = former._delivered
        self._last_delivered = former._last_delivered


def _digest_of(item: Any, before: int) -> int:
    """Return the digest of an item and all before it."""
    try:
        data = marshal.dumps(item, MARSHAL_VERSION)
    except ValueError:  # of tensors, and of the user's own objects
        data = (digest(item) or "").encode()
    return zlib.crc32(data, before)


class EpochOrder(Order):
    """The order of a sampler of torch's kind, which follows from the number of the epoch alone."""

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which seeds the generators."""
        super().set_epoch(epoch)
        own = [_seeded(each.device, epoch) for each in self.generators]
        shared = {"torch": _seeded("cpu", epoch)}
        self.starts = {epoch: Start(own, shared, said=[], seeded=False, twice=False)}


def _seeded(device: Any, seed: int) -> torch.Tensor:
    """Return the state of a generator that was seeded."""
    return torch.Generator(device).manual_seed(seed).get_state()


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw what torch's loader draws as its base seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())

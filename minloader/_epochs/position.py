"""Positions: what of an epoch the consumer was given, and how to go on from there.

A position is all that a state of a loader says. Tasks, futures, replies and what was read ahead can
be made again from it. An epoch that begins goes on from a position, too: one where nothing was
given.

A state is the JSON of a position. One that is loaded is checked here, as far as that takes neither
the sampler nor the stream.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from minloader._arguments import checked_bool, checked_int
from minloader._epochs.counters import ERRORS_KEPT, Failed, plain
from minloader._formats import brief_repr
from minloader._memory.pickling import pack, unpack
from minloader._sampling.reader import NO_SOURCE_STATE, Check, SourceState

VERSION = 1
"""Version of the states."""

State = dict[str, Any]

Ordinals = frozenset[int]


@dataclass(frozen=True, kw_only=True)
class LanePosition:
    """How far the items of a sampler, or the batches of a shard, were handed over.

    Attributes:
        given: how many were, without a gap.
        ahead: ordinals of those that were handed over before their turn.
        source_state: a state from there or before.
        check: of an item, or a batch, that is not before that state; None: there is none.
        beginning: the state that the epoch began with, of a shard packed; None if it had none, or
            nobody needs it.
        is_ended: of a shard, whether there is no more of it. Then ``source_state`` is from its end.
        has_failed: of a shard, whether reading it has failed in this epoch.
    """

    given: int = 0
    ahead: Ordinals = frozenset()
    source_state: SourceState = NO_SOURCE_STATE
    check: Check | None = None
    beginning: Any = None
    is_ended: bool = False
    has_failed: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether anything of the epoch was handed over, or left out."""
        return bool(self.given or self.ahead or self.is_ended)

    def skipped(self, n: int, length: int | None) -> LanePosition:
        """Return the position after ``n`` more items were left out."""
        given = self.given
        ahead = self.ahead
        behind = sorted(ahead)
        while n and (length is None or given < length):
            stop = behind[0] if behind else length
            count = n if stop is None else min(n, stop - given)
            given += count
            n -= count
            while behind and behind[0] == given:
                ahead -= {behind.pop(0)}
                given += 1
        return replace(self, given=given, ahead=ahead)


def deliver(delivered: int, ahead: Ordinals, ordinal: int) -> tuple[int, Ordinals]:
    """Return what was delivered, without a gap and before its turn, once one more is."""
    if ordinal == delivered and not ahead:
        return delivered + 1, ahead
    ahead |= {ordinal}
    while delivered in ahead:
        ahead -= {delivered}
        delivered += 1
    return delivered, ahead


def take_back(delivered: int, ahead: Ordinals, ordinals: Iterable[int]) -> tuple[int, Ordinals]:
    """Return what was delivered before some were."""
    taken = frozenset(ordinals)
    first = min(taken | {delivered})
    return first, ahead.union(range(first, delivered)) - taken


@dataclass(frozen=True, kw_only=True)
class Position:
    """What of an epoch was handed over.

    Attributes:
        epoch: number of the epoch.
        lanes: one of a sampler, or one for each shard of a stream.
        is_stream: which of these.
        length: number of batches of the epoch; None if it is not known.
        failed: how many of its samples have failed, and batches of which no sample is known.
        errors: the last ones, of all epochs so far; of a position that is in a state.
    """

    epoch: int
    lanes: list[LanePosition] = field(default_factory=lambda: [LanePosition()])
    is_stream: bool = False
    length: int | None = None
    failed: int = 0
    errors: tuple[Failed, ...] = ()

    @property
    def has_begun(self) -> bool:
        """Whether anything of the epoch was handed over, or left out."""
        return any(lane.has_begun for lane in self.lanes)

    def at_epoch(self, epoch: int) -> Position | None:
        """Return where another epoch begins, if this is the beginning of one; else None.

        That other one begins with what the epoch before has left for it.
        """
        if epoch == self.epoch:
            return self
        # To leave batches out ahead of an epoch reads nothing of it.
        if any(lane.source_state.at or lane.is_ended or lane.check for lane in self.lanes):
            return None
        lanes = [replace(lane, given=0, ahead=frozenset()) for lane in self.lanes]
        return replace(self, epoch=epoch, lanes=lanes, length=None, failed=0)

    def skipped(self, n: int) -> Position:
        """Return the position after ``n`` more batches were left out."""
        (lane,) = self.lanes
        return replace(self, lanes=[lane.skipped(n, self.length)])


# --- as a state


def to_state(position: Position, seed: int, batch_size: int | None) -> State:
    """Return the state of a loader that is at a position.

    Its keys are the same at any time, for torch's distributed checkpoints: these know a state by
    the path of each of its leaves, and a new loader's state is the template that one is read into.
    A tuple is a leaf to them, whatever is in it.
    """
    state: State = {
        "version": VERSION,
        "seed": seed,
        "epoch": position.epoch,
        "errors": (_errors_state(position),),
    }
    if position.is_stream:
        shards = [_shard_state(lane) for lane in position.lanes]
        return state | {"stream": ({"shards": shards, "batch_size": batch_size},)}
    (lane,) = position.lanes
    sampler = None
    if lane.source_state.state is not None:
        at, source_state = lane.source_state
        sampler = copy.deepcopy({"at": at, "state": source_state, "beginning": lane.beginning})
    return state | {
        "length": position.length,
        "batches": lane.given,
        "delivered_ahead": sorted(lane.ahead),
        "sampler": (sampler,),
        "check": None if lane.check is None else list(lane.check),
    }


TEXT_KEPT = 500
"""Most characters of an error's text that a state has."""


def _errors_state(position: Position) -> State:
    last = [
        [epoch, batch, plain(sample), text[:TEXT_KEPT]]
        for epoch, batch, sample, text in position.errors[-ERRORS_KEPT:]
    ]
    return {"failed": position.failed, "last": last}


def _shard_state(lane: LanePosition) -> State:
    return {
        "batches": lane.given,
        "at": lane.source_state.at,
        "state": _unpacked(lane.source_state.state),
        "beginning": _unpacked(lane.beginning),
        "ended": lane.is_ended,
        "failed": lane.has_failed,
        "check": None if lane.check is None else list(lane.check),
    }


def _unpacked(state: bytes | None) -> Any:
    return None if state is None else unpack(state)


def _packed(state: Any) -> bytes | None:
    return None if state is None else pack(state, down=True)


def from_state(
    state: Any, seed: int | None, *, is_stream: bool, batch_size: int | None
) -> tuple[Position, int]:
    """Return the position that a state is of, and its seed.

    Args:
        state: what was given as one.
        seed: the loader's; None if it takes any.
        is_stream: whether the loader's dataset is a stream.
        batch_size: of such a loader.

    Raises:
        TypeError, ValueError: it cannot be a state, or is not for such a loader.
    """
    is_mapping = isinstance(state, Mapping)
    if (
        not is_mapping
        or not {"version", "seed"} <= state.keys()
        or type(state.get("sampler")) is str
    ):
        from minloader._diagnosis.mistakes import no_state_of_a_loader  # which only an error needs

        raise no_state_of_a_loader(state)
    check_version(state, VERSION)
    if seed is not None and state.get("seed") != seed:
        raise ValueError(
            f"the state is of a loader with seed={state.get('seed')!r}, but this one has "
            f"seed={seed}; make it with that seed, or with seed=None, which takes the state's"
        )
    kinds = {False: "a sampler", True: "a stream (an iterable dataset)"}
    if ("stream" in state) != is_stream:
        raise ValueError(
            f"the state is of a loader with {kinds['stream' in state]}, but this one has "
            f"{kinds[is_stream]}"
        )
    try:
        seed = checked_int("seed", state["seed"], 0)
        epoch = checked_int("epoch", state["epoch"], 0)
        (errors_state,) = state["errors"]
        failed = checked_int("failed", errors_state["failed"], 0)
        errors = tuple([_read_error(each) for each in errors_state["last"]])
        length = None
        former_batch_size = None
        if is_stream:
            (stream,) = state["stream"]
            former_batch_size = stream["batch_size"]
            lanes = [_shard_position(each) for each in stream["shards"]]
            if not lanes:
                raise ValueError("it has no shards")
        else:
            lanes = [_sampler_position(state)]
            if state["length"] is not None:
                length = checked_int("length", state["length"], 0)
        position = Position(
            epoch=epoch,
            lanes=lanes,
            is_stream=is_stream,
            length=length,
            failed=failed,
            errors=errors,
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the state is damaged: {error!r}, in {brief_repr(dict(state))}; take another one, or "
            "start anew without a state"
        ) from error
    if is_stream and former_batch_size != batch_size:
        raise ValueError(
            f"batch_size is {batch_size}, but the state is of a stream with "
            f"batch_size={former_batch_size}; make the loader with that"
        )
    return position, seed


def check_version(state: Mapping[str, Any], newest: int) -> None:
    """Refuse a state that a later minloader has saved."""
    if state["version"] not in range(1, newest + 1):
        raise ValueError(
            f"the state is of version {state['version']!r}, but this minloader reads versions up "
            f"to {newest}; load it with the minloader that saved it"
        )


def _sampler_position(state: Mapping[str, Any]) -> LanePosition:
    (sampler,) = state["sampler"]
    source_state = NO_SOURCE_STATE
    beginning = None
    if sampler is not None:
        beginning = copy.deepcopy(sampler["beginning"])
        source_state = SourceState(
            checked_int("at", sampler["at"], 0), copy.deepcopy(sampler["state"])
        )
    return _consistent(
        LanePosition(
            given=checked_int("batches", state["batches"], 0),
            ahead=_read_ordinals(state),
            source_state=source_state,
            check=_read_check(state["check"]),
            beginning=beginning,
        )
    )


def _shard_position(state: Mapping[str, Any]) -> LanePosition:
    return _consistent(
        LanePosition(
            given=checked_int("batches", state["batches"], 0),
            source_state=SourceState(
                checked_int("at", state["at"], 0), _packed(copy.deepcopy(state["state"]))
            ),
            check=_read_check(state["check"]),
            beginning=_packed(copy.deepcopy(state["beginning"])),
            is_ended=checked_bool("ended", state["ended"]),
            has_failed=checked_bool("failed", state["failed"]),
        )
    )


def _read_error(error: Any) -> Failed:
    epoch, batch, sample, text = error
    if not isinstance(text, str):
        raise TypeError(f"an error must be text, got {brief_repr(text)}")
    return checked_int("epoch", epoch, 0), checked_int("batch", batch, 0), _as_index(sample), text


def _as_index(sample: Any) -> Any:
    """Return the index of a sample, which is no list, as JSON may have made of it."""
    return tuple(map(_as_index, sample)) if isinstance(sample, list) else sample


def _read_check(check: Any) -> Check | None:
    return None if check is None else Check(checked_int("check", check[0], 0), check[1])


def _read_ordinals(state: Mapping[str, Any]) -> Ordinals:
    name = "delivered_ahead"
    return frozenset([checked_int(name, ordinal, 0) for ordinal in state[name]])


def _consistent(lane: LanePosition) -> LanePosition:
    """Return the position of a lane, if no part of it contradicts another."""
    if any(ordinal <= lane.given for ordinal in lane.ahead):
        raise ValueError("delivered_ahead must be ordinals behind batches")
    if lane.source_state.at > lane.given or (
        lane.check is not None and lane.check.ordinal > lane.given
    ):
        raise ValueError("a state within it, or what it is checked by, is from later")
    return lane

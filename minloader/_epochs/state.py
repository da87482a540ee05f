"""What a state says, and whether a run can be resumed from it.

A state counts what the consumer was given, not what was read ahead. It follows from the account of
each lane (``lane.py``): its first task that was not handed over, and where the sampler, or the
stream, was before that. A note of it takes a few µs, in the thread that asks, under the iterator's
lock. The state itself is worked out when the note is called, any number of times, in any thread.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minloader._checks import check_int, is_stateful, part_meant, shown
from minloader._sampling.base import Sampler, with_inner

VERSION = 1
"""Version of the states."""

State = dict[str, Any]
Note = Callable[[], State]


def sampler_place(
    ranges: list[tuple[int, int]],
    position: int,
    ended: bool,
    state: Any,
    check: Any,
) -> State:
    """Work out the part of a state that says where in the epoch of a sampler it is.

    Args:
        ranges: from, to: ordinals that were drawn and not handed over, ascending.
        position: ordinal of the next item to be drawn.
        ended: whether there is nothing more to hand over.
        state: of the sampler, from the first of these ordinals or before; None if there is none.
        check: an ordinal, and the digest of its item or what returns that; None if there is none.
    """
    first = stop = ranges[0][0] if ranges else position
    beyond = []
    for start, end in (*ranges, (position, position)):
        if start > stop:
            beyond.append([stop, start])
        stop = max(stop, end)
    if check is not None and callable(check[1]):
        check = check[0], check[1]()
    return {
        "batches": first,
        "beyond": beyond,
        "ended": ended,
        "sampler": None if state is None else {"at": state[0], "state": copy.deepcopy(state[1])},
        "check": None if check is None else list(check),
    }


def has_begun(state: Mapping[str, Any]) -> bool:
    """Return whether anything of the epoch of a checked state was delivered."""
    places = state["stream"]["shards"] if "stream" in state else [state]
    return any(place["batches"] or place["ended"] or place.get("beyond") for place in places)


def begun_anew(state: State, epoch: int, sampler: Sampler) -> State:
    """Return a checked state of our sampler as of when another epoch begins there.

    That begins with what the epoch before has left, unless one was begun since. To leave out
    batches ahead of an epoch begins none: no item was drawn.
    """
    known = state["sampler"]  # None: of an epoch after one that was left, before its first item
    if known is None or known["at"] or state["ended"] or state["check"] is not None:
        sampler._forget()
        known = {"at": 0, "state": sampler.state_dict()}
    nothing = {"batches": 0, "beyond": [], "ended": False, "length": None, "check": None}
    return state | nothing | {"epoch": epoch, "sampler": known}


def skipped(state: State, n: int) -> State:
    """Return a checked state of a sampler as of when ``n`` more batches were handed over."""
    here, beyond = state["batches"], [list(hole) for hole in state["beyond"]]
    while n and not state["ended"] and (state["length"] is None or here < state["length"]):
        here, n = here + 1, n - 1
        while beyond and beyond[0][0] <= here:
            here = max(here, beyond.pop(0)[1])
    return state | {"batches": here, "beyond": beyond}


def in_one_shape(state: State) -> State:
    """Return a state whose keys are the same at any time, for torch's distributed checkpoints.

    These know a state by the path of each of its leaves, and a new loader's state is the template
    that one is read into. A tuple is a leaf to them, whatever is in it.
    """
    return {
        key: (value,) if key in ("sampler", "stream") else value for key, value in state.items()
    }


def sampler_state(seed: int, epoch: int, note: Note, length: int | None) -> State:
    """Work out the state of a loader with a sampler."""
    known = {"version": VERSION, "seed": seed, "epoch": epoch, "length": length}
    return in_one_shape(known | note())


def stream_state(seed: int, epoch: int, notes: list[Note], batch_size: int | None) -> State:
    """Work out the state of a loader of a stream."""
    stream = {"shards": [note() for note in notes], "batch_size": batch_size}
    return in_one_shape({"version": VERSION, "seed": seed, "epoch": epoch, "stream": stream})


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


def check_sampler(
    state: State,
    sampler: Any,
    length: int | None,
    *,
    takes_seed: bool,
    allow: str | Iterable[str] = (),
) -> None:
    """Refuse a state whose sampler was another one, as far as that can be told.

    Args:
        state: a checked one. If it is of another world size, it becomes one of the sampler's.
        sampler: the loader's.
        length: number of its batches in that epoch; None if that is not known.
        takes_seed: whether it will have the seed of the state, if it is of ours.
        allow: names of its arguments that may be others, if it is of ours.
    """
    if allow and not isinstance(sampler, Sampler):
        raise ValueError(
            f"allow is for a sampler of minloader's, but this loader has {shown(sampler)}; drop it"
        )
    if not takes_seed or not isinstance(sampler, Sampler):
        _check_sampler(state, sampler, length, allow)
        return
    former = sampler.seed
    try:
        sampler.seed = state["seed"]
        _check_sampler(state, sampler, length, allow)
    finally:
        sampler.seed = former


def _check_sampler(
    state: State, sampler: Any, length: int | None, allow: str | Iterable[str]
) -> None:
    if state["epoch"] or state["ended"]:
        _refuse_own_generator(sampler, is_put_back=state["sampler"] is not None)
    if state["sampler"] is not None and not is_stateful(sampler):
        raise ValueError(
            f"the state has one of its sampler, but the sampler here, {shown(sampler)}, has no "
            "load_state_dict; give the loader the sampler that the state was taken with"
        )
    if state["sampler"] is not None and isinstance(sampler, Sampler):
        known = state["sampler"]["state"]
        if isinstance(known, dict) and sampler._is_dealt_anew(known):
            _deal_anew(state, sampler, allow)
        else:
            sampler.load_state_dict(known, allow)  # says itself what differs
        return
    check_length(state, sampler, length)


def check_length(state: State, sampler: Any, length: int | None) -> None:
    """Refuse a state if its epoch had another number of batches, as far as these are known."""
    if None not in (length, state["length"]) and length != state["length"]:
        raise ValueError(
            f"the sampler has {length} batches in epoch {state['epoch']}, but the state is of one "
            f"with {state['length']}; give the loader the sampler that the state was taken with"
        )


def _refuse_own_generator(sampler: Any, *, is_put_back: bool) -> None:
    """Refuse a sampler whose order follows from a generator of its own, which nothing puts back.

    Args:
        sampler: one of ours, which is judged by those that it reads; or another.
        is_put_back: whether the state has one of it.
    """
    if isinstance(sampler, Sampler):
        for source in sampler._sources():
            if source.values is None:
                _refuse_own_generator(source.items, is_put_back=is_stateful(source.items))
        return
    if is_put_back or getattr(sampler, "puts_generators_back", False):
        return
    others = [each for each in with_inner(sampler) if not isinstance(each, Sampler)]
    if any(hasattr(each, "set_epoch") for each in others):
        return  # it is told what its order follows from
    for each in others:
        for name, value in getattr(each, "__dict__", {}).items():
            if type(value).__name__ in ("Random", "Generator", "RandomState"):
                raise ValueError(
                    f"the sampler, {shown(sampler)}, draws its order from a generator, {name}, "
                    "which the state does not have: in a new process it would repeat the order of "
                    "the first epoch; give it set_epoch, or state_dict and load_state_dict"
                )


def _deal_anew(state: State, sampler: Sampler, allow: str | Iterable[str]) -> None:
    """Make a state whose steps were dealt out otherwise one of the sampler's, if it can do that."""
    known = state["sampler"]["state"]
    sampler._load(known, state["epoch"], state["batches"] - state["sampler"]["at"], allow)
    if state["beyond"]:
        raise ValueError(
            "what is left is to be dealt out anew, since world_size or what limits a batch is "
            "another, but the state has batches that were delivered before their turn "
            "(in_order=False), which are others in each rank; end the epoch with the sampler that "
            "it had, or take a state from between epochs"
        )
    state["sampler"] = {"at": state["batches"], "state": sampler.state_dict()}
    state["check"] = None  # what comes next is another batch now
    try:
        state["length"] = len(sampler)
    except TypeError:
        state["length"] = None


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
    """Copy a state, with all that will be needed; see :func:`in_one_shape`."""
    known = {"version": VERSION, **_numbers(state, "seed", "epoch")}
    if "stream" in state:
        (stream,) = state["stream"]
        places = [_copied_shard(place) for place in stream["shards"]]
        if not places:
            raise ValueError("it has no shards")
        return known | {"stream": {"shards": places, "batch_size": stream["batch_size"]}}
    (sampler,), check = state["sampler"], state["check"]
    if sampler is not None:
        sampler = _numbers(sampler, "at") | {"state": copy.deepcopy(sampler["state"])}
    known |= {
        **_numbers(state, "batches"),
        "beyond": [[check_int("beyond", each, 0) for each in hole] for hole in state["beyond"]],
        "ended": _truth(state["ended"]),
        "length": state["length"],
        "sampler": sampler,
        "check": None if check is None else [check_int("check", check[0], 0), check[1]],
    }
    bounds = [
        known["batches"],
        *(each for start, stop in known["beyond"] for each in (start, stop)),
    ]
    if bounds != sorted(bounds):
        raise ValueError("beyond must be ranges that ascend, after batches")
    if max(sampler["at"] if sampler else 0, check[0] if check else 0) > known["batches"]:
        raise ValueError("the state of the sampler, or what it is checked by, is from later")
    return known


def _copied_shard(place: Mapping[str, Any]) -> State:
    known = _numbers(place, "batches", "at") | {"ended": _truth(place["ended"])}
    if known["at"] > known["batches"]:
        raise ValueError("the state of the stream is from after the batches")
    failed = [check_int("failed", each, 0) for each in place["failed"]]
    known |= {"failed": failed, "last": place["last"]}
    return known | {name: copy.deepcopy(place[name]) for name in ("state", "first", "next")}


def _numbers(source: Mapping[str, Any], *names: str) -> State:
    return {name: check_int(name, source[name], 0) for name in names}


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"ended must be True or False, got {shown(value)}")
    return value

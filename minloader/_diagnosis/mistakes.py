"""What is said of a mistake: names that a ``Loader`` does not have, and states that do not fit."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from minloader._diagnosis.rarely_meant import look_at_lengths, report_growth
from minloader._epochs.position import Position
from minloader._formats import brief_repr
from minloader._memory.pickling import unpack
from minloader._protocols import has_epochs, has_method, is_iterable, is_stateful
from minloader._sampling.base import Sampler
from minloader._sampling.concatenated import Concatenated
from minloader._sampling.ranks import dealer_of_process, ranks_as_text, with_inner
from minloader._sampling.seeding import Piece
from minloader._sampling.sliced import sliced
from minloader._worker.messages import Job

OTHER_NAMES = {
    "batch_sampler": "give it as sampler, with collate_fn=minloader.collate",
    "drop_last": "write last_batch='discard'",
    "generator": "give seed, an int, from which all randomness derives",
    "multiprocessing_context": "write mp_context",
    "persistent_workers": "drop it: workers stay until the loader is closed",
    "pin_memory": "use minloader.torch.to_device(loader, device), which pins memory",
    "pin_memory_device": "use minloader.torch.to_device(loader, device), which pins memory",
}
"""Arguments of torch's ``DataLoader`` that have other names here."""


def argument_meant(name: str, names: Iterable[str]) -> str:
    """Return in words which argument was meant by another name; ``names`` are those there are."""
    if name in OTHER_NAMES:
        return f"{OTHER_NAMES[name]} (minloader.torch.DataLoader has the arguments of torch's)"
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"


def check_attribute(loader: Any, name: str, defaults: Iterable[str]) -> None:
    """Refuse to set an attribute where that would do nothing.

    Args:
        loader: of which it is to be set.
        name: of the attribute.
        defaults: names of the arguments of a loader that have a default.

    Raises:
        AttributeError: it is an argument that the workers were made with, or a typo.
    """
    arguments = {"dataset", "sampler", *defaults}
    if name in arguments:
        raise AttributeError(
            f"{name} cannot be set, since the workers have what the Loader was made with; make "
            f"another Loader with {name}=..."
        )
    near = difflib.get_close_matches(name, [*arguments, "epoch"], 1, cutoff=0.8)
    if near and not hasattr(loader, name):
        raise AttributeError(f"a Loader has no attribute {name!r}; did you mean {near[0]}?")


def no_dataset(dataset: Any, reads: Any) -> TypeError:
    """Return the error for what cannot be a dataset, where there is a sampler.

    Args:
        dataset: the argument.
        reads: what gives a sample of it.
    """
    name = brief_repr(dataset)
    if inspect.iscoroutinefunction(reads):
        text = (
            f"a sample is a coroutine, since {brief_repr(reads)} is an async def; give the loader "
            "minloader.concurrent(dataset), which awaits them"
        )
    elif type(dataset) is str:
        text = (
            f"dataset must give samples, got the string {name}; if that is a path, pass an object "
            "that reads the file"
        )
    elif is_iterable(dataset):
        text = (
            f"dataset is a stream, {name}, since it has __iter__ alone: it takes no sampler; drop "
            "that, and say by batch_size what a batch is, or give the dataset a __getitem__"
        )
    else:
        text = (
            f"dataset must have __getitem__ or __iter__, or be callable, got {name}; give it a "
            "__getitem__, or pass a function of one item"
        )
    return TypeError(text)


ROWS = {"pandas": "frame.iloc[rows]", "polars": "frame[rows]", "pyarrow": "frame.take(rows)"}
"""How rows of a frame are asked for by their numbers, by its package."""


def check_frame(dataset: Any) -> None:
    """Refuse a frame, or a series, as a dataset whose items are 0, 1, 2, ...

    Raises:
        TypeError: its items are columns, or go by labels that are others than these numbers.
    """
    kind = type(dataset)
    module = kind.__module__.partition(".")[0]
    if hasattr(kind, "columns"):
        collected = "" if hasattr(kind, "__len__") else "frame = frame.collect(), and "
        raise TypeError(
            f"dataset is a {kind.__name__} of {module}, whose items are no samples; give "
            f"{collected}a function of row numbers, such as lambda rows: {ROWS[module]}, with "
            "sampler=BatchSampler(len(frame), batch_size)"
        )
    labels: Any = getattr(dataset, "index", ())
    if hasattr(dataset, "iloc") and list(labels) != list(range(len(dataset))):
        raise TypeError(
            f"dataset is a {kind.__name__} of {module}, whose items go by its labels, "
            f"{brief_repr(list(labels))}, not by 0, 1, 2, ...; give series.to_numpy(), or "
            "series.iloc.__getitem__ with sampler=BatchSampler(len(series), batch_size)"
        )


def check_fit(dataset: Any, sampler: Any) -> None:
    """Refuse an array as a dataset for items that it would take as indices along its axes.

    A sampler that has lengths of some samples alone is told of.

    Raises:
        TypeError: the sampler splits samples, or draws from other parts than the array has.
    """
    look_at_lengths(dataset, sampler)
    axes = getattr(dataset, "ndim", 0)  # with fewer, it raises an error itself
    for each in with_inner(sampler):
        if axes > 2 and getattr(each, "long", "") == "split":
            raise TypeError(f"dataset is an array, and the sampler splits its samples; {SLICED}")
        parts = getattr(each, "parts", None)
        if axes > 1 and isinstance(each, Sampler) and parts and len(parts) != len(dataset):
            raise TypeError(
                f"dataset is an array of {len(dataset)} samples, and the sampler draws from "
                f"{len(parts)} datasets; {CONCATENATED}"
            )


def no_length(dataset: Any, error: TypeError) -> TypeError:
    """Return the error for a dataset without a length, which is to be the sampler."""
    if has_method(type(dataset), "__len__"):
        return TypeError(
            f"sampler is needed: len() of the dataset, {brief_repr(dataset)}, fails: {error}"
        )
    advice = "; give an object of that class" if isinstance(dataset, type) else ""
    if inspect.isgeneratorfunction(dataset):
        advice = "; for a stream give an object with this function as its __iter__"
    return TypeError(
        f"sampler is needed: the dataset, {brief_repr(dataset)}, has no len() to make one "
        f"from{advice}"
    )


def check_sampler_state(sampler: Any, position: Position, allow: Any) -> None:
    """Refuse what no sampler of the kind there is can go on from.

    Args:
        sampler: of the loader.
        position: that a state is of.
        allow: names of arguments that may be others.

    Raises:
        ValueError: it lacks ``load_state_dict``, or keeps its order for itself, or is none of ours.
    """
    if allow and not isinstance(sampler, Sampler):
        raise ValueError(
            f"allow is for a sampler of minloader's, but this loader has {brief_repr(sampler)}; "
            "drop it"
        )
    has_state = position.lanes[0].source_state.state is not None
    if position.epoch:
        refuse_own_generator(sampler, is_put_back=has_state)
    if has_state and not is_stateful(sampler):
        raise ValueError(
            f"the state has one of its sampler, but the sampler here, {brief_repr(sampler)}, has "
            "no load_state_dict; give the loader the sampler that the state was taken with"
        )


def check_stream_state(dataset: Any, position: Position, allow: Any) -> None:
    """Refuse a state that has a stream's own, of a stream without ``load_state_dict``.

    Args:
        dataset: the stream.
        position: that a state is of.
        allow: names of arguments of a sampler, of which there is none.

    Raises:
        ValueError: it has, or ``allow`` names some.
    """
    if allow:
        raise ValueError(
            "allow is for a sampler of minloader's, but this loader has a stream, got "
            f"{allow!r}; drop it"
        )
    if is_stateful(dataset):
        return
    states = [lane.source_state.state for lane in position.lanes]
    if any("dataset" in unpack(state) for state in states if state is not None):
        raise ValueError(
            f"the state holds one of the stream's own, but the dataset, {brief_repr(dataset)}, has "
            "no state_dict and load_state_dict; give the stream that the state was taken with"
        )


SLICED = "give the loader sliced(dataset), unless it takes (index, start, stop) itself"
CONCATENATED = "give the loader Concatenated([...]) of these, which takes (part, index)"


def item_meant(error: Exception, job: Job, item: Any) -> str:
    """Return in words why a dataset may not have taken an item; "" where nothing is known."""
    if "WorkerInfo" in str(error):
        return "worker_init_fn gets a WorkerInfo, whose id is the number of the worker"
    if job.options.is_stream:
        return ""
    dataset = job.dataset
    if isinstance(error, KeyError) and isinstance(dataset, dict) and type(item) is list:
        keys = list(dataset)
        if keys and not any(isinstance(key, int) for key in keys):
            return (
                f"dataset is a dict with the keys {brief_repr(keys)}: give one of its values, or "
                "sampler=BatchSampler(list(dataset), batch_size)"
            )
    is_list = type(item) is list
    if is_list and item and type(item[0]) is list and isinstance(error, TypeError):
        return (
            "the sampler gives lists of lists: it has batches where it needs single items, such as "
            "those of BatchSampler(n, None); of minloader.torch.DataLoader, give a sampler of "
            "batches as batch_sampler"
        )
    if is_list and job.collate_fn is None and isinstance(error, TypeError):
        return (
            "dataset[item] got the whole list, since there is no collate_fn; with "
            "collate_fn=minloader.collate it gets one index at a time"
        )
    index = item[0] if is_list and item else item
    is_pair = type(index) is tuple and len(index) == 2
    if not (is_pair or isinstance(index, Piece)) or _takes_parts(dataset):
        return ""
    if is_pair:
        return f"if the sampler draws from several datasets, {CONCATENATED}"
    return f"the sampler splits samples: {SLICED}"


def _takes_parts(dataset: Any) -> bool:
    """Return whether a dataset, or one that it wraps, takes what samplers of several parts give."""
    for _ in range(10):
        if isinstance(dataset, sliced | Concatenated):
            return True
        dataset = getattr(dataset, "__dict__", {}).get("dataset")  # as wrappers of ours name it
    return False


def part_meant(checkpoint: Mapping[Any, Any], names: set[str]) -> str:
    """Return which part of a checkpoint is the state, in words; "" if none is."""
    for key, part in checkpoint.items():
        if isinstance(part, Mapping) and names <= part.keys():
            return f"; give load_state_dict the part with the key {key!r}"
    return ""


def no_state_of_a_loader(state: Any) -> Exception:
    """Return the error for what was given as a state of a loader, and is none."""
    if not isinstance(state, Mapping):
        return TypeError(f"state must be what state_dict() gave, a dict, got {brief_repr(state)}")
    if isinstance(state.get("state"), tuple | list) and "version" in state:
        return ValueError(
            "the state is of a minloader.torch.DataLoader, but this is a minloader.Loader, whose "
            "order follows from its seed; give it what its own state_dict() returned"
        )
    if isinstance(state.get("sampler"), str):
        return ValueError(
            f"this is the state of a {state['sampler']}, not of a Loader; give what the loader's "
            "state_dict() returned, which has it inside"
        )
    part = part_meant(state, {"version", "seed", "epoch"})
    return ValueError(f"this is no state of a Loader, but has keys {brief_repr(list(state))}{part}")


def no_state_of_a_sampler(sampler: Any, state: Mapping[str, Any], missing: str) -> ValueError:
    """Return the error for what was given as a state of a sampler of ours, and lacks a value."""
    kind = type(sampler).__name__
    former = state.get("sampler")
    if isinstance(former, tuple | list) or "stream" in state:
        text = f"this is the state of a Loader, not of a {kind}; give it to its load_state_dict"
    elif isinstance(former, str) and former != kind:
        text = (
            f"the state is of a {former}, but this is a {kind}; make the sampler that there was "
            "then, or start anew without the state"
        )
    else:
        text = f"this is no state of a {kind}: it has no {missing!r}, but {brief_repr(list(state))}"
    return ValueError(text)


def check_size(former: int, size: int) -> None:
    """Refuse a dataset with fewer samples than when a state was taken; more are told of.

    Args:
        former: how many there were then.
        size: how many there are now.

    Raises:
        ValueError: these are fewer.
    """
    if size < former:
        raise ValueError(
            f"n, the number of samples, is {size}, but the state is of an epoch with n {former}; "
            "give the dataset that there was then, or start anew without the state"
        )
    if size > former:
        report_growth(former, size)


def other_argument(name: str, here: Any, former: Any) -> ValueError:
    """Return the error for a state of a sampler of ours that was made with another argument.

    Args:
        name: of the attribute.
        here: its value.
        former: that of the state.
    """
    label = "n, the number of samples," if name == "n" else name
    difference = f"{label} is {here!r}, but the state is of {name} {former!r}"
    if name == "lengths_digest":  # digests, which tell a reader nothing
        difference = "the lengths, or their costs, are not those that the state is of"
    return ValueError(
        f"{difference}; give the dataset and the arguments of the sampler that there were then, or "
        "start anew without the state"
    )


def other_sampler(sampler: Any, former: str, at: int, ordinal: int, *item: Any) -> ValueError:
    """Return the error for a sampler that does not give what it gave when a state was taken.

    Args:
        sampler: that there is now.
        former: what was recognized then: the number of ranks, or the digest of an item.
        at: the batch where the state is.
        ordinal: of the item that was compared, or of the sampler's end.
        item: which; of an end, none.
    """
    _, ranks_here, rank = dealer_of_process()
    whose = f"; or is it of another rank? Here is rank {rank} of {ranks_here}"
    whose *= ranks_here > 1
    if not item:
        return ValueError(
            f"the state does not fit: it is at batch {at}, but the sampler has ended after "
            f"{ordinal}{whose}"
        )
    ranks = ranks_as_text(sampler)
    was_of_ranks = " ranks" in former
    if ranks is not None or was_of_ranks:
        return ValueError(
            f"the state does not fit: the sampler deals the epoch out to {ranks or '1 rank'}, but "
            f"the state was taken with {former if was_of_ranks else '1 rank'}; have as many "
            "ranks, and the seed, that there were then, or begin the epoch anew"
        )
    return ValueError(
        f"the state does not fit: item {ordinal} of the sampler is {brief_repr(item[0])}, but it "
        "was another one when the state was taken; the order must follow from the sampler's "
        "arguments and set_epoch alone, and these be as they were (also seed and number of ranks), "
        f"or the sampler must have state_dict and load_state_dict{whose}"
    )


def refuse_own_generator(sampler: Any, *, is_put_back: bool) -> None:
    """Refuse a sampler whose order follows from a generator of its own, which nothing puts back.

    Args:
        sampler: one of ours, which is judged by those that it reads; or another.
        is_put_back: whether the state has one of it.
    """
    if isinstance(sampler, Sampler):
        for each in sampler.inner_samplers():
            refuse_own_generator(each, is_put_back=is_stateful(each))
        return
    if is_put_back:
        return
    others = [each for each in with_inner(sampler) if not isinstance(each, Sampler)]
    if any(map(has_epochs, others)):
        return  # it is told what its order follows from
    for each in others:
        for name, value in getattr(each, "__dict__", {}).items():
            if type(value).__name__ in ("Random", "Generator", "RandomState"):
                raise ValueError(
                    f"the sampler, {brief_repr(sampler)}, draws its order from a generator, "
                    f"{name}, which the state does not have: in a new process it would repeat the "
                    "order of the first epoch; give it set_epoch, or state_dict and load_state_dict"
                )

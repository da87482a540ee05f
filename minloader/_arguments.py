"""Arguments: what is checked of them.

Every message names the argument, what was given, and what to do. What is named ``checked_...``
returns the value.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from numbers import Real
from typing import Any, NoReturn, TypeVar, cast

from minloader._formats import brief_repr
from minloader._protocols import has_samples, is_iterable


def checked_int(name: str, value: Any, least: int, most: float = math.inf) -> int:
    """Return an argument that must be an integer, numpy's included, from ``least`` to ``most``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {brief_repr(value)}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


MOST_WORKERS = 10_000
"""Of one loader: more than the processes that a machine has room for."""


def checked_num_workers(value: Any) -> int:
    """Return ``num_workers``, which must be an integer from 0 on that a machine can have."""
    return checked_int("num_workers", value, 0, MOST_WORKERS)


def checked_bool(name: str, value: Any) -> bool:
    """Return whether an argument is true. What is neither True nor False is refused, as "no", 5."""
    with suppress(ValueError):  # an array is neither
        if value == bool(value):
            return bool(value)
    raise TypeError(f"{name} must be True or False, got {brief_repr(value)}")


def checked_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return an argument that must be one of several words."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {brief_repr(value)}")
    return str(value)


def check_callable(name: str, value: Any) -> None:
    """Refuse what is neither a function nor None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable or None, got {brief_repr(value)}")


def check_iterable(name: str, value: Any) -> None:
    """Refuse what is neither iterable nor None, and a string, whose items would be characters.

    It is not begun: an iterator serves once.
    """
    if type(value) is str:
        raise TypeError(f"{name} must be an iterable of items, got the string {brief_repr(value)}")
    if value is not None and not is_iterable(value):
        size = f"; for batches of {value} samples, write batch_size={value}"
        advice = size if type(value) is int else ""
        raise TypeError(f"{name} must be iterable or None, got {brief_repr(value)}{advice}")


F = TypeVar("F", bound=Callable[..., None])


def explain_arguments(init: F) -> F:
    """Have ``Loader.__init__`` say what an unknown argument is called here, and keep the others.

    ``_arguments`` of the loader are two dicts: what it was made with, and the defaults.
    """
    by_name = init.__kwdefaults__ or {}

    @functools.wraps(init)
    def checked(self: Any, /, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in by_name and name not in ("dataset", "sampler"):
                from minloader._diagnosis.mistakes import argument_meant

                raise TypeError(f"Loader has no argument {name!r}; {argument_meant(name, by_name)}")
        given = dict(zip(("dataset", "sampler"), args, strict=False)) | kwargs
        self._arguments = given, by_name
        init(self, *args, **kwargs)

    return cast("F", checked)


def refuse_copies(self: Any) -> NoReturn:
    """Refuse to pickle or copy a loader or its iterator; for ``__reduce__``."""
    raise TypeError(
        "a Loader and its iterators cannot be pickled or copied, since the workers are its own; "
        "make another Loader where it is needed, and pass on its state_dict()"
    )


def check_dataset(dataset: Any, *, awaits: bool = False) -> None:
    """Refuse a dataset that is neither indexable nor callable, and a string, probably a path.

    And one whose samples are coroutines, unless a function of the user's ``awaits`` them.
    """
    reads = getattr(type(dataset), "__getitem__", None) or dataset
    is_coroutine = inspect.iscoroutinefunction(reads) and not awaits
    gives_samples = has_samples(dataset) or callable(dataset)
    if is_coroutine or not gives_samples or type(dataset) is str:
        from minloader._diagnosis.mistakes import no_dataset

        raise no_dataset(dataset, reads)


def dataset_length(dataset: Any) -> int:
    """Return the length of a dataset whose items are the numbers up to it.

    Raises:
        TypeError: there is no such dataset.
    """
    if type(dataset).__module__.partition(".")[0] in ("pandas", "polars", "pyarrow"):
        from minloader._diagnosis.mistakes import check_frame

        check_frame(dataset)
    try:
        return len(dataset)
    except TypeError as error:
        from minloader._diagnosis.mistakes import no_length

        raise no_length(dataset, error) from error


def check_sampler_alone(batch_size: Any, shuffle: Any, last_batch: Any) -> None:
    """Refuse arguments that say what a batch is, where a sampler does."""
    for name, value, default in (
        ("batch_size", batch_size, None),
        ("shuffle", shuffle, False),
        ("last_batch", last_batch, "keep"),
    ):
        if value != default:
            raise ValueError(
                f"{name}={value!r} cannot be combined with a sampler, which decides what a "
                f"batch is; drop {name}, or drop the sampler; for batches of its items give "
                "BatchSampler(sampler, batch_size), with collate_fn=minloader.collate"
            )


def checked_stream(batch_size: Any, shuffle: Any, last_batch: Any, collate_fn: Any) -> int | None:
    """Return ``batch_size``; refuse arguments that a stream cannot have."""
    if batch_size is not None:
        batch_size = checked_int("batch_size", batch_size, 1)
    elif collate_fn is not None:
        raise ValueError(
            "collate_fn needs batch_size where the dataset is a stream (an iterable); without, "
            "its elements are the batches: give batch_size, or use transform"
        )
    if shuffle:
        raise ValueError(
            f"shuffle={shuffle!r} is not for a stream (an iterable dataset), which decides its "
            "order itself; drop shuffle, and give minloader.shuffled(dataset, buffer_size)"
        )
    if last_batch not in ("keep", "discard"):
        raise ValueError(
            f"last_batch must be 'keep' or 'discard' for a stream (an iterable dataset), got "
            f"{last_batch!r}: what is left over of a shard is not kept for the next epoch"
        )
    if batch_size is None and last_batch != "keep":
        raise ValueError(f"last_batch={last_batch!r} needs a batch_size; give one, or drop it")
    return batch_size  # type: ignore[no-any-return]


def as_float(value: Any) -> float:
    """Return a number as a float; an int of hundreds of digits is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def checked_timeout(timeout: Any, executor: Any) -> float | None:
    """Return a number of seconds, or None for no limit.

    Raises:
        ValueError: it is not positive, or nobody could end what takes longer.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds or None, got {brief_repr(timeout)}")
    seconds = as_float(timeout)
    if not seconds > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout}; None for no limit")
    check_process_alone("timeout", timeout, executor)  # no other can be killed
    return seconds


def check_memory_limit(limit: Any, executor: Any) -> None:
    """Refuse a limit for processes where there are none of our own."""
    if limit is None:
        return
    checked_int("worker_memory_limit", limit, 1)
    check_process_alone("worker_memory_limit", limit, executor)


def check_process_alone(name: str, value: Any, executor: Any) -> None:
    """Refuse an argument of worker processes where the batches are made by others."""
    if executor != "process":
        raise ValueError(
            f"{name}={value!r} is for executor='process' alone, but executor is "
            f"{brief_repr(executor)}; drop {name}"
        )


def checked_shared_memory(shared_memory: Any) -> int | None:
    """Return the most bytes of shared memory; None for a share of what is free."""
    if isinstance(shared_memory, bool):
        return None if shared_memory else 0
    return checked_int("shared_memory", shared_memory, 0)


def check_on_error(name: str, value: Any) -> None:
    """Refuse an ``on_error`` or ``on_sample_error`` that is neither a known word nor a function."""
    known = isinstance(value, str) and value in ("raise", "skip")
    if not known and (isinstance(value, type) or not callable(value)):
        raise ValueError(f"{name} must be 'raise', 'skip' or a callable, got {brief_repr(value)}")


def checked_max_errors(max_errors: Any) -> int | None:
    """Return how many may fail; None for any number."""
    if max_errors is None:
        return None
    if isinstance(max_errors, float):
        raise TypeError(
            f"max_errors must be an int or None, got {max_errors}; for a share of the samples, "
            "multiply it by how many an epoch has, and round that"
        )
    return checked_int("max_errors", max_errors, 0)


def checked_context(mp_context: BaseContext | str | None, executor: Any) -> BaseContext:
    """Return the context that was asked for."""
    if mp_context is not None:
        check_process_alone("mp_context", mp_context, executor)
    if isinstance(mp_context, BaseContext):
        return mp_context
    if mp_context is not None and not isinstance(mp_context, str):
        raise TypeError(
            f"mp_context must be a multiprocessing context, got {brief_repr(mp_context)}"
        )
    method = "spawn" if mp_context is None else mp_context
    return get_context(checked_choice("mp_context", method, get_all_start_methods()))

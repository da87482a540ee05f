"""Arguments: how they are checked, and how messages show values; and how to copy a collection.

Every message names the argument, what was given, and what to do. All of it runs in the process that
makes the loader.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from numbers import Real
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeGuard, TypeVar, cast
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    B = WithDefault("B", default=Any)
else:  # Python's own have defaults from 3.13 on
    B = TypeVar("B")

T = TypeVar("T")

logger = logging.getLogger("minloader")

brief_repr = reprlib.repr
"""How messages show a value: never long, never failing."""


def counted(number: int, noun: str) -> str:
    """Return how many there are of something, for a message: "1 batch", or "2 batches"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def format_bytes(count: float) -> str:
    """Return an amount of memory in three digits: "24.3 MB"."""
    for unit in ("bytes", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 999.5 else f"{count:,.0f} GB"


def check_int(name: str, value: Any, least: int, most: float = math.inf) -> int:
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


def check_num_workers(value: Any) -> int:
    """Return ``num_workers``, which must be an integer from 0 on that a machine can have."""
    return check_int("num_workers", value, 0, MOST_WORKERS)


def check_bool(name: str, value: Any) -> bool:
    """Return whether an argument is true. What is neither True nor False is refused, as "no", 5."""
    with suppress(ValueError):  # an array is neither
        if value == bool(value):
            return bool(value)
    raise TypeError(f"{name} must be True or False, got {brief_repr(value)}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
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


def is_iterable(thing: Any) -> bool:
    """Return whether ``iter`` takes something, also by its ``__getitem__`` alone."""
    return isinstance(thing, Iterable) or has_getitem(thing)


def has_getitem(thing: Any) -> bool:
    """Return whether something is indexed. Python itself looks at the type alone, too."""
    return has_method(type(thing), "__getitem__")


def has_getitems(dataset: Any) -> bool:
    """Return whether a dataset fetches several samples at once, as a batch's of torch's does.

    Its class must say so: a wrapper with a ``__getitem__`` of its own may hand on all else. And so
    must the dataset, where that depends on what it is made of.
    """
    return has_method(type(dataset), "__getitems__") and has_method(dataset, "__getitems__")


def has_method(thing: Any, name: str) -> bool:
    """Return whether something has a method. A class that sets it to None has it not."""
    return getattr(thing, name, None) is not None


def snapshot(things: Iterable[T]) -> list[T]:
    """Return what is in a collection that other threads may change meanwhile.

    One step of C for lists and dicts. A ``WeakSet`` is walked in Python (until 3.14), and a deque
    refuses to be walked if it changes, which it can without a global lock.
    """
    while True:
        try:
            return list(things)
        except RuntimeError:  # it changed size
            continue


class Stateful(Protocol):
    """A sampler, stream or iterator that can say where it is, and be put there."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class HasEpochs(Protocol):
    """A sampler, stream or iterator that is told the number of each epoch."""

    def set_epoch(self, epoch: int) -> Any: ...


def is_array_like(thing: Any) -> bool:
    """Return whether something is an array to numpy: one of its own, of torch, JAX or pandas."""
    return hasattr(thing, "__array__")


def has_epochs(thing: Any) -> TypeGuard[HasEpochs]:
    """Return whether something is told the number of each epoch. Wrappers may pass it on."""
    return has_method(thing, "set_epoch")


def is_stateful(thing: Any) -> TypeGuard[Stateful]:
    """Return whether something can say where it is, and be put there, by one who knows nothing.

    The ``state_dict`` of some (MosaicML's and litData's streams) must be told how far they were
    read: they count as without a state.
    """
    if not has_method(thing, "load_state_dict"):
        return False
    method = getattr(thing, "state_dict", None)
    function = getattr(method, "__func__", method)
    try:
        known = _called_alone.get(function)
        if known is None:
            known = _called_alone[function] = _can_be_called_alone(method)
    except TypeError:  # it is not hashable, or cannot be referred to weakly
        known = _can_be_called_alone(method)
    return known


_called_alone: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Of functions: to look at a signature takes longer than to ask for a state."""


def _can_be_called_alone(method: Any) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    except ValueError:  # one that is written in C may tell nothing
        return True
    return True


def is_read_once(items: Any) -> bool:
    """Return whether an iterable is an iterator that nothing can begin anew, as far as is known."""
    if isinstance(items, GeneratorType):
        return True
    is_python = type(items).__flags__ & 1 << 9  # a class of Python's may begin anew in __iter__
    return isinstance(items, Iterator) and not is_python


def state_of(thing: Any) -> Any:
    """Return the state of something, or None if it has none.

    It may have inherited methods that do nothing: those of an abstract class, or of a protocol.
    """
    if not is_stateful(thing):
        return None
    try:
        return thing.state_dict()
    except NotImplementedError:
        return None


def known_state(thing: Any) -> Any:
    """Return the state of something; None if it has none, or cannot say where it is."""
    try:
        return state_of(thing)
    except Exception as error:  # many have none before their first item, or behind their last
        logger.debug("%s does not say where it is: %r", brief_repr(thing), error)
        return None


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of those of some things that have one, by their names."""
    states = {name: state_of(part) for name, part in parts.items()}
    return {name: state for name, state in states.items() if state is not None}


RANKS = "rank", "process_index"
"""What states call the rank of the process that they are of."""


def differences(here: Any, then: Any, name: str = "") -> list[str]:
    """Return in words what of a state is another than it was, but for the rank it is of.

    Args:
        here: what is there now.
        then: what was there; perhaps as JSON has it, with lists in place of tuples.
        name: of the part that is compared; "" for the whole.
    """
    if isinstance(here, Mapping) and isinstance(then, Mapping):
        parts = {str(key): value for key, value in here.items()}
        former = {str(key): value for key, value in then.items()}
        found = []
        for key in (parts | former).keys() - {*RANKS}:
            path = f"{name}.{key}" if name else key
            found += differences(parts.get(key), former.get(key), path)
        return sorted(found)
    if isinstance(here, list | tuple) and isinstance(then, list | tuple) and len(here) == len(then):
        found = []
        for n, (now, before) in enumerate(zip(here, then, strict=True)):
            found += differences(now, before, f"{name}[{n}]")
        return found
    if _are_equal(here, then):
        return []
    where = f"{name} " if name else ""
    return [f"{name or 'it'} is {brief_repr(here)}, but the state is of {where}{brief_repr(then)}"]


def _are_equal(here: Any, then: Any) -> bool:
    if hasattr(here, "tolist") and hasattr(then, "tolist"):  # arrays, and tensors
        here = here.tolist()
        then = then.tolist()
    try:
        return bool(here == then)
    except Exception:  # of the user's own objects, which are not known to differ
        return True


# --- mistakes, and what was meant

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

ADVICE = {
    "SystemExit": "it ends nothing here; raise an error that says what is wrong, in place of "
    "sys.exit()",
    "BdbQuit": "a debugger needs the terminal, which worker processes do not have: make the "
    "batches in your own process, with num_workers=0",
}
"""What to do about errors that say nothing themselves, by the name of their type."""

WHOLE_ITEM = (
    "when dataset[item] got the whole list, since there is no collate_fn; with "
    "collate_fn=minloader.collate it gets one index at a time"
)
"""Stage of a failure that a list in place of an index may be the reason for."""

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
                raise TypeError(f"Loader has no argument {name!r}; {_meant(name, by_name)}")
        given = dict(zip(("dataset", "sampler"), args, strict=False)) | kwargs
        self._arguments = given, by_name
        init(self, *args, **kwargs)

    return cast("F", checked)


def _meant(name: str, names: Iterable[str]) -> str:
    import difflib  # workers need it not

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
    import difflib

    arguments = {"dataset", "sampler", *defaults}
    if name in arguments:
        raise AttributeError(
            f"{name} cannot be set, since the workers have what the Loader was made with; make "
            f"another Loader with {name}=..."
        )
    near = difflib.get_close_matches(name, [*arguments, "epoch"], 1, cutoff=0.8)
    if near and not hasattr(loader, name):
        raise AttributeError(f"a Loader has no attribute {name!r}; did you mean {near[0]}?")


def refuse_copies(self: Any) -> NoReturn:
    """Refuse to pickle or copy a loader or its iterator; for ``__reduce__``."""
    raise TypeError(
        "a Loader and its iterators cannot be pickled or copied, since the workers are its own; "
        "make another Loader where it is needed, and pass on its state_dict()"
    )


def refuse_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    """Say where a debugger can be used; for ``sys.breakpointhook`` in a worker process."""
    raise RuntimeError(f"breakpoint() in a worker: {ADVICE['BdbQuit']}")


def part_meant(checkpoint: Mapping[Any, Any], names: set[str]) -> str:
    """Return which part of a checkpoint is the state, in words; "" if none is."""
    for key, part in checkpoint.items():
        if isinstance(part, Mapping) and names <= part.keys():
            return f"; give load_state_dict the part with the key {key!r}"
    return ""


def warn_idle_workers(num_workers: int, shards: int) -> None:
    """Say in the log that a stream has fewer shards than there are workers."""
    if num_workers > shards:
        logger.warning(
            "the stream has %d shards, as many as there were workers when it was first begun: %d "
            "of %d workers have nothing to read; more shards take a new Loader, and no state",
            shards,
            num_workers - shards,
            num_workers,
        )


# --- of the loader


def is_stream(dataset: Any, sampler: Any) -> bool:
    """Return whether a dataset is only iterable, so that its workers read on in it."""
    if sampler is not None or not isinstance(dataset, Iterable):
        return False
    if not has_getitem(dataset):
        return True
    # torch's has inherited a __getitem__ that only raises.
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(dataset, torch_data.IterableDataset)


def has_samples(dataset: Any) -> bool:
    """Return whether a dataset gives samples by their indices, one by one or several at once."""
    return has_getitem(dataset) or has_getitems(dataset)


def check_dataset(dataset: Any, *, awaits: bool = False) -> None:
    """Refuse a dataset that is neither indexable nor callable, and a string, probably a path.

    And one whose samples are coroutines, unless a function of the user's ``awaits`` them.
    """
    kind = type(dataset)
    reads = getattr(kind, "__getitem__", None) or dataset
    if not awaits and inspect.iscoroutinefunction(reads):
        raise TypeError(
            f"a sample is a coroutine, since {brief_repr(reads)} is an async def; give the loader "
            "minloader.concurrent(dataset), which awaits them"
        )
    if kind is str:
        raise TypeError(
            f"dataset must give samples, got the string {brief_repr(dataset)}; if that is a path, "
            "pass an object that reads the file"
        )
    if not (has_samples(dataset) or callable(dataset)):
        raise TypeError(
            "dataset must have __getitem__ or __iter__, or be callable, got "
            f"{brief_repr(dataset)}; give it a __getitem__, or pass a function of one item; a "
            "stream, which has __iter__ alone, takes no sampler"
        )


def dataset_length(dataset: Any) -> int:
    """Return the length of a dataset whose items are the numbers up to it.

    Raises:
        TypeError: there is no such dataset.
    """
    module = type(dataset).__module__.partition(".")[0]
    if module in ("pandas", "polars", "pyarrow") and hasattr(type(dataset), "columns"):
        raise TypeError(
            f"dataset is a {type(dataset).__name__} of {module}, whose items are no samples; give "
            "a function of row numbers, such as lambda rows: frame.iloc[rows], with "
            "sampler=BatchSampler(len(frame), batch_size)"
        )
    try:
        return len(dataset)
    except TypeError as error:
        advice = "; give an object of that class" if isinstance(dataset, type) else ""
        if inspect.isgeneratorfunction(dataset):
            advice = "; for a stream give an object with this function as its __iter__"
        raise TypeError(
            f"sampler is needed: the dataset, {brief_repr(dataset)}, has no len() to make one "
            f"from{advice}"
        ) from error


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


def check_stream(batch_size: Any, shuffle: Any, last_batch: Any, collate_fn: Any) -> int | None:
    """Return ``batch_size``; refuse arguments that a stream cannot have."""
    if batch_size is not None:
        batch_size = check_int("batch_size", batch_size, 1)
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


def check_timeout(timeout: Any, executor: Any) -> float | None:
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


def reads_at_once(dataset: Any) -> int:
    """Return how many samples a worker reads at the same time, by ``concurrent``; 0 without."""
    return int(dataset.limit) if hasattr(type(dataset), "__getfutures__") else 0


def check_memory_limit(limit: Any, executor: Any) -> None:
    """Refuse a limit for processes where there are none of our own."""
    if limit is None:
        return
    check_int("worker_memory_limit", limit, 1)
    check_process_alone("worker_memory_limit", limit, executor)


def check_process_alone(name: str, value: Any, executor: Any) -> None:
    """Refuse an argument of worker processes where the batches are made by others."""
    if executor != "process":
        raise ValueError(
            f"{name}={value!r} is for executor='process' alone, but executor is "
            f"{brief_repr(executor)}; drop {name}"
        )


def check_shared_memory(shared_memory: Any) -> int | None:
    """Return the most bytes of shared memory; None for a share of what is free."""
    if isinstance(shared_memory, bool):
        return None if shared_memory else 0
    return check_int("shared_memory", shared_memory, 0)


def check_on_error(name: str, value: Any) -> None:
    """Refuse an ``on_error`` or ``on_sample_error`` that is neither a known word nor a function."""
    known = isinstance(value, str) and value in ("raise", "skip")
    if not known and (isinstance(value, type) or not callable(value)):
        raise ValueError(f"{name} must be 'raise', 'skip' or a callable, got {brief_repr(value)}")


def check_max_errors(max_errors: Any) -> int | None:
    """Return how many may fail; None for any number."""
    if max_errors is None:
        return None
    if isinstance(max_errors, float):
        raise TypeError(
            f"max_errors must be an int or None, got {max_errors}; for a share of the samples, "
            "multiply it by how many an epoch has, and round that"
        )
    return check_int("max_errors", max_errors, 0)


def check_context(mp_context: BaseContext | str | None, executor: Any) -> BaseContext:
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
    return get_context(check_choice("mp_context", method, get_all_start_methods()))


def warn_rereading(again: list[int]) -> None:
    """Say in the log that shards of a stream without a state are read again to where they were.

    Args:
        again: how many batches of each are passed over.
    """
    if any(again):
        logger.warning(
            "the stream is read again from its beginning, past %s in %s, before the "
            "first new batch, since it has no state; give it, or what its __iter__ returns, "
            "state_dict and load_state_dict to resume at once",
            counted(sum(again), "batch"),
            counted(sum(map(bool, again)), "shard"),
        )


# --- of what a batch is made of; these run where it is made


def check_indices(item: Any) -> list[Any]:
    """Return the indices of an item that the samples of a batch are fetched by."""
    try:
        if not isinstance(item, (str, bytes, Mapping)):
            return list(item)
    except TypeError:
        pass
    raise TypeError(
        f"the sampler yielded {brief_repr(item)}, but with collate_fn each item must be a list of "
        "indices; use a batch sampler or batch_size, or drop collate_fn (a torch DataLoader takes "
        "one index at a time as sampler, with batch_size=None)"
    )


def check_samples(fetched: Any, indices: list[Any]) -> list[Any]:
    """Return the samples that ``__getitems__`` has fetched, one for each index."""
    wanted = "dataset.__getitems__ must return a list with one sample for each index"
    columns = _columns_in(fetched)
    if columns:
        raise TypeError(
            f"{wanted}, but returned {columns}; return a list of its rows; or if it is the batch, "
            "drop batch_size and collate_fn, and give the loader the function: "
            "Loader(dataset.__getitems__, BatchSampler(...))"
        )
    is_list = has_getitem(fetched) or isinstance(fetched, Iterator)
    if not is_list or isinstance(fetched, str | bytes):
        raise TypeError(f"{wanted}, but returned {brief_repr(fetched)}")
    samples = list(fetched)
    if len(samples) != len(indices):
        raise ValueError(f"{wanted}, but returned {len(samples)} for {len(indices)} indices")
    return samples


def check_can_transform(fetched: Any) -> list[Any]:
    """Return what torch's kind of ``__getitems__`` has fetched as a list, for ``transform``."""
    columns = _columns_in(fetched)
    if columns:
        raise TypeError(
            f"transform is called with each sample, but dataset.__getitems__ returned {columns}; "
            "have it return a list of samples, or do in collate_fn what transform does"
        )
    return list(fetched)


def _columns_in(fetched: Any) -> str:
    """Return in words what has columns, and so gives these in place of samples; "" if nothing."""
    kind = type(fetched)
    if isinstance(fetched, Mapping):
        return f"one {kind.__name__} with keys {brief_repr(list(fetched))}"
    if hasattr(kind, "columns"):
        return f"a {kind.__name__}, which gives its columns one by one"
    return ""


def reader_of(dataset: Any) -> Callable[[Any], Any]:
    """Return what gives one item of a dataset of any kind."""
    if has_getitem(dataset):  # else a class that has it is a callable dataset
        return functools.partial(operator.getitem, dataset)
    if has_getitems(dataset):
        return lambda item: check_samples(dataset.__getitems__([item]), [item])[0]
    read: Callable[[Any], Any] = dataset
    return read

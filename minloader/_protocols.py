"""What an object of the user's can do, and how it is asked: a dataset, a sampler, a stream.

All of it runs where the object is: here, and in the workers.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar
from weakref import WeakKeyDictionary

from minloader._errors import breaks_in
from minloader._formats import brief_repr

logger = logging.getLogger("minloader")

if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    B = WithDefault("B", default=Any)
else:  # Python's own have defaults from 3.13 on
    B = TypeVar("B")

T = TypeVar("T")


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
        if breaks_in(error):
            raise
        logger.debug("%s does not say where it is: %r", brief_repr(thing), error)
        return None


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of those of some things that have one, by their names."""
    states = {name: state_of(part) for name, part in parts.items()}
    return {name: state for name, state in states.items() if state is not None}


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


def reads_at_once(dataset: Any) -> int:
    """Return how many samples a worker reads at the same time, by ``concurrent``; 0 without."""
    return int(dataset.limit) if hasattr(type(dataset), "__getfutures__") else 0


def checked_indices(item: Any) -> list[Any]:
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


def checked_samples(fetched: Any, indices: list[Any]) -> list[Any]:
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


def checked_rows(fetched: Any) -> list[Any]:
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
        return lambda item: checked_samples(dataset.__getitems__([item]), [item])[0]
    read: Callable[[Any], Any] = dataset
    return read

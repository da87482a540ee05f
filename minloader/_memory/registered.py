"""What classes of the main module were registered as, in tables of libraries.

Workers do not import the main module, so its classes are sent by value. What a decorator has told a
library about one is not part of the class: a library of trees, such as torch's or JAX's, would take
its objects for leaves in a worker, in silence. So that travels with the class, and is told again in
the worker, as soon as that has imported the library.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from minloader._memory.reducers import arrived

logger = logging.getLogger("minloader")

TORCH = "torch.utils._pytree"
JAX = "jax.tree_util"


def with_registrations(reduced: Any, known: list[Any]) -> Any:
    """Return a reduced class such that it is registered where it arrives.

    Args:
        reduced: as cloudpickle does it, by value: the last part sets the state.
        known: what libraries know the class as.
    """
    registered: dict[str, tuple[Any, ...]] = {}
    for each in known:
        if hasattr(each, "to_iter"):
            registered[JAX] = each.to_iter, each.from_iter
        else:
            registered[TORCH] = each.flatten_fn, each.unflatten_fn, each.flatten_with_keys_fn
    *before, set_state = reduced
    return *before, partial(_set_state, set_state, registered)


def _set_state(set_state: Any, registered: dict[str, Any], cls: Any, state: Any) -> Any:
    filled = set_state(cls, state)
    for name, functions in registered.items():
        arrived[name, cls] = partial(_register, cls, functions)
    return filled


def _register(cls: type, functions: tuple[Any, ...], library: Any) -> None:
    flatten, unflatten, *with_keys = functions
    keys = {"flatten_with_keys_fn": with_keys[0]} if with_keys else {}
    try:
        library.register_pytree_node(cls, flatten, unflatten, **keys)
    except ValueError as error:  # it is registered: the job has arrived before
        logger.debug("a class was not registered: %r", error)

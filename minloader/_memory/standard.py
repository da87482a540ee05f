"""How objects of the standard library are reduced whose own way, or cloudpickle's, does not do."""

from __future__ import annotations

import io
import sys
import types
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from minloader._memory.reducers import as_it_is


def refuse_open_file(file: io.TextIOWrapper) -> Any:
    """Refuse what cloudpickle would send all the text of. Pickle refuses binary files."""
    if file in (sys.stdout, sys.stderr):
        return cloudpickle.Pickler.dispatch_table[io.TextIOWrapper](file)
    raise TypeError("cannot pickle '_io.TextIOWrapper' object: it is an open file")


def refuse_connection(connection: Connection) -> Any:
    """Refuse what plain pickle would send the mere number of the descriptor of."""
    raise TypeError("cannot pickle a connection: only a process that is started can be given it")


def refer_to_generator(generator: Any) -> Any:
    """Refer to the generator of a module's functions by name; copy any other.

    ``from random import shuffle`` binds a method of it. A copy would not be seeded for each batch,
    and each worker would have the same one.
    """
    module = sys.modules[type(generator).__module__]
    names = [name for name, value in vars(module).items() if value is generator]
    return names[0] if names else as_it_is(generator)


def reduce_code(code: types.CodeType) -> Any:
    """Reduce code with the name of its file, which tracebacks, logs and stacks show.

    cloudpickle, from 3.1.3, writes ``<dynamic-code>`` in its place.
    """
    _, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _code_of_file, (code.co_filename, arguments)


def _code_of_file(filename: str, arguments: tuple[Any, ...]) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=filename)


def reduce_lazy_import(lazy: Any) -> Any:
    """Reduce the object that a ``lazy import`` has bound a name to, until that is used.

    It is what it stands for: the module is imported here.
    """
    return _return, (lazy.resolve(),)


def _return(obj: Any) -> Any:
    return obj

"""What cloudpickle leaves out, or cannot send, of classes and functions that travel by value.

From CPython 3.14, annotations are evaluated when somebody reads them (PEP 649). Until then, a class
or a function has a function that evaluates them, ``__annotate__``. cloudpickle 3.1.2

- leaves that function out, so that a class arrives without annotations;
- evaluates those of a function, which fails if they name what exists for type checkers only;
- cannot pickle that function itself, which ``functools.update_wrapper`` stores in objects
  (cloudpickle #585), since it refers to the namespace of its class.

Here annotations are evaluated, without leaving a trace in the class, and sent as values, as they
were before 3.14. Names that do not exist stay forward references. A module that was imported lazily
is imported if an annotation needs it.

What typing reduces to a name of ``__main__`` is sent by value too, since annotations refer to it.

From CPython 3.15, ``lazy import`` (PEP 810) binds a name to an object that stands for the module
until it is used. What is sent uses it: the module is imported.
"""

from __future__ import annotations

import importlib
import sys
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

annotationlib: Any = None
if sys.version_info >= (3, 14):
    annotationlib = importlib.import_module("annotationlib")  # dataclasses needs it anyway

MAIN = ("__main__", "__mp_main__")
"""Names of the main module: in a process that multiprocessing has spawned it is the second."""

OTHER_REDUCERS: dict[type, Callable[[Any], Any]] = {}
"""How objects of other types than classes and functions are reduced, if cloudpickle fails."""


def reduce_by_value(obj: Any, usual: Callable[[Any], Any]) -> Any:
    """Reduce a class or function.

    Args:
        obj: the class or function.
        usual: how cloudpickle reduces it.
    """
    if annotationlib is None:
        return usual(obj)
    if isinstance(obj, type):
        reduced = usual(obj)
        return _with_annotations(obj, reduced) if _is_by_value(reduced) else reduced
    try:
        reduced = usual(obj)
    except Exception:  # most likely of its annotations
        reduced = usual(_twin(obj))
    if _is_by_value(reduced) and obj.__code__.co_name == "__annotate__":
        return partial, (_annotate, _annotations(obj, None))
    return reduced


def _is_by_value(reduced: Any) -> bool:
    return isinstance(reduced, tuple) and len(reduced) == 6  # the last one sets the state


def _with_annotations(cls: type, reduced: Any) -> Any:
    """Return the reduced class with its annotations in its state, unless they are there."""
    annotate = annotationlib.get_annotate_from_class_namespace(vars(cls))
    state = reduced[2][0]
    if annotate is not None and not any(name.startswith("__annot") for name in state):
        state["__annotations__"] = _annotations(annotate, cls)
    return reduced


def _twin(function: Any) -> Any:
    """Return a copy of a function whose annotations have been evaluated."""
    code, variables = function.__code__, function.__globals__
    twin = types.FunctionType(
        code, variables, function.__name__, function.__defaults__, function.__closure__
    )
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(twin, name, getattr(function, name))
    vars(twin).update(vars(function))
    twin.__annotations__ = _annotations(function.__annotate__, function)
    return twin


def _annotations(annotate: Any, owner: Any) -> dict[str, Any]:
    """Evaluate annotations. The owner does not keep the result, as it would if it were asked."""
    if annotate is not None:
        for form in (annotationlib.Format.VALUE, annotationlib.Format.FORWARDREF):
            with suppress(Exception):  # names that exist for type checkers only, any user code
                return dict(annotationlib.call_annotate_function(annotate, form, owner=owner))
    return {}


def _annotate(annotations: dict[str, Any], form: int) -> dict[str, Any]:
    """Stand for a function ``__annotate__`` whose annotations were evaluated."""
    if form == annotationlib.Format.STRING:
        annotations = annotationlib.annotations_to_string(annotations)
    return dict(annotations)


def _reduce_forward_reference(reference: Any) -> Any:
    """Reduce a forward reference without the module's globals, all of which it refers to."""
    text = reference.evaluate(format=annotationlib.Format.STRING)
    module, is_class = reference.__forward_module__, reference.__forward_is_class__
    return partial(annotationlib.ForwardRef, text, module=module, is_class=is_class), ()


def _reduce_named(obj: Any) -> Any:
    """Reduce what typing itself reduces to a name, unless it is in a module to import."""
    kind: Any = type(obj)
    module = sys.modules.get(obj.__module__)
    if obj.__module__ not in MAIN and getattr(module, obj.__name__, None) is obj:
        return NotImplemented
    if kind is typing.NewType:
        return kind, (obj.__name__, obj.__supertype__), dict(vars(obj))
    if kind in (typing.ParamSpec, typing.TypeVarTuple):
        return kind, (obj.__name__,)
    return typing.ForwardRef, (obj.__name__,)  # an alias, whose value only annotations may need


def _reduce_lazy_import(lazy: Any) -> Any:
    """Reduce the object of a ``lazy import`` to what it stands for, which is imported here."""
    return _return, (lazy.resolve(),)


def _return(obj: Any) -> Any:
    return obj


for _kind in ("NewType", "ParamSpec", "TypeVarTuple", "TypeAliasType"):  # the last from 3.12
    if hasattr(typing, _kind):
        OTHER_REDUCERS[getattr(typing, _kind)] = _reduce_named
if annotationlib is not None:
    OTHER_REDUCERS[annotationlib.ForwardRef] = _reduce_forward_reference
if sys.version_info >= (3, 15):
    OTHER_REDUCERS[types.LazyImportType] = _reduce_lazy_import

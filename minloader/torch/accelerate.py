"""Hugging Face Accelerate, which makes a loader of its own from each that it is given.

It reads the loader's arguments, and passes those that it knows to torch's ``DataLoader``. HF's
Trainer has it do so. Only a program that asks for it gets minloader's instead.

Runs in the training process. Accelerate is imported only where it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from minloader.torch.data_loader import OWN_ARGUMENTS, DataLoader

MODULE = "accelerate.data_loader"

MAKERS = ("prepare_data_loader", "skip_first_batches")
"""Functions of that module which make a loader from the one that is their first argument."""

IMPORTERS = (MODULE, "accelerate.accelerator", "accelerate", "transformers.trainer")
"""Modules that have these functions by name."""


def use_in_accelerate() -> ExitStack:
    """Have Accelerate, and HF's Trainer, make minloader's loaders of minloader's loaders.

    Of torch's loaders they still make torch's. ::

        minloader.torch.use_in_accelerate()
        loader, model = accelerator.prepare(loader, model)

    It replaces two functions of Accelerate, ``prepare_data_loader`` and ``skip_first_batches``.
    Call it before a script imports one of these by name, and before the loader is prepared. Tested
    with Accelerate 1.15.

    Returns:
        An object that undoes it, by its ``close()`` or as a context manager.

    Raises:
        ImportError: Accelerate is not installed.
    """
    module = importlib.import_module(MODULE)
    undo = ExitStack()
    for name in MAKERS:
        former = getattr(module, name)
        keeping = _keeping(former, module)
        for importer in map(sys.modules.get, IMPORTERS):
            if importer is not None and getattr(importer, name, None) is former:
                undo.callback(setattr, importer, name, former)
                setattr(importer, name, keeping)
    return undo


def _keeping(make: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Return one of Accelerate's functions which keeps the class of minloader's loaders.

    Args:
        make: the function, of the loader and more.
        module: whose ``DataLoader`` it makes.
    """

    @wraps(make)
    def keeping(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(dataloader, DataLoader):
            return make(dataloader, *args, **kwargs)
        own = {name: getattr(dataloader, name) for name in OWN_ARGUMENTS}
        with ExitStack() as undo:
            undo.callback(setattr, module, "DataLoader", module.DataLoader)
            module.DataLoader = partial(DataLoader, **own)
            return make(dataloader, *args, **kwargs)

    return keeping


def prepare(accelerator: Any, *objects: Any) -> Any:
    """Prepare a model, an optimizer and loaders, as ``accelerator.prepare`` does. ::

        model, optimizer, loader = minloader.torch.prepare(accelerator, model, optimizer, loader)

    Minloader's loaders stay minloader's, and their states are in ``save_state`` and ``load_state``:
    do not skip batches after that.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        objects: what to prepare.

    Returns:
        The prepared object, or a tuple of them.

    Raises:
        ValueError: Accelerate is told to make torchdata's loaders.
    """
    if getattr(accelerator, "use_stateful_dataloader", False):
        raise ValueError(
            "drop use_stateful_dataloader: save_state has the states of minloader's loaders anyhow"
        )
    with use_in_accelerate():
        prepared = accelerator.prepare(*objects)
    for each in prepared if len(objects) > 1 else [prepared]:
        if isinstance(getattr(each, "base_dataloader", None), DataLoader):
            accelerator.register_for_checkpointing(each)
    return prepared

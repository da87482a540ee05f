"""Hugging Face Accelerate, which makes a loader of its own from each that it is given.

It reads the loader's arguments, and passes them to torch's ``DataLoader``. HF's Trainer has it do
so. Only a program that asks for it gets minloader's instead; others are warned, once.

Runs in the training process. Accelerate is imported only where it is asked for.
"""

from __future__ import annotations

import importlib
import warnings
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minloader.torch.data_loader import DataLoader

MODULE = "accelerate.data_loader"

OWN_ARGUMENTS = ("transform", "on_error", "retries", "worker_memory_limit", "seed_generators")
"""Arguments that torch's loader has not, and Accelerate does not read."""

_read: list[DataLoader[Any]] = []  # the loader whose arguments Accelerate has read last
_told = False


def use_in_accelerate() -> ExitStack:
    """Have Accelerate, and HF's Trainer, make minloader's loaders of minloader's loaders.

    Of torch's loaders they still make torch's. ::

        minloader.torch.use_in_accelerate()
        loader, model = accelerator.prepare(loader, model)

    It replaces one name, ``accelerate.data_loader.DataLoader``. Call it before the loader is
    prepared. Tested with Accelerate 1.15.

    Returns:
        An object that undoes it, by its ``close()`` or as a context manager.

    Raises:
        ImportError: Accelerate is not installed.
    """
    module: Any = importlib.import_module(MODULE)
    former = module.DataLoader

    def make(*args: Any, **kwargs: Any) -> Any:
        if not _read:
            return former(*args, **kwargs)
        from minloader.torch.data_loader import DataLoader

        loader = _read.pop()
        own = {name: getattr(loader, name) for name in OWN_ARGUMENTS}
        return DataLoader(*args, **(kwargs | own))

    make.keeps_minloader = True  # type: ignore[attr-defined]
    module.DataLoader = make
    undo = ExitStack()
    undo.callback(setattr, module, "DataLoader", former)
    undo.callback(_read.clear)  # of a loader that was read, and none made of it
    return undo


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
    from minloader.torch.data_loader import DataLoader

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


def notice(loader: DataLoader[Any], reader: FrameType) -> None:
    """Notice that Accelerate is about to make another loader of one.

    Args:
        loader: the one that is read.
        reader: the frame of the code that reads it.
    """
    global _told
    if reader.f_globals.get("__name__") != MODULE:
        return
    if hasattr(reader.f_globals["DataLoader"], "keeps_minloader"):
        _read[:] = [loader]
    elif not _told:
        _told = True
        warnings.warn(
            "Accelerate makes a torch DataLoader of this minloader.torch.DataLoader, which then "
            "has torch's workers; call minloader.torch.use_in_accelerate() before to keep "
            "minloader's (said once)",
            stacklevel=4,
        )

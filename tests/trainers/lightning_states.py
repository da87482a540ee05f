"""A run of Lightning's that goes on from any of its checkpoints trains on the rest of its batches.

From the checkpoint of each step, validation and end of three epochs, with one loader and several in
each mode, with limits and without, wherever the order comes from; and through a run that is
interrupted at each of these places. No sample is made but those that it trains on.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler, IterableDataset

from minloader import BatchSampler
from minloader.torch import DataLoader
from minloader.torch.lightning import KeepLoaderState

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Numbers:
    """Numbers, counted as they are made."""

    made = 0  # in this process

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        Numbers.made += 1
        return index


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Numbers whose order is that of the epoch which it was told."""

    epoch = 0

    def __init__(self, n: int) -> None:
        self.n = n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.n, generator=generator).tolist()


def shuffled(n: int, workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(n)
    return DataLoader(Numbers(n), 2, True, generator=generator, num_workers=workers)


def told(n: int) -> Any:
    return DataLoader(Numbers(n), 2, sampler=DistributedSampler(range(n), 1, 0))


def told_batches(n: int) -> Any:
    return DataLoader(Numbers(n), batch_sampler=BatchSampler(n, 2, shuffle=True))


def stream(n: int) -> Any:
    return DataLoader(Stream(n), 2)


class Module(lightning.LightningModule):
    """Notes what it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.batches.append(
            [each if each is None else each.tolist() for each in tree_leaves(batch)]
        )
        return self.weight * 0

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Interrupted(Exception):
    """A run is over."""


class Save(lightning.Callback):
    """Saves a checkpoint at each place, with the number of steps until there.

    Args:
        folder: where.
        interrupts: whether the run is interrupted at each place where it was not before.
    """

    def __init__(self, folder: Path, *, interrupts: bool) -> None:
        self.folder, self.interrupts = folder, interrupts
        self.places: dict[str, int] = {}

    def save(self, trainer: Any, kind: str) -> None:
        place = f"{trainer.global_step} {kind}"
        trainer.save_checkpoint(self.folder / place)
        if place in self.places:
            return
        self.places[place] = trainer.global_step
        if self.interrupts:
            raise Interrupted

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        # Behind the last step of an epoch, Lightning resumes in the next one.
        if not (self.interrupts and trainer.is_last_batch and trainer.current_epoch != 1):
            self.save(trainer, "step")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.save(trainer, "end")


def goes_on(
    folder: Path, make: Callable[[], Any], *validation: Any, max_epochs: int = 3, **options: Any
) -> None:
    """Compare what is trained on after each place, and through all of them, with the whole run.

    Args:
        folder: where checkpoints go.
        make: makes the loader, or the loaders.
        validation: a loader, or none.
        max_epochs: of the trainer.
        options: of the trainer.
    """
    folder.mkdir()

    def fit(save: Save, place: str | None) -> list[Any]:
        module = Module()
        Numbers.made = 0
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[save, KeepLoaderState()],
            max_epochs=max_epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            **options,
        )
        with suppress(Interrupted):
            path = None if place is None else save.folder / place
            trainer.fit(module, make(), *validation, ckpt_path=path)
        trained = sum(len(each or ()) for each in chain(*module.batches))
        assert Numbers.made in (0, trained), (folder.name, place, Numbers.made, module.batches)
        return module.batches

    save = Save(folder, interrupts=False)
    whole = fit(save, None)
    places = save.places
    assert set(places.values()) == set(range(1, len(whole) + 1))
    for place, step in places.items():
        rest = fit(save, place)
        assert rest == whole[step:], (folder.name, place, rest, whole[step:])
    save = Save(folder, interrupts=True)
    parts = fit(save, None)
    begun = 0
    while begun < len(save.places):
        begun = len(save.places)
        parts += fit(save, list(save.places)[-1])
    assert begun >= len(whole), save.places
    assert parts == whole, (folder.name, parts, whole)


LIMITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "limited": {"limit_train_batches": 2},
    "counted": {"max_steps": 10, "max_epochs": -1},
}


def main(folder: Path) -> None:
    for name, options in LIMITS.items():
        for make in shuffled, told, told_batches, stream:
            goes_on(folder / f"{name} {make.__name__}", partial(make, 7), **options)
        for mode in "max_size", "min_size", "max_size_cycle":

            def several(mode: Any = mode) -> Any:
                return CombinedLoader([shuffled(3), shuffled(7), told(5)], mode)

            goes_on(folder / f"{name} {mode}", several, **options)
        options = options | {"val_check_interval": 2, "max_epochs": 2}
        goes_on(folder / f"{name} validated", partial(shuffled, 7), DataLoader([0]), **options)
    goes_on(folder / "workers", partial(shuffled, 7, 1), limit_train_batches=2, max_epochs=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Lightning's callback that keeps the loaders' states, also at the end of an epoch.

It tells the loaders their epochs, too: Lightning tells those samplers alone that torch's own
samplers of batches have.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from minloader.torch.data_loader import DataLoader


class KeepLoaderState(Callback):  # type: ignore[misc]
    """Puts the states of the training loaders into each checkpoint, and resumes from there. ::

        trainer = lightning.Trainer(callbacks=[KeepLoaderState()])

    Lightning itself does so in mid-epoch alone. The callback also calls ``set_epoch`` of each
    training loader when an epoch begins, and so tells a sampler of batches its number.

    Raises:
        ValueError: when the training begins, if a loader does not know its number of batches.
            Lightning then reads a batch ahead, which the state would count.
    """

    _loaded: tuple[list[tuple[Any, bool]], bool] = [], False

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        has_stepped = trainer.fit_loop.batch_idx >= 0
        # A loader may end before the others, with a CombinedLoader.
        states = [
            (each.state_dict(), has_stepped and not each._is_within) for each in _loaders(trainer)
        ]
        checkpoint["minloader"] = states, trainer.is_last_batch

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("minloader", self._loaded)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for loader in _loaders(trainer):
            _check_length(loader)
        (states, was_last), self._loaded = self._loaded, ([], False)
        for loader, (state, has_ended) in zip(
            _loaders(trainer) if states else [], states, strict=True
        ):
            loader.load_state_dict(state)
            if was_last and not has_ended:
                loader._leave()
            loader._rests = has_ended and not was_last
        if was_last:
            _go_on_to_next_epoch(trainer.fit_loop)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for loader in _loaders(trainer):
            loader._rests = False
            loader.set_epoch(trainer.current_epoch)


def _go_on_to_next_epoch(loop: Any) -> None:
    """Have Lightning begin an epoch as it does without a resume, if it has counted the one before.

    As it is, it enters that one once more, with ``max_steps``, for a batch; or it does not count
    the epoch that it begins, so that this one's checkpoints are taken for those of its end.
    """
    progress = loop.epoch_progress
    if progress.current.processed < progress.current.ready:
        return
    if progress.current.completed < progress.current.processed:
        progress.increment_completed()
    if not loop.epoch_loop.restarted_on_train_batch_end:
        loop.epoch_loop.batch_progress.reset_on_run()
    loop.reset_restart_stage()


def _loaders(trainer: Any) -> list[DataLoader[Any]]:
    return [each for each in tree_leaves(trainer.train_dataloader) if isinstance(each, DataLoader)]


def _check_length(loader: DataLoader[Any]) -> None:
    """Refuse a loader that does not know its number of batches.

    Raises:
        ValueError: it is one.
    """
    try:
        len(loader)
    except (TypeError, NotImplementedError) as error:
        is_stream = isinstance(loader.dataset, IterableDataset)
        name = "dataset" if is_stream else "sampler" if loader.batch_size else "batch_sampler"
        raise ValueError(
            f"the number of batches is not known ({error}), and of such a loader Lightning reads a "
            f"batch ahead, which the state would count as trained on; give its {name} a __len__"
        ) from error

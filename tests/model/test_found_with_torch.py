"""The programs of ``drop_in.py``, for torch's loader."""

from __future__ import annotations

import pytest
from conftest import require, variants

require("torch")

import torch  # noqa: E402
from interrupts import OURS  # noqa: E402
from kinds import same  # noqa: E402

from minloader import Loader  # noqa: E402

from .drop_in import FOUND, KINDS, PRESSED, press, run  # noqa: E402

QUICK = ["shuffle", "own generator", "told with state", "rolling", "stream with state"]
"""Kinds of samplers and streams that are interrupted in any case."""


OVER_TORCHS = ["ours over torch's", "ours over ours over torch's"]
"""Samplers of ours that are drawn from as the epoch begins, and are begun anew after Ctrl-C."""


@pytest.mark.parametrize("name", FOUND)
@variants(("kinds", "num_workers"), [(list(KINDS), 0), (QUICK, 1)], ids=["all", "with a worker"])
def test_found(name, kinds, num_workers):
    for kind in kinds:
        run(kind, num_workers, FOUND[name]).close()


@pytest.mark.parametrize("name", PRESSED)
@variants(
    ("kinds", "stride"),
    [
        (QUICK, 307),
        (QUICK, 127),
        ([kind for kind in KINDS if kind not in QUICK], 809),
        (OVER_TORCHS, 83),
    ],
    ids=["some", "at more places", "others", "over torch's"],
)
@variants("comes", ["Ctrl-C", "an alarm", "Ctrl-C twice"], 2)
def test_what_comes_at_each_place_of_next(name, comes, kinds, stride):
    assert max(press(kind, 0, PRESSED[name], stride, comes) for kind in kinds) > 0


@variants("kind", ["stream with state", "stream", "stream with state, _epoch"])
def test_an_alarm_at_each_place_of_next_beside_a_worker(kind):
    """The stream may be read on by then: its forked worker needs another copy of it."""
    assert press(kind, 1, "begin 0", 13, "an alarm", f"{OURS}/_epochs") > 0


def test_an_alarm_where_the_epoch_before_was_left():
    """What the sampler had left over then is not there when the epoch is begun again."""
    steps = "begin 0; finish; begin 1; take 1; leave; begin 2"
    assert press("rolling", 2, steps, 37, "an alarm", f"{OURS}/_epochs", n=7) > 0


def test_an_alarm_as_another_epoch_begins_than_that_of_a_state():
    """Its batches draw the same numbers: it is no epoch behind that of the state."""
    steps = "note; begin 1; take 1; load 0; begin 1"
    assert press("dynamic", 0, steps, 5, "an alarm", f"{OURS}/_epochs") > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESSED)
@pytest.mark.parametrize("kind", QUICK)
def test_an_interrupt_at_each_place_of_next_beside_a_worker(name, kind):
    press(kind, 1, PRESSED[name], stride=607)


def test_an_order_of_a_generator_of_torchs_is_refused():
    """By a Loader: nothing puts it back. Of others that is in ``test_account``."""
    sampler = torch.utils.data.RandomSampler(range(9), generator=torch.Generator())
    with Loader(same, sampler, num_workers=0) as loader:
        list(loader)
        state = loader.state_dict()
    with (
        Loader(same, sampler, num_workers=0) as loader,
        pytest.raises(ValueError, match="draws its order from a generator"),
    ):
        loader.load_state_dict(state)

"""Ctrl-C, or another exception from outside, at each place of the package, in many loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from conftest import SLOW, WAYS, turns_given_back, variants
from helpers import Echo, Numbers
from kinds import (
    Apart,
    BeginsAnew,
    Counted,
    CountedIterator,
    Counting,
    Numbered,
    OwnIterator,
    Raising,
    Reusing,
    Separate,
    Told,
    ToldWithState,
)
from places import BEGINNINGS, Boom, Kind, TimeLimit, all_tried, once, twice

from minloader import BatchSampler, Loader


def fail(item: int) -> int:
    if item % 3 == 1:
        raise OSError(f"{item} is bad")
    return item


def sampled(sampler: Callable[[], Any], dataset: Any = None, **options: Any) -> Kind:
    return Kind(lambda **way: Loader(dataset or Echo(), sampler(), seed=0, **options, **way))


def streamed(stream: Callable[[], Any], **options: Any) -> Kind:
    return Kind(lambda **way: Loader(stream(), seed=0, **options, **way))


KINDS: dict[str, Kind] = {
    "a list": sampled(lambda: [3, 1, 4, 0, 5]),
    "samples that fail": sampled(lambda: [3, 1, 4, 0, 5], fail),
    "batches that are skipped": sampled(lambda: [3, 1, 4, 0, 5], fail, on_error="skip"),
    "as they get ready": replace(sampled(lambda: [3, 1, 4, 0, 5], in_order=False), in_order=False),
    "a plan of ours": sampled(lambda: BatchSampler(9, 2, shuffle=True, seed=1)),
    "a sampler within ours": sampled(lambda: BatchSampler(Told(5), 2)),
    "told": sampled(partial(Told, 4)),
    "counted": sampled(partial(Counted, 4)),
    "counted, an iterator": sampled(partial(CountedIterator, 4)),
    "told, with a state": sampled(partial(ToldWithState, 4)),
    "apart": sampled(partial(Apart, 4)),
    "begins anew": sampled(partial(BeginsAnew, [2, 0, 1])),
    "reuses a list": sampled(partial(Reusing, 7)),
    "raises": replace(sampled(partial(Raising, 4, [1, 3])), errors_again=True),
    "a stream": streamed(partial(Numbers, 5)),
    "a stream in batches": streamed(partial(Numbers, 7), batch_size=2, collate_fn=list),
    "a stream that counts": streamed(partial(Counting, 5)),
    "a stream that is told": streamed(partial(Numbered, 5)),
    "a stream, its own iterator": streamed(partial(OwnIterator, 5)),
    "a stream, its iterators apart": streamed(partial(Separate, 5)),
}

LOCAL = ["inline", "threads"]

PRESSED: dict[str, tuple[Callable[..., Any], type[BaseException], int, int]] = {
    "once": (once, KeyboardInterrupt, 601, 23),
    "twice": (twice, KeyboardInterrupt, 607, 31),
    "another": (once, Boom, 907, 41),
    "an alarm": (once, TimeLimit, 613, 43),
}
"""How: the places, what comes there, and how far apart they are, and are in the slow tests."""


QUICK = "a list", "a stream that counts"
"""Kinds that are tried with all beginnings, and in threads, also where slow tests are left out."""


def cases() -> Iterator[Any]:
    for kind, pressed, way, how in itertools.product(KINDS, PRESSED, LOCAL, BEGINNINGS):
        marks = []
        if kind not in QUICK and (way, how) != ("inline", "iter"):
            marks.append(SLOW)
        if (pressed, way) == ("another", "inline"):
            reason = "what comes just as the turn to make a batch is taken keeps it"
            marks.append(pytest.mark.xfail(reason=reason, strict=False))
        yield pytest.param(kind, pressed, way, how, marks=marks)


@variants("slow", [False, True])
@pytest.mark.parametrize(("kind", "pressed", "way", "how"), [*cases()])
def test_nothing_is_lost_wherever_it_comes(kind, pressed, way, how, slow):
    steps, raises, *strides = PRESSED[pressed]
    count, wrong = 0, []
    for trial in all_tried(KINDS[kind], WAYS[way], how, steps(strides[slow]), raises):
        count += 1
        if trial.wrong:
            wrong.append(trial)
        if turns_given_back():
            wrong.append(replace(trial, wrong="the turn to make batches was not given back"))
    assert count > 2, "it has hardly any places"
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:5]}"

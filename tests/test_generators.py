"""Generators that a dataset has of its own: told, seeded for each batch, put back."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import lists, printed_by, python, require, variants
from interrupts import each_place

from minloader import Loader, _formats, concurrent, get_worker_info
from minloader._worker.own_generators import LIMIT, WIDTH, find
from minloader.testing import IrreproducibleError, check_reproducible

pytestmark = pytest.mark.usefixtures("quick_starts")


def torch_generator() -> Any:
    return require("torch").Generator().manual_seed(5)


MAKERS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.random.default_rng(5),
    "numpy, MT19937": lambda: np.random.Generator(np.random.MT19937(5)),
    "numpy, legacy": lambda: np.random.RandomState(5),
    "numpy, legacy, of PCG64": lambda: np.random.RandomState(np.random.PCG64(5)),
    "random": lambda: random.Random(5),
    "torch": torch_generator,
}


def draw(generator: Any) -> float:
    if type(generator).__module__.startswith("torch"):
        return float(sys.modules["torch"].rand(1, generator=generator))
    # Two draws of a normal distribution: the second may have been kept from the first.
    return float(getattr(generator, "standard_normal", lambda: generator.gauss(0, 1))())


class Holder:
    """A dataset, or a transform, that draws from what it holds."""

    def __init__(self, held: Any = None, found: Callable[[Any], Any] | None = None) -> None:
        self.held = held
        self.found = found

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        return draw(self.held if self.found is None else self.found(self))

    def __call__(self, sample: Any) -> Any:
        return self[0]


class Slotted:
    __slots__ = ("generator", "nothing")

    def __init__(self, generator: Any) -> None:
        self.generator = generator


class OfClass(Holder):
    """As those of MONAI: they share one, unless they are given their own."""

    R: ClassVar[Any] = np.random.RandomState()

    def __getitem__(self, index: int) -> float:
        return draw(self.R)


class Composed(Holder):
    """As those of MONAI and albumentations: each transform has its own."""

    def __init__(self, *held: Any) -> None:
        self.transforms = list(held)
        self.py_random, self.random_generator = random.Random(1), np.random.default_rng(1)

    def __getitem__(self, index: int) -> float:
        return sum(transform(index) for transform in self.transforms)


def with_default(sample: Any, generator: Any = np.random.default_rng(5)) -> float:  # noqa: B008
    return draw(generator)


def closed_over() -> Callable[[Any], float]:
    generator = np.random.default_rng(5)
    return lambda sample: draw(generator)


GLOBAL: Any = np.random.default_rng(5)
SETTINGS = {"augment": Holder(np.random.default_rng(5))}


def by_global(sample: Any) -> float:
    return max(draw(each) for each in [GLOBAL])


def by_global_holder(sample: Any) -> float:
    return float(SETTINGS["augment"](sample))


class Wrapper:
    """Does not want to be asked."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("asked for its class")


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def first(holder: Any) -> Any:
    return holder.held[0]


PLACES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "dataset": (lambda: {"dataset": Holder(rng())}, "dataset.held"),
    "list": (lambda: {"dataset": Holder([rng()], first)}, "dataset.held[0]"),
    "tuple": (lambda: {"dataset": Holder((rng(),), first)}, "dataset.held[0]"),
    "dict": (lambda: {"dataset": Holder({0: rng()}, first)}, "dataset.held[0]"),
    "slots": (
        lambda: {"dataset": Holder(Slotted(rng()), lambda self: self.held.generator)},
        "dataset.held.generator",
    ),
    "class": (lambda: {"dataset": OfClass()}, "dataset.R"),
    "method": (
        lambda: {"dataset": Holder(rng().standard_normal, lambda self: self.held.__self__)},
        "dataset.held.__self__",
    ),
    "inside": (
        lambda: {"dataset": Holder(Holder(rng()), lambda self: self.held.held)},
        "dataset.held.held",
    ),
    "transform": (lambda: {"transform": Holder(rng())}, "transform.held"),
    "composed": (
        lambda: {"transform": Composed(Holder(1.0, lambda self: random), Holder(rng()))},
        "transform.transforms[1].held",
    ),
    "default": (lambda: {"transform": with_default}, "transform (default of 'generator')"),
    "closure": (lambda: {"transform": closed_over()}, "transform (closure variable 'generator')"),
    "partial": (lambda: {"transform": functools.partial(with_default, generator=rng())},
        "transform.keywords['generator']",
    ),
    "global": (lambda: {"transform": by_global}, "transform (global variable 'GLOBAL')"),
    "global's": (
        lambda: {"transform": by_global_holder},
        "transform (global variable 'SETTINGS')['augment'].held",
    ),
    "collate_fn": (lambda: {"collate_fn": Holder(rng())}, "collate_fn.held"),
}  # fmt: skip


def loader_of(options: dict[str, Any], **others: Any) -> Loader[Any]:
    if "collate_fn" in options:
        others["batch_size"] = 2
    return Loader(**({"dataset": range(24)} | options | others))


def state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False))
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state().tolist()


# --- seeded


@pytest.mark.parametrize("kind", MAKERS)
def test_each_kind_is_seeded_for_each_batch_and_put_back(kind):
    generator = MAKERS[kind]()
    draw(generator)  # a legacy one keeps the second number of a pair
    before = state_of(generator)
    drawn = []
    for num_workers in (0, 2, 0):
        options = {"num_workers": num_workers, "seed_generators": True, "mp_context": "fork"}
        with Loader(Holder(generator), range(12), **options) as loader:
            drawn.append(list(loader))
        assert state_of(generator) == before
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0])) == 12


@variants("num_workers", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_wherever_it_is(place, num_workers):
    make, _ = PLACES[place]
    with loader_of(make(), num_workers=num_workers, seed_generators=True) as loader:
        drawn = list(loader)
        assert len({*drawn}) == len(drawn)
        loader.set_epoch(0)
        loader.skip(5)
        assert list(loader) == drawn[5:]


def of_torch(dataset: Any, **options: Any) -> Any:
    torch = require("torch")
    torch.manual_seed(0)
    from minloader.torch import DataLoader

    return DataLoader(dataset, **({"batch_size": 2} | options))


@variants("method", ["forkserver", "spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_however_workers_start(method):
    drawn = []
    for num_workers in (0, 2):
        method_or_none = method if num_workers else None
        options = {"num_workers": num_workers, "seed_generators": True}
        ours = Loader(Holder(rng()), batch_size=2, mp_context=method, **options)
        options["multiprocessing_context"] = method_or_none
        with ours, of_torch(Holder(rng()), **options) as theirs:
            drawn.append([lists(ours), lists(theirs)])
    assert drawn[0] == drawn[1]


def seed_worker(worker_id: int) -> None:
    info: Any = sys.modules["torch"].utils.data.get_worker_info()
    info.dataset.held = np.random.default_rng(info.seed)


def test_one_that_worker_init_fn_has_made_is_seeded(caplog):
    torch = require("torch")

    class Empty(Holder, torch.utils.data.Dataset[float]):
        pass

    options = {"num_workers": 2, "worker_init_fn": seed_worker, "seed_generators": True}
    drawn = []
    for _ in range(2):
        with of_torch(Empty(), **options) as loader:
            drawn.append(lists(loader))
    assert drawn[0] == drawn[1]
    assert len({tuple(batch) for batch in drawn[0]}) == 12
    assert caplog.messages == []


def test_they_draw_other_numbers_than_each_other_and_than_other_ranks_epochs_and_seeds():
    class All(Holder):
        def __getitem__(self, index: int) -> Any:
            return [draw(self.held[0]), draw(self.held[1])]

    def drawn(rank: int, epoch: int, seed: int) -> list[Any]:
        sampler = Ranked(rank)
        options = {"num_workers": 0, "seed": seed, "seed_generators": True}
        with Loader(All([rng(), rng()]), sampler, **options) as loader:
            loader.set_epoch(epoch)
            return [number for batch in loader for number in batch]

    cases = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    numbers = [number for case in cases for number in drawn(*case)]
    assert len(set(numbers)) == len(numbers) == 4 * 2 * 6


class Ranked:
    def __init__(self, rank: int) -> None:
        self.rank, self.world_size = rank, 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_a_resumed_run_draws_the_same():
    options = {"num_workers": 1, "seed_generators": True}
    with Loader(Holder(rng()), range(8), **options) as loader:
        batches = iter(loader)
        begin = [next(batches) for _ in range(3)]
        state = loader.state_dict()
        rest = list(batches)
    with Loader(Holder(rng()), range(8), **options | {"num_workers": 0}) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest
        assert list(Loader(Holder(rng()), range(8), **options | {"num_workers": 0})) == begin + rest


class Stream:
    """Draws as it is read, from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[float]:
        for _ in range(6):
            yield self.rng.random()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_those_of_a_stream_are_seeded_where_it_is_read(num_workers):
    options = {"batch_size": 2, "num_workers": num_workers, "seed_generators": True}
    with Loader(Stream(), **options) as loader:
        batches = iter(loader)
        begin = [next(batches)]
        state = loader.state_dict()
        epochs = [lists([*begin, *batches]), lists(loader)]
    numbers = [number for epoch in epochs for batch in epoch for number in batch]
    assert len(set(numbers)) == len(numbers) == 12 * max(1, num_workers)
    with Loader(Stream(), **options) as loader:
        assert [lists(loader), lists(loader)] == epochs
        loader.load_state_dict(state)
        assert lists(loader) == epochs[0][1:]


class Lazy(Holder):
    def __getitem__(self, index: int) -> float:
        if self.held is None:
            self.held = np.random.default_rng()
        return draw(self.held)


def test_one_that_is_made_in_a_batch_is_seeded_from_the_next_on_and_told(caplog):
    drawn = []
    for num_workers in (0, 1):
        options = {"num_workers": num_workers, "seed_generators": True}
        with Loader(Lazy(), range(6), **options) as loader:
            drawn.append(list(loader))
    assert drawn[0][1:] == drawn[1][1:]
    assert drawn[0][0] != drawn[1][0]
    assert len(caplog.messages) == 2
    assert all(line.startswith("dataset.held is made in a batch") for line in caplog.messages)


def nearer(holder: Any) -> Any:
    holder.near = holder.held[0]
    return holder.near


def test_one_that_a_batch_gives_a_nearer_place_is_seeded_as_before(caplog):
    """As in a dataset that opens its files, or makes its transform, where it is read first."""
    drawn = []
    for num_workers in (0, 2):
        options = {"num_workers": num_workers, "seed_generators": True}
        with Loader(Holder([rng()], nearer), range(6), **options) as loader:
            drawn.append(list(loader))
    assert drawn[0] == drawn[1]
    assert caplog.messages == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_they_are_put_back_when_a_batch_fails(failure):
    class Failing(Holder):
        def __getitem__(self, index: int) -> float:
            number = super().__getitem__(index)
            if index == 1:
                raise failure
            return number

    dataset = Failing(rng())
    with Loader(dataset, range(3), num_workers=0, seed_generators=True) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(failure):
            next(batches)
        assert state_of(dataset.held) == state_of(rng())


def test_the_global_ones_are_put_back_beside_them():
    dataset = Holder([rng(), random], lambda self: draw_all(self.held))
    before = random.getstate()
    with Loader(dataset, range(3), num_workers=0, seed_generators=True) as loader:
        assert len(list(loader)) == 3
    assert random.getstate() == before


@variants("stride", [11, 1])
def test_an_interrupt_anywhere_puts_them_back(stride):
    dataset = Holder([rng(), random.Random(5)], lambda self: draw_all(self.held))
    before = [state_of(each) for each in dataset.held]
    for place, press in each_place(stride, least=100):
        with Loader(dataset, range(3), num_workers=0, seed_generators=True) as loader:
            batches = iter(loader)
            press(functools.partial(next, batches))
        assert [state_of(each) for each in dataset.held] == before, place


def test_a_batch_that_reads_a_loader_of_the_same_dataset_gets_its_generator_back():
    dataset = Holder(rng())
    inner = Loader(dataset, range(3), num_workers=0, seed_generators=True)

    class Outer:
        held = dataset

        def __getitem__(self, index: int) -> Any:
            return [draw(self.held.held), *list(inner), draw(self.held.held)]

    class Alone(Outer):
        def __getitem__(self, index: int) -> Any:
            return [draw(self.held.held), draw(self.held.held)]

    drawn = []
    for kind in (Outer, Alone):
        with Loader(kind(), range(2), num_workers=0, seed_generators=True) as loader:
            drawn.append([[batch[0], batch[-1]] for batch in loader])
    inner.close()
    assert drawn[0] == drawn[1]
    assert state_of(dataset.held) == state_of(rng())


# --- told


def told(caplog: Any) -> list[str]:
    return [line for line in caplog.messages if "to the workers: a generator of" in line]


BY_NAME = ("class", "default", "global", "global's")
"""Places in a module that each worker imports: no generator there is sent."""


@pytest.mark.parametrize("place", PLACES)
def test_one_that_is_sent_is_told_by_its_name(place, caplog):
    make, name = PLACES[place]
    with loader_of(make(), num_workers=1) as loader:
        assert list(loader.epochs(2))
    lines = told(caplog)
    assert len(lines) == (place not in BY_NAME)
    for line in lines:
        assert f"{name} (a Generator of numpy)" in line
        assert "seed_generators=True" in line


@pytest.mark.parametrize("kind", MAKERS)
def test_each_kind_is_told(kind, caplog):
    with Loader(Holder([MAKERS[kind](), MAKERS[kind]()], first), num_workers=1) as loader:
        next(iter(loader))
    (line,) = told(caplog)
    name = type(MAKERS[kind]()).__name__
    library = kind.partition(",")[0]
    assert line.startswith(
        f"dataset.held[0] (a {name} of {library}) and dataset.held[1] (a {name} of {library}) are"
    )


class Subclass(random.Random):
    pass


def test_one_of_a_class_that_derives_from_theirs_is_told(caplog):
    with Loader(Holder(Subclass(5)), num_workers=1) as loader:
        next(iter(loader))
    assert told(caplog)[0].startswith(f"dataset.held (a Subclass of {__name__}) is sent")


def test_it_is_told_once_for_all_loaders_workers_and_epochs(caplog):
    for count in (7, 2):
        dataset = Holder([rng() for _ in range(count)], lambda self: draw_all(self.held))
        with Loader(dataset, num_workers=2) as loader:
            list(loader.epochs(2))
            loader.num_workers = 1
            list(loader)
    (line,) = told(caplog)
    assert "dataset.held[4] (a Generator of numpy) and 2 more are sent" in line


def draw_all(generators: list[Any]) -> Any:
    for each in generators:
        draw(each)
    return generators[0]


def test_executors_are_told(caplog):
    with ProcessPoolExecutor(1, get_context("forkserver")) as executor:
        with Loader(Holder(rng()), executor=executor) as loader:
            list(loader)
        with Loader(Holder(rng()), executor=executor, seed_generators=True) as loader:
            seeded = list(loader)
    assert len(told(caplog)) == 1
    with Loader(Holder(rng()), num_workers=0, seed_generators=True) as loader:
        assert list(loader) == seeded


def test_that_of_torchs_loader_is_told_by_the_name_that_the_user_knows(caplog):
    torch = require("torch")

    class Numbers(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter(range(12))

    draws = Holder(torch_generator())
    for options, name in [
        ({"dataset": Holder(torch_generator())}, "dataset.held"),
        ({"dataset": range(24), "transform": draws}, "transform.held"),
        ({"dataset": range(24), "collate_fn": draws}, "collate_fn.held"),
        ({"dataset": range(9), "batch_size": None, "transform": abs, "collate_fn": draws},
         "collate_fn.held"),
        ({"dataset": Numbers(), "transform": draws}, "transform.held"),
    ]:  # fmt: skip
        caplog.clear()
        _formats.said.clear()
        options |= {"num_workers": 1, "multiprocessing_context": "forkserver"}
        with of_torch(**options) as loader:
            assert [*loader, *loader]
        (line,) = told(caplog)
        assert line.startswith(f"{name} (a Generator of torch) is sent")


def test_one_that_a_function_of_the_main_module_draws_from_is_told():
    """It is sent with the function. What is too far to be found has no name."""
    program = """
        import numpy as np
        from minloader import Loader

        RNG = np.random.default_rng(0)


        def augment(index):
            return index + RNG.random()


        class Numbers:
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return augment(index)


        for dataset in (augment, Numbers()):
            with Loader(dataset, range(4), num_workers=1) as loader:
                assert len(list(loader)) == 4
            from minloader._formats import said
            said.clear()
        """
    lines = python(program).stderr.splitlines()
    assert [line.partition(" is sent")[0] for line in lines] == [
        "dataset (global variable 'RNG') (a Generator of numpy)",
        "a Generator of numpy",
    ]


def draw_from_it(info: Any, generator: Any) -> None:
    draw(generator)


class DrawnInOrder:
    """A sampler, which stays here."""

    def __init__(self) -> None:
        self.rng = rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(6).tolist())


QUIET: dict[str, Callable[[], dict[str, Any]]] = {
    "without workers": lambda: {"dataset": Holder(rng()), "num_workers": 0},
    "threads": lambda: {"dataset": Holder(rng()), "executor": "thread"},
    "by fork": lambda: {"dataset": Holder(rng()), "mp_context": "fork"},
    "seeded": lambda: {"dataset": Holder(rng()), "seed_generators": True},
    "that of the batch": lambda: {"dataset": Holder(None, lambda self: get_worker_info().rng)},
    "the global ones": lambda: {
        "dataset": Holder(
            [random.gauss, np.random.standard_normal], lambda self: self.held[1].__self__
        )
    },
    "a stream's own": lambda: {"dataset": Stream()},
    "too deep in a stream": lambda: {"dataset": DeepStream([[0] * WIDTH, rng()])},
    "a sampler's": lambda: {"dataset": range(6), "sampler": DrawnInOrder()},
    "of worker_init_fn": lambda: {
        "dataset": range(6),
        "worker_init_fn": functools.partial(draw_from_it, generator=rng()),
    },
}


class DeepStream(Stream):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = [*range(WIDTH), held]


@pytest.mark.parametrize("case", QUIET)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_nothing_is_told_of_what_does_no_harm(case, caplog):
    with Loader(**{"num_workers": 1} | QUIET[case]()) as loader:
        assert list(loader)
    assert caplog.messages == []


def test_nothing_is_imported_to_look_for_them():
    program = """
        import sys
        from minloader import Loader

        def imported(item):
            return [name for name in ("numpy", "torch") if name in sys.modules]

        with Loader(imported, range(3), num_workers=1, seed_generators=True) as loader:
            print(*loader)
        """
    assert printed_by(program) == "[] [] []\n"


@pytest.mark.parametrize(
    ("options", "here"),
    [
        ({"num_workers": 0}, False),
        ({"num_workers": 1}, False),
        ({"num_workers": 1, "executor": "thread"}, False),
        ({"num_workers": 1, "mp_context": "fork"}, True),  # for the locks
        ({"num_workers": 1, "seed_generators": True}, True),
    ],
    ids=str,
)
def test_the_module_is_loaded_where_it_is_needed(options, here):
    program = f"""
        import sys
        from minloader import Loader

        def loaded(item):
            return "minloader._worker.own_generators" in sys.modules

        with Loader(loaded, range(3), **{options}) as loader:
            print(*loader, loaded(0))
        """
    there = here and (options.get("seed_generators") or options.get("mp_context") == "fork")
    assert printed_by(program) == f"{there} {there} {there} {here}\n"


class Reseeded(Holder):
    """Draws alike whoever makes the batch."""

    def __getitem__(self, index: int) -> float:
        self.held.seed(index)
        return super().__getitem__(index)

    def __call__(self, sample: Any) -> Any:
        return self[sample]


class ReseededOfClass(Reseeded):
    held = random.Random()

    def __init__(self) -> None:
        self.found = None


class MadeLate(Reseeded):
    def __getitem__(self, index: int) -> float:
        self.held = self.held or random.Random()
        return super().__getitem__(index)


class Once(Holder):
    """Draws an order when it is asked for a sample, the first or a later one."""

    late = 0

    def __getitem__(self, index: int) -> Any:
        if index == self.late:
            self.held.permutation(24)
        return index


class OnceLater(Once):
    late = 3


BATCHES: Any = {"workers": (0, 1), "batches": 8, "epochs": 1}


AUDITED: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "sent": (lambda: {"dataset": Reseeded(random.Random())}, ["dataset.held"]),
    "of a class": (lambda: {"dataset": ReseededOfClass()}, ["dataset.held"]),
    "by fork": (
        lambda: {"dataset": Reseeded(random.Random()), "mp_context": "fork"},
        ["dataset.held"],
    ),
    "threads": (
        lambda: {"dataset": Reseeded(random.Random()), "executor": "thread"},
        ["dataset.held"],
    ),
    "behind a stream": (
        lambda: {"dataset": Numbered(), "transform": Reseeded(random.Random())},
        ["transform.held"],
    ),
    "a stream's own": (lambda: {"dataset": Stream()}, []),
    "not drawn from": (lambda: {"dataset": Holder(rng(), lambda self: random)}, []),
    "made in a batch": (lambda: {"dataset": MadeLate()}, ["dataset.held"]),
    "drawn from once": (lambda: {"dataset": Once(rng())}, []),
    "drawn from once, later": (lambda: {"dataset": OnceLater(rng())}, []),
    "seeded": (lambda: {"dataset": Holder(rng()), "seed_generators": True}, []),
}


class Numbered(Stream):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


@pytest.mark.parametrize("case", AUDITED)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_audit_names_those_that_several_batches_draw_from(case):
    make, names = AUDITED[case]
    report = check_reproducible(lambda: Loader(**make(), num_workers=1), **BATCHES)
    assert report.generators == names
    for name in names:
        assert f"But {name} is drawn from in several batches: a generator" in str(report)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_audit_names_those_of_torchs_loader(num_workers):
    require("torch")

    def make() -> Any:
        return of_torch(Reseeded(random.Random()), num_workers=num_workers)

    assert check_reproducible(make, **BATCHES).generators == ["dataset.held"]


def test_the_audit_names_them_where_a_batch_differs(caplog):
    def make() -> Loader[Any]:
        return Loader(Holder(rng()), num_workers=1, mp_context="fork")

    with pytest.raises(IrreproducibleError, match=r"\ndataset\.held is drawn from in several"):
        check_reproducible(make, **BATCHES)


def test_the_audit_says_if_it_could_not_look(caplog):
    """As for a dataset that asks, in a worker, which it is."""

    def only_there(index: int) -> int:
        info: Any = get_worker_info()
        return index // info.num_workers

    options = {"num_workers": 1, "executor": "thread"}
    report = check_reproducible(
        lambda: Loader(only_there, range(4), **options), **BATCHES | {"workers": (1,)}
    )
    assert report.generators == []
    assert "may not all be named: ZeroDivisionError" in caplog.text


# --- how they are looked for


def test_the_look_has_bounds_and_survives_what_changes():
    deep: Any = rng()
    for _ in range(50):
        deep = [deep]
    cyclic: list[Any] = [deep]
    cyclic.append(cyclic)
    assert len(find({"dataset": cyclic})) == 1
    assert find({"dataset": [0] * WIDTH + [rng()]}) == {}
    wide = [[[[n] for n in range(4)] for _ in range(WIDTH)] for _ in range(WIDTH)]
    assert find({"dataset": [wide, [rng()]]}) != {}  # the nearest come first
    assert WIDTH**2 * 4 > LIMIT
    assert find({"dataset": [wide, [[[[rng()]]]]]}) == {}
    assert find({"dataset": [Holder(random), random.SystemRandom()]}) == {}
    assert [*find({"dataset": Wrapper(Wrapper(rng()))})] == ["dataset.inner.inner"]
    shared = rng()
    assert [*find({"dataset": [shared, shared], "transform": shared})] == ["transform"]


def test_those_of_classes_are_found_behind_one_that_hides_them():
    hides = OfClass()
    vars(hides)["R"] = np.random.RandomState(0)
    found = find({"dataset": Holder([hides, OfClass()])})
    assert [*found] == ["dataset.held[0].R", "dataset.held[1].R"]


# --- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "thread"}, "threads share"),
        ({"dataset": concurrent(range(3))}, r"reads of concurrent\(\) share"),
        ({"seed_generators": "no"}, "must be True or False"),
    ],
)
def test_what_cannot_be_seeded_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Loader(**({"dataset": range(3), "seed_generators": True} | options))


def test_threads_of_a_foreign_executor_are_refused(monkeypatch):
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(ValueError, match="threads share"):
            Loader(range(3), executor=executor, seed_generators=True)
        # One of which it is not known that its workers are threads here, as Dask's may be.
        for module in ("_foreign.pool", "_worker.own_generators"):
            monkeypatch.setattr(f"minloader.{module}.ThreadPoolExecutor", ProcessPoolExecutor)
        with (
            Loader(range(3), executor=executor, seed_generators=True) as loader,
            pytest.raises(ValueError, match="threads make the batches"),
        ):
            next(iter(loader))

"""What workers log and warn comes out in the calling process, as if it had happened there."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import socket
import sys
import threading
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_all_start_methods, get_context
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually, printed_by, python, variants

from minloader import Loader
from minloader._worker.long_start import ImportClock

pytestmark = pytest.mark.usefixtures("quick_starts")

logger = logging.getLogger("tests.dataset")

SPAWN = get_context("spawn")
"""For a worker whose standard error is that of the test: a fork server has its own."""


class Unpicklable(UserWarning):
    def __reduce__(self) -> Any:
        raise TypeError


class Talkative:
    """Says what the item tells it to."""

    def __setstate__(self, state: Any) -> None:
        logger.info("loading")

    def __getstate__(self) -> dict[str, Any]:
        return {"something": 1}

    def __getitem__(self, item: Any) -> None:
        kind, *values = item
        if kind == "fork":
            child = os.fork()
            if child == 0:
                logger.error("in a fork")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        elif kind == "thread":
            names = [f"thread {n}" for n in range(4)]
            threads = [threading.Thread(target=self._log_many, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        elif kind == "error":
            try:
                raise KeyError("no such thing")
            except KeyError:
                logger.exception(*values)
        elif kind == "gate":
            while not os.path.exists(*values):
                threading.Event().wait(0.01)
        elif kind == "lock":
            logger.info(*values, extra={"lock": threading.Lock()})
        elif kind == "unpicklable":
            warnings.warn(Unpicklable(*values), stacklevel=1)
        elif kind == "warn":
            warnings.warn(*values, stacklevel=1)
        else:
            getattr(logger, kind)(*values[:-1], extra=values[-1])

    def _log_many(self, name: str) -> None:
        for n in range(100):
            logger.info("%s: %d", name, n)


@pytest.fixture
def talk(caplog):
    """Has workers say something, and returns the records that come of it."""

    def talk(*items: Any, level: int = logging.INFO, **options: Any) -> list[Any]:
        caplog.clear()
        with (
            caplog.at_level(level, "tests"),
            Loader(Talkative(), items, **({"num_workers": 1} | options)) as loader,
        ):
            list(loader)
        records = [each for each in caplog.records if each.name == logger.name]
        assert os.getpid() not in {each.process for each in records}
        return records

    return talk


def test_records_come_whole(talk):
    records = talk(("info", "%s of %d", "one", 2, {"speaker": 3}), ("error", "sorry"))
    loading, first, second = records
    assert loading.getMessage() == "loading"
    assert (first.getMessage(), first.levelname, first.speaker) == ("one of 2", "INFO", 3)
    assert (first.pathname, first.funcName) == (__file__, "__getitem__")
    assert first.processName != "MainProcess"
    assert "KeyError: 'no such thing'" in second.exc_text


def test_levels_are_those_of_the_calling_process(talk):
    items = [("debug", "fine", {}), ("info", "some", {}), ("error", "bad")]
    assert [each.levelname for each in talk(*items, level=logging.ERROR)] == ["ERROR"]
    names = [each.levelname for each in talk(*items, level=logging.DEBUG)]
    assert names[-4:] == ["INFO", "DEBUG", "INFO", "ERROR"]


def test_a_level_that_is_raised_later_holds_too(caplog, tmp_path):
    gate = tmp_path / "gate"
    items = [("info", "before", {}), ("gate", str(gate)), ("info", "after", {}), ("error", "last")]
    with (
        caplog.at_level(logging.INFO, logger.name),
        Loader(Talkative(), items, num_workers=1) as loader,
    ):
        batches = iter(loader)
        next(batches)
        assert eventually(lambda: "before" in caplog.text)
        logger.setLevel(logging.ERROR)
        gate.touch()
        list(batches)
    assert "last" in caplog.text
    assert "after" not in caplog.text


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("method", get_all_start_methods())
def test_what_is_said_once_is_said_once_by_whoever_says_it_first(method, num_workers, caplog):
    """Of all workers, loaders and epochs of a program. Other lines come as often as they are."""
    for _ in range(2):
        with Loader(repeat, range(4), num_workers=num_workers, mp_context=method) as loader:
            list(loader.epochs(2))
    said = Counter(caplog.messages)
    assert (said["again"], said["this; said once"]) == (16, 1)


def repeat(item: int) -> None:
    logging.getLogger("minloader").warning("%s; said once", "this")
    logging.getLogger("minloader").warning("again")


OWN_LOGGER = """
import logging
class Own(logging.Logger):
    def trace(self, text):
        self.debug("traced %s", text)
        return text
logging.setLoggerClass(Own)
log = logging.getLogger("own_logger")
logging.setLoggerClass(logging.Logger)
def trace(item):
    return log.trace(item)
"""


@variants("method", ["spawn", "forkserver", "fork"])
def test_a_library_with_a_logger_class_of_its_own(method, tmp_path):
    """As astropy and absl have them: a worker makes no logger of that name before."""
    (tmp_path / "own_logger.py").write_text(OWN_LOGGER)
    program = f"""
import logging
from minloader import Loader
import own_logger
logging.basicConfig(level="WARNING", format="%(message)s", stream=__import__("sys").stdout)
own_logger.log.setLevel("DEBUG")
with Loader(own_logger.trace, range(2), mp_context={method!r}) as loader:
    batches = list(loader)
print(batches)
"""
    told = printed_by(program, cwd=tmp_path, options=["-W", "ignore"])
    assert told == "traced 0\ntraced 1\n[0, 1]\n"


QUIET_LIBRARY = """
import logging
log = logging.getLogger(__name__)
log.setLevel("ERROR")
def read(item):
    log.warning("read %d", item)
"""


@pytest.mark.parametrize("level", [logging.INFO, logging.NOTSET])
def test_the_scripts_level_holds_where_a_library_sets_another(level, tmp_path, monkeypatch, caplog):
    """It does so when a worker imports it, which is after the worker has the script's levels."""
    (tmp_path / "quiet_library.py").write_text(QUIET_LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    read = importlib.import_module("quiet_library").read
    with (
        caplog.at_level(level, "quiet_library"),
        Loader(read, range(1), num_workers=1) as loader,
    ):
        list(loader)
    assert caplog.messages == ["read 0"]


@contextmanager
def handled(handle: Callable[[logging.LogRecord], Any], to: logging.Logger) -> Iterator[None]:
    """Has a function called with each record of a logger."""
    handler = logging.Handler()
    handler.emit = handle  # type: ignore[method-assign]
    to.addHandler(handler)
    try:
        yield
    finally:
        to.removeHandler(handler)


def test_a_handler_may_close_the_loader(caplog):
    """It runs in the thread that hands on what workers log, which closing waits for."""
    closed = threading.Event()

    def close(record: logging.LogRecord) -> None:
        loader.close()
        closed.set()

    with (
        handled(close, logger),
        caplog.at_level(logging.INFO, logger.name),
        Loader(Talkative(), [], num_workers=1) as loader,
    ):
        loader.start()
        assert closed.wait(60)
    assert "could not be shown" not in caplog.text


def test_long_messages_of_several_workers_and_threads(talk):
    text = "x" * 500_000
    talks = [("info", f"{n} {text}", {}) for n in range(8)] + [("thread",)] * 4
    messages = [each.getMessage() for each in talk(*talks, num_workers=4)]
    assert sorted(filter(lambda each: text in each, messages)) == [f"{n} {text}" for n in range(8)]
    assert sum(each.startswith("thread") for each in messages) == 4 * 4 * 100


def test_what_cannot_be_sent_is_left_out_of_a_record(talk):
    (_, record) = talk(("lock", "here"))
    assert record.getMessage() == "here"
    assert not hasattr(record, "lock")


def test_arguments_that_do_not_fit_are_no_error_of_the_batch(talk, capfd):
    """As everywhere: logging says so, and the program goes on."""
    records = talk(("info", "%d", "one", {}), ("info", "next", {}), mp_context=SPAWN)
    assert [each.getMessage() for each in records] == ["loading", "next"]
    assert "--- Logging error ---" in capfd.readouterr().err


def test_filters_of_the_calling_process_hold(talk):
    def caught(*items: Any, **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as got:
            warnings.simplefilter(**options)
            talk(*items)
        return [f"{each.category.__name__}: {each.message}" for each in got]

    items = [("warn", "first"), ("warn", "first"), ("warn", "second", RuntimeWarning)]
    assert caught(*items, action="default") == ["UserWarning: first", "RuntimeWarning: second"]
    assert len(caught(*items, action="always")) == 3
    assert caught(*items, action="ignore") == []
    assert caught(("unpicklable", "rare"), action="always") == ["UserWarning: Unpicklable: rare"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_warning_may_be_an_error(talk):
    with pytest.raises(RuntimeWarning, match="second"):
        talk(("warn", "second", RuntimeWarning))


def test_several_workers_warn_once():
    code = """
    import logging, queue, warnings
    from logging.handlers import QueueHandler
    from minloader import Loader

    def begin(info):
        warnings.warn("the same", DeprecationWarning)
        logging.warning("worker %d has warned", info.id)

    lines = queue.Queue()
    logging.getLogger().addHandler(QueueHandler(lines))
    with Loader(abs, range(8), num_workers=2, worker_init_fn=begin) as loader:
        loader.start()
        print(sorted(lines.get(timeout=60).getMessage() for _ in range(2)))
    """
    done = python(code)
    assert done.stdout == "['worker 0 has warned', 'worker 1 has warned']\n"
    assert done.stderr.count("DeprecationWarning: the same") == 1, done.stderr


def test_what_a_fork_of_a_worker_logs_comes_too(talk, capfd):
    loading, forked = talk(("fork",), mp_context=SPAWN)
    assert forked.getMessage() == "in a fork"
    assert forked.process != loading.process
    assert capfd.readouterr().err == ""


def test_nothing_is_lost_when_the_program_ends():
    """Also of a worker that logs more than a socket holds, and then dies."""
    code = """
    import logging, os, threading
    from minloader import Loader

    class Dataset:
        def __getitem__(self, index):
            for n in range(3000):
                logging.getLogger("data").warning("line %d of %d", n, index)
            if index == 1:
                os._exit(1)
            return index

    class Handler(logging.Handler):
        lines = []
        def emit(self, record):
            if record.getMessage() == "line 2999 of 2":
                threading.Event().wait(0.3)  # it is slow, and closing waits for it
            self.lines.append(record.getMessage())

    logging.getLogger("data").addHandler(Handler())
    logging.getLogger("data").propagate = False
    logging.getLogger("minloader").disabled = True
    loader = Loader(Dataset(), range(3), num_workers=1, retries=0, on_error="skip")
    assert list(loader) == [0, 2]
    import atexit
    loader.close()
    print(len(Handler.lines), Handler.lines[-1])
    """
    done = python(code)
    assert (done.stdout, done.returncode) == ("9000 line 2999 of 2\n", 0), done.stderr


def test_a_filter_that_raises_harms_nobody(caplog, monkeypatch):
    def refuse(record: logging.LogRecord) -> bool:
        raise RuntimeError("not this one")

    monkeypatch.setattr(logger, "filters", [refuse])
    items = [("error", "oh")] * 3
    with Loader(Talkative(), items, num_workers=1) as loader:
        assert len(list(loader)) == 3
    assert "what a worker logged could not be shown" in caplog.text


def test_a_handler_that_refuses_all_keeps_the_rest_coming(capfd):
    """Also the entry that says so: it gets to the same handler."""
    names: list[str] = []

    def refuse(record: logging.LogRecord) -> None:
        names.append(record.name)
        raise RuntimeError("not this one")

    items = [("error", "oh")] * 3
    with (
        handled(refuse, logging.getLogger()),
        Loader(Talkative(), items, num_workers=1) as loader,
    ):
        assert len(list(loader)) == 3
    assert names.count(logger.name) == 3
    assert "RuntimeError: not this one" in capfd.readouterr().err


def say(item: int) -> int:
    logger.warning("item %d", item)
    return item


class Cancelled(socket.socket):
    """As gevent's: to shut it down ends a wait with an error."""

    is_shut = False

    def shutdown(self, how: int) -> None:
        self.is_shut = True
        super().shutdown(how)

    def recv(self, *args: Any) -> bytes:
        packet = super().recv(*args)
        if self.is_shut and not packet:
            self.is_shut = False
            raise OSError(errno.EBADF, "File descriptor was closed in another greenlet")
        return packet


def test_a_socket_whose_wait_is_cancelled(monkeypatch, capfd, caplog):
    make = socket.socketpair

    def pair(*args: Any) -> tuple[socket.socket, socket.socket]:
        reader, sender = make(*args)
        return Cancelled(fileno=reader.detach()), sender

    monkeypatch.setattr(socket, "socketpair", pair)
    with Loader(say, range(4), num_workers=2) as loader:
        assert list(loader) == [0, 1, 2, 3]
    assert sorted(caplog.messages) == ["item 0", "item 1", "item 2", "item 3"]
    assert capfd.readouterr() == ("", "")


def test_a_timeout_that_is_set_for_all_sockets(caplog):
    former = socket.getdefaulttimeout()
    socket.setdefaulttimeout(1e-3)
    try:
        with Loader(say, range(4), num_workers=2) as loader:
            assert list(loader) == [0, 1, 2, 3]
    finally:
        socket.setdefaulttimeout(former)
    assert sorted(caplog.messages) == ["item 0", "item 1", "item 2", "item 3"]


def test_a_root_logger_that_takes_everything(caplog):
    with caplog.at_level(logging.NOTSET):
        assert logging.getLogger().level == logging.NOTSET
        with Loader(Talkative(), [("debug", "here", {})], num_workers=1) as loader:
            list(loader)
    assert (logger.name, logging.DEBUG, "here") in caplog.record_tuples


def set_up_logging(info: Any = None) -> None:
    logging.basicConfig(format="worker %(name)s %(message)s", level="DEBUG")


class SetsUpLogging(Talkative):
    def __setstate__(self, state: Any) -> None:
        set_up_logging()


@pytest.mark.parametrize(
    ("dataset", "init"), [(Talkative(), set_up_logging), (SetsUpLogging(), None)]
)
def test_logging_that_is_set_up_in_the_worker(dataset, init, capfd, caplog):
    items, options = [("debug", "here", {})], {"num_workers": 1, "mp_context": SPAWN}
    with Loader(dataset, items, worker_init_fn=init, **options) as loader:
        list(loader)
    assert capfd.readouterr().err == "worker tests.dataset here\n"
    assert logger.name not in caplog.text


@pytest.mark.parametrize(
    ("source", "n", "what"),
    [
        ("import time; time.sleep(0.5)", 0, r"imports \(hefty\), and \d.*forkserver.*'fork' not"),
        (
            "",
            1_000_000,
            r"imports \(hefty_list\), and \d.* unpickle it; keep long lists.*SharedList",
        ),
    ],
)
def test_a_long_start_is_explained(source, n, what, tmp_path):
    """For the doctor, once, whatever the number of workers. Here it is short."""
    name = "hefty" if source else "hefty_list"
    (tmp_path / f"{name}.py").write_text(source)
    program = f"""
    import sys
    from minloader import Loader, get_worker_info
    from minloader._diagnosis.inspect import inspect
    from minloader._worker.long_start import LongStart
    sys.path.insert(0, {str(tmp_path)!r})

    def load():
        from minloader._worker import long_start
        long_start.LONG_START = 0.0
        import {name}

    class Imports:
        def __reduce__(self):
            return load, ()

    dataset, answered = [Imports(), *map(str, range({n})), 0], set()
    worker = lambda sample: get_worker_info().id
    with Loader(dataset, [-1, -1], num_workers=2, transform=worker) as loader:
        inspect(loader).group.plugins.append(LongStart())
        while len(answered) < 2:  # one may have made all batches before the other was ready
            answered.update(loader)
    """
    done = python(program)
    (said,) = done.stderr.splitlines()
    assert re.match(r"a worker took \d+\.\d s to load the dataset, as each one does: \d", said)
    assert re.search(what, said), said


def test_imports_from_an_archive_are_left_alone(tmp_path):
    """One loader loads all modules of an archive: what is changed for one stays for the next."""
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for n in range(3):
            archive.writestr(f"archived_{n}.py", "")
    program = """
import sys
from importlib import import_module
from minloader._worker.long_start import ImportClock
sys.path.insert(0, "archive.zip")
with ImportClock() as clock:
    modules = [import_module(f"archived_{n}") for n in range(3)]
print(clock.seconds, ["exec_module" in vars(each.__loader__) for each in modules])
"""
    assert printed_by(program, cwd=tmp_path) == "0.0 [False, False, False]\n"


@pytest.mark.filterwarnings("ignore::ImportWarning")  # of CPython 3.11
def test_a_finder_without_find_spec_is_passed_over(monkeypatch):
    """As Python does."""
    old = SimpleNamespace(find_module=lambda name, path: None)
    monkeypatch.setattr(sys, "meta_path", [old, *sys.meta_path])
    with ImportClock(), pytest.raises(ModuleNotFoundError, match="this_or_that"):
        importlib.import_module("this_or_that")


def test_a_forked_worker_has_not_the_handlers_of_its_parent(caplog, capfd):
    items = [("info", "here", {})]
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        with (
            caplog.at_level(logging.INFO),
            Loader(Talkative(), items, num_workers=1, mp_context="fork") as loader,
        ):
            list(loader)
    finally:
        logger.removeHandler(handler)
    records = [each for each in caplog.records if each.name == logger.name]
    assert [each.getMessage() for each in records] == ["here"]
    assert capfd.readouterr().err == "here\n"  # by the parent, once


def test_a_fork_waits_until_a_record_is_shown():
    """It would copy the locks of a handler that is at work, and nobody would release them."""
    code = """
    import logging, os, threading
    from minloader import Loader

    def item(index):
        logging.getLogger("data").warning("here")

    class Slow(logging.Handler):
        file, inside, forked = threading.Lock(), threading.Event(), threading.Event()
        def emit(self, record):
            with self.file:
                self.inside.set()
                self.forked.wait(0.2)

    logging.getLogger("data").addHandler(Slow())
    with Loader(item, range(1), num_workers=1) as loader:
        batches = iter(loader)
        Slow.inside.wait()
        child = os.fork()
        if child == 0:
            os._exit(not Slow.file.acquire(blocking=False))
        Slow.forked.set()
        print(os.waitpid(child, 0)[1])
    """
    done = python(code)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


class Aside:
    def __getitem__(self, item: int) -> None:
        logging.getLogger("tests.aside").warning("from %d", os.getpid())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_logger_that_does_not_propagate(method, monkeypatch):
    """In a fork it is one there, too, without its handlers: they are the parent's."""
    records: list[str] = []
    aside = logging.getLogger("tests.aside")
    monkeypatch.setattr(aside, "propagate", False)
    with (
        handled(lambda record: records.append(record.getMessage()), aside),
        Loader(Aside(), range(1), num_workers=1, mp_context=method) as loader,
    ):
        list(loader)
        assert eventually(lambda: records)
    assert len(records) == 1
    assert records != [f"from {os.getpid()}"]

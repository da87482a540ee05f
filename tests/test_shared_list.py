"""A list that workers share behaves as the list did, and takes its memory once."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import printed_by, require
from helpers import SHARED
from hypothesis import given
from hypothesis import strategies as st

from minloader import Loader, SharedList

pytestmark = pytest.mark.usefixtures("quick_starts")

RECORDS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=5,
)
VALUES = st.lists(st.text(st.characters()) | st.binary() | RECORDS, max_size=12)


@given(VALUES, st.slices(14))
def test_it_behaves_as_the_list_did(values, part):
    shared = SharedList(iter(values))
    assert (len(shared), list(shared)) == (len(values), values)
    assert shared == values
    assert shared[part] == values[part]
    assert shared[1:][part] == values[1:][part]
    assert list(reversed(shared)) == values[::-1]
    assert pickle.loads(pickle.dumps(shared[part])) == values[part]
    for index, value in enumerate(values):
        assert shared[np.int32(index)] == shared[index - len(values)] == value
        assert value in shared
    assert shared != [*values, 1]
    assert shared != "values"
    for index in (len(values), -len(values) - 1):
        with pytest.raises(IndexError, match="list index out of range"):
            shared[index]


def test_names_of_files_that_are_no_unicode():
    name = os.fsdecode(b"/data/\xff.wav")
    assert SharedList([name])[0] == name


def test_strings_of_numpy():
    shared = SharedList(np.array(["one", "two"]))
    assert shared == ["one", "two"]
    assert type(shared[0]) is str


def test_types_are_kept():
    class Text(str):
        __slots__ = ()

    values = [1, True, 1.5, (1, 2), {3}, np.float32(2), "1", b"1", None, bytearray(b"x")]
    assert [type(each) for each in SharedList(values)] == [type(each) for each in values]
    with pytest.raises(TypeError, match=r"values\[1\] cannot be pickled: .*Text"):
        SharedList(["", Text("of a local class")])


def test_what_is_shown_of_it():
    assert repr(SharedList([])) == "SharedList([], 0 values)"
    assert repr(SharedList(["a", None])) == "SharedList(['a', None], 2 values)"
    assert repr(SharedList(range(9))) == "SharedList([0, 1, 2, ...], 9 values)"


def test_mistakes():
    for values in "abc", b"abc", 3, None:
        with pytest.raises(TypeError, match=f"values must be a list of values, got {values!r}"):
            SharedList(values)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="indices must be integers or slices"):
        SharedList([])["a"]  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unhashable"):
        hash(SharedList([]))
    with pytest.raises(TypeError, match="does not support item assignment"):
        SharedList([1])[0] = 2  # type: ignore[index]


def test_a_slice_takes_no_memory_and_is_sent_alone():
    shared = SharedList(f"{n:0100}" for n in range(10_000))
    assert len(pickle.dumps(shared)) > 1_000_000
    assert len(pickle.dumps(shared[5000:5010])) < 2000


class Names:
    """Tells, with each name, how much memory this process has to itself."""

    def __init__(self, names: Any) -> None:
        self.names = names

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.names[index], psutil.Process().memory_full_info().uss


def test_workers_share_it():
    names = [f"{n:03000}" for n in range(40_000)]  # 120 MB
    with Loader(Names(SharedList(names)), range(0, 40_000, 4_000), num_workers=2) as loader:
        got = list(loader)
    assert [name for name, _ in got] == names[::4_000]
    assert max(memory for _, memory in got) < 80e6


RECORDS_OF_THE_SCRIPT = """
import dataclasses, enum
from minloader import Loader, SharedList

class Kind(enum.Enum):
    ONE = 1

@dataclasses.dataclass
class Record:
    text: str
    kind: Kind = Kind.ONE

records = SharedList([Record(f"{n}") for n in range(1000)] + ["main__"])
assert len(records._data) < 100_000  # the class is not in each of them
with Loader(records[::2], [1, 2], num_workers=1) as loader:
    assert list(loader) == [Record("2"), Record("4")]
with Loader(records[3:], [0, 1], num_workers=2, transform=lambda each: each) as loader:
    assert list(loader) == [Record("3"), Record("4")]
    assert type(next(iter(loader))) is Record
"""


@pytest.mark.slow
def test_records_of_a_class_of_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RECORDS_OF_THE_SCRIPT)
    assert printed_by(script) == ""


class Frame:
    """Gives a row of a frame, and says whether its numbers lie in the loader's file."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def __getitem__(self, row: int) -> tuple[Any, bool]:
        address = self.frame["number"].to_numpy(allow_copy=False).ctypes.data
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            if start <= address < end:
                return self.frame.row(row), bool(SHARED.search(line))
        raise AssertionError("not in the memory of this process")


def test_frames_of_polars_are_shared():
    polars = require("polars")
    require("pyarrow")
    frame = polars.DataFrame(
        {
            "number": np.arange(100_000.0),
            "word": polars.Series(["a", "b"] * 50_000, dtype=polars.Categorical),
            "text": [f"a text that is long enough {n}" for n in range(100_000)],
        }
    )
    with Loader(Frame(frame), [0, 99_999], num_workers=1) as loader:
        assert list(loader) == [(frame.row(0), True), (frame.row(99_999), True)]


def test_frames_that_arrow_would_change_come_as_they_are():
    polars = require("polars")
    require("pyarrow")
    wide = polars.DataFrame({"wide": polars.Series([1], dtype=polars.Int128)})
    with Loader(lambda item: wide, range(1), num_workers=1) as loader:
        (back,) = loader
    assert back.schema == wide.schema
    assert back.equals(wide)
    objects = polars.DataFrame({"set": polars.Series([{1}], dtype=polars.Object)})
    # To Arrow these are their addresses.
    with pytest.raises(TypeError, match="data of type Object is not supported"):
        Loader(lambda item: objects.height, range(1), num_workers=1)

"""A list whose values lie in two arrays, which worker processes map rather than copy.

A list of a million strings is a million objects. Each worker would have all of them to itself, and
would need a second to make them. Two arrays it maps at once, and it makes a value when asked for
it. The layout, one entry for each value::

    data:  | pickle | pickle | pickle | ...
    ends:  0        21       40       59

Classes of the main module are in the pickles by their names. They are kept beside the arrays, so
that they go to the workers with them.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from minloader._errors import breaks_in
from minloader._formats import brief_repr
from minloader._memory.pickling import Pickler


class SharedList(Sequence[Any]):
    """A list of many strings, bytes or small records that all workers share.

    It is used as the list was: index, slice, ``len``, iteration, ``in``, ``==``. It cannot be
    changed. A value is made anew each time it is asked for, in the process that asks.

    Args:
        values: strings (also numpy's), bytes, numbers, or records, such as dicts of a few fields.
            They are read once, and not kept.

    Raises:
        TypeError: a value cannot be pickled; ``values`` is a single string, or not iterable.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        import numpy as np

        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(f"values must be a list of values, got {brief_repr(values)}")
        data = bytearray()
        ends = array("q", [0])
        self._main_globals: dict[str, Any] = {}
        for number, value in enumerate(values):
            try:
                data += self._encode(value)
            except Exception as error:
                if breaks_in(error):
                    raise
                raise TypeError(f"values[{number}] cannot be pickled: {error}") from error
            ends.append(len(data))
        self._data = np.frombuffer(data, np.uint8)
        self._ends = np.frombuffer(ends, np.int64)
        self._first = 0  # where the first entry begins; the data of a slice begins there

    def _encode(self, value: Any) -> bytes:
        if type(value).__name__ == "str_":  # numpy's
            value = str(value)
        entry = pickle.dumps(value, 5)
        if b"main__" in entry:
            stream = io.BytesIO()
            pickler = Pickler(stream, down=False)
            pickler.dump(value)
            self._main_globals |= pickler.main_globals
            entry = stream.getvalue()
        return entry

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> SharedList: ...

    def __getitem__(self, index: int | slice) -> Any:
        try:
            place = range(len(self))[index]
        except IndexError:
            raise IndexError("list index out of range") from None
        if isinstance(place, range):
            return self._part(place)
        start, stop = self._ends[place : place + 2].tolist()
        first = self._first
        return pickle.loads(self._data[start - first : stop - first].data)

    def _part(self, places: range) -> SharedList:
        if places.step != 1:
            return SharedList(self[place] for place in places)
        part = object.__new__(SharedList)
        part._main_globals = self._main_globals
        part._ends = self._ends[places.start : places.start + len(places) + 1]
        part._first, stop = part._ends[[0, -1]].tolist()
        part._data = self._data[part._first - self._first : stop - self._first]
        return part

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (SharedList, list)):
            return NotImplemented
        return len(self) == len(other) and all(
            mine == theirs for mine, theirs in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        first = ", ".join(repr(value) for value in self[:3])
        return f"SharedList([{first}{', ...' if len(self) > 3 else ''}], {len(self)} values)"

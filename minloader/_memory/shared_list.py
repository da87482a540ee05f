"""A list whose values lie in two arrays, which worker processes map rather than copy.

A list of a million strings is a million objects. Each worker would have all of them to itself, and
would need a second to make them. Two arrays it maps at once, and it makes a value when asked for
it. The layout, one entry for each value::

    data:  | s | h e l l o | b | \\x00 \\x01 | - | r | pickle or JSON | ...
    ends:    0             6               9   10                  ...

An entry begins with a letter for the type of its value: str, bytes, None or a record.
"""

from __future__ import annotations

import json
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

_RECORDS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "pickle": (lambda value: pickle.dumps(value, 5), pickle.loads),
    "json": (lambda value: json.dumps(value, separators=(",", ":")).encode(), json.loads),
}


class SharedList(Sequence[Any]):
    """A list of many strings, bytes or small records that all workers share.

    It is used as the list was: index, slice, ``len``, iteration, ``in``, ``==``. It cannot be
    changed. A value is made anew each time it is asked for, in the process that asks.

    Args:
        values: strings (also numpy's), bytes, None, or records: anything else, as dicts of a few
            fields. They are read once, and not kept.
        records: how records are kept: by "pickle", or by "json", which has no tuples, sets or
            keys that are not strings, but needs nothing of your code to be read.

    Raises:
        TypeError: a record cannot be pickled, or written as JSON; ``values`` is a single string.
    """

    def __init__(self, values: Iterable[Any], *, records: str = "pickle") -> None:
        import numpy as np

        if records not in _RECORDS:
            raise ValueError(f"records must be 'pickle' or 'json', not {records!r}")
        if isinstance(values, (str, bytes)):
            raise TypeError(f"values must be a list of values, not one {type(values).__name__}")
        data, ends = bytearray(), array("q", [0])
        for number, value in enumerate(values):
            try:
                data += _encode(value, records)
            except Exception as error:
                raise TypeError(f"values[{number}] cannot be kept by {records}: {error}") from error
            ends.append(len(data))
        self._records = records
        self._data = np.frombuffer(data, np.uint8)
        self._ends = np.frombuffer(ends, np.int64)
        self._first = 0  # where the first entry begins; the data of a slice begins there

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> SharedList: ...

    def __getitem__(self, index: int | slice) -> Any:
        try:
            place = range(len(self))[index]
        except (IndexError, TypeError) as error:
            text = (
                str(error).replace("range object", "list").replace("range indices", "list indices")
            )
            raise type(error)(text) from None
        if isinstance(place, range):
            return self._part(place)
        start, stop = self._ends[place : place + 2].tolist()
        first = self._first
        return _decode(self._data[start - first : stop - first].tobytes(), self._records)

    def _part(self, places: range) -> SharedList:
        if places.step != 1:
            return SharedList((self[place] for place in places), records=self._records)
        part = object.__new__(SharedList)
        part._records = self._records
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


def _encode(value: Any, records: str) -> bytes:
    if value is None:
        return b"-"
    if type(value) is str or type(value).__name__ == "str_":  # the latter is numpy's
        return b"s" + str(value).encode("utf-8", "surrogatepass")  # names of files have surrogates
    if type(value) is bytes:
        return b"b" + value
    return b"r" + _RECORDS[records][0](value)


def _decode(entry: bytes, records: str) -> Any:
    kind, payload = entry[:1], entry[1:]
    if kind == b"s":
        return payload.decode("utf-8", "surrogatepass")
    if kind == b"b":
        return payload
    return None if kind == b"-" else _RECORDS[records][1](payload)

"""Polars' frames on their way to workers."""

from __future__ import annotations

import sys
from typing import Any

from minloader._errors import breaks_in
from minloader._memory.reducers import as_it_is


def reduce_frame(memory: Any, frame: Any) -> Any:
    """Reduce a polars frame to an Arrow table, whose columns are buffers that can be mapped.

    Polars' own way would write a copy into the stream. Without pyarrow, and for the few types of
    columns that would not come back as they are, it has to do.
    """
    polars = sys.modules["polars"]
    try:
        table = frame.to_arrow(compat_level=polars.CompatLevel.newest())
        comes_back = polars.from_arrow(table.slice(0, 0)).schema == frame.schema
    except Exception as error:  # no pyarrow, or a type that Arrow does not know
        if breaks_in(error):
            raise
        comes_back = False
    return (polars.from_arrow, (table,)) if comes_back else as_it_is(frame)

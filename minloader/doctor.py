"""Which settings are best for a loader of yours, and what limits it?

::

    python -m minloader.doctor train.py:make_loader

runs the loader for a few seconds with each number of workers, then with each ``prefetch_factor``
at the best of these, and prints a table, the best setting, the cause of its limit, and whether the
batches are reproducible. The consumer does nothing with a batch, or sleeps for ``--step``
milliseconds.

All of it runs in the calling process. Every *trial* has a loader of its own, which is closed at
its end. Rates are counted from a third of its time on: until then workers start and caches fill.
"""

import sys

from minloader._diagnosis.command import main
from minloader._diagnosis.examination import Report, examine
from minloader._diagnosis.trials import Row

__all__ = ["Report", "Row", "examine", "main"]

if __name__ == "__main__":
    sys.exit(main())

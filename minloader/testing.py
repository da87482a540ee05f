"""Check in tests of yours that a loader gives the same batches whatever happens to it.

::

    from minloader.testing import check_reproducible

    def test_my_loader():
        check_reproducible(lambda: Loader(MyDataset(), MySampler(), num_workers=4))

And look at a sample of a dataset that draws from ``get_worker_info().rng``::

    with as_in_worker():
        sample = dataset[0]
"""

from minloader._diagnosis.audit import AuditReport, IrreproducibleError, check_reproducible
from minloader._diagnosis.by_hand import as_in_worker

__all__ = ["AuditReport", "IrreproducibleError", "as_in_worker", "check_reproducible"]

"""Check in tests of yours that a loader gives the same batches whatever happens to it.

::

    from minloader.testing import check_reproducible

    def test_my_loader():
        check_reproducible(lambda: Loader(MyDataset(), MySampler(), num_workers=4))
"""

from minloader._diagnosis.audit import AuditReport, IrreproducibleError, check_reproducible

__all__ = ["AuditReport", "IrreproducibleError", "check_reproducible"]

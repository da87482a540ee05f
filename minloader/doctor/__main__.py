"""``python -m minloader.doctor``: see :mod:`minloader.doctor`."""

import sys

from minloader.doctor import main

sys.exit(main())

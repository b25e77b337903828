"""``python -m tests.fuzz``."""

import sys

from .run import main

sys.exit(main())

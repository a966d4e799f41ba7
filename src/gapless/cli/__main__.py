"""``python -m gapless.cli`` is ``gapless``."""

import sys

from gapless.cli import main

sys.exit(main())

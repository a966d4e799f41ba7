"""``python -m gapless`` is ``gapless``."""

import sys

from gapless.cli import main

sys.exit(main())

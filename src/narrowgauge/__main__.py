"""`python -m narrowgauge` is the command `narrowgauge`."""

import sys

from narrowgauge.cli import main

sys.exit(main())

"""``python -m piper_kernels`` is ``piper``."""

import sys

from piper_kernels.cli import main

sys.exit(main())

"""Entry point for ``python -m delta_tracker.cli``, which runs ``delta-tracker``."""

import sys

from delta_tracker.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

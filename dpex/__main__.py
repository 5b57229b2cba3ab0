"""``python -m dpex`` is the command ``dpex``."""

import sys

from dpex.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

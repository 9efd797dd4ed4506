"""`python -m jaxkv`: see `jaxkv._cli`."""

import sys

from jaxkv._cli.main import main

if __name__ == "__main__":
    sys.exit(main())

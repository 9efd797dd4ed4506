"""Whether the tests run by night, when what takes long is done in full: the environment variable JAXKV_NIGHTLY=1."""

import os

NIGHTLY = os.environ.get("JAXKV_NIGHTLY") == "1"

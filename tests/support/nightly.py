"""Whether the tests run by night, when what takes long is done in full: the environment variable JAXKV_NIGHTLY=1."""

import os

import pytest

NIGHTLY = os.environ.get("JAXKV_NIGHTLY") == "1"


def skip_by_day(reason):
    """Marks a test, or a case of one, that is left out by day: `reason` says what is tried by day instead."""
    return pytest.mark.skipif(not NIGHTLY, reason=reason)

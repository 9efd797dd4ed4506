"""An interrupt while something must not be cut off waits for its end."""

import signal

import pytest

from jaxkv._core.state.interrupts import hold_back_interrupts


@pytest.fixture
def interruptible():
    """Python's own handler: a process in the background is started with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end(interruptible):
    done = []
    with pytest.raises(KeyboardInterrupt), hold_back_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("first")
    with pytest.raises(KeyboardInterrupt), hold_back_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("second")
        signal.raise_signal(signal.SIGINT)  # who asks twice does not wait
        done.append("never")
    assert done == ["first", "second"]

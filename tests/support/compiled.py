"""How many programs are compiled."""

import jax


def compiled(call):
    """How many programs were compiled meanwhile."""
    count = 0

    def listen(event, duration, **_):
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return count

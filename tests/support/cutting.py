"""Calls of an engine that are cut off, at any line or instruction of its own code and of what it stands on."""

import contextlib
import os
import random
import sys

import jaxkv

WATCHED = tuple(
    os.path.join(os.path.dirname(jaxkv.__file__), *wing.split("/"))
    for wing in ("_engine", "_tiers", "_core/state/interrupts.py")
)


class Cut(BaseException):
    """What no one catches."""


class CutAt:
    """Raise at the n-th event of the engine's own code and of what it stands on: at a line, or at an instruction."""

    def __init__(self, n, event="line"):
        self.left, self.event = n, event

    def __enter__(self):
        if self.event == "opcode":
            sys._getframe().f_trace_opcodes = True  # settrace looks whether any frame wants them
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._line

    def _line(self, frame, event, argument):
        if event == self.event:
            self.left -= 1
            if self.left == 0:
                raise Cut
        return self._line


@contextlib.contextmanager
def cuts_dropped():
    """Python drops what is raised while it frees an object, such as a generator, and tells this: cuts may be."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda what: None if what.exc_type is Cut else before(what)
    try:
        yield
    finally:
        sys.unraisablehook = before


@cuts_dropped()
def cut_anywhere(work, check, event, points):
    """Cut work off at so many of its events, each time with a new list of requests that it fills, and check that
    nothing was lost."""
    with CutAt(0, event) as cut:
        work([])
    check([])
    count, cuts = -cut.left, 0
    assert count > 2000
    points = random.Random(event).sample(range(1, count), min(count - 1, points))
    for point in points:
        requests = []
        try:
            with CutAt(point, event):
                work(requests)
        except Cut:
            cuts += 1
        check(requests)
    assert cuts >= 0.7 * len(points)

"""What a token sees, place by place: what the kernels' masks and walks are held against."""


def seen_by(t: int, before: int, last: int, window, chunk, parents, spans, sink_tokens=0) -> set[int]:
    """The places that a row's new token t, at place `last`, sees; the first new one is at `before`. Parents and spans
    are those of the row's new tokens, or None."""
    depth, above = {}, {}
    if parents is not None:
        for i in range(t + 1):
            parent = parents[i] if 0 <= parents[i] < i else None
            depth[i] = 0 if parent is None else depth[parent] + 1
            above[i] = {i} if parent is None else above[parent] | {i}
    position = {p: p if p < before or parents is None else before + depth[p - before] for p in range(last + 1)}
    own = position[last]
    first = 0 if window is None else own - window + 1
    first = first if chunk is None else own // chunk * chunk
    allowed = range(last + 1) if parents is None else [*range(before), *(before + i for i in above[t])]
    seen = {p for p in allowed if position[p] >= first or position[p] < sink_tokens}
    if spans is not None and spans[t]:
        seen |= {before + i for i, number in enumerate(spans) if number == spans[t]}
    return seen

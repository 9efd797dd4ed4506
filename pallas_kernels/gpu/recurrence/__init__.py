"""Linear recurrences over states, each where it lies in the pool: `tokens` takes a row's tokens one after another,
`space_chunks`, `delta_chunks` and `channel_chunks` many at once, by `chunk_steps`, the latter two after `delta_pairs`
and `channel_pairs`; `rows` says what thread blocks are to do, and in which order."""

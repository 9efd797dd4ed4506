"""Linear recurrences over states, each where it lies in the pool: `tokens` takes a row's tokens one after another,
`space_chunks` and `delta_chunks` many at once, by `chunk_steps`, the latter after `delta_pairs`; `rows` says what
thread blocks are to do, and in which order."""

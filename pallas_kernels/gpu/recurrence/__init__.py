"""Linear recurrences over states, each where it lies in the pool: `tokens` takes a row's tokens one after another,
`chunks` many of a state space at once; `rows` says what thread blocks are to do, and in which order."""

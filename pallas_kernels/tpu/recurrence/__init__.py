"""Linear recurrences over states: `state_decode` takes a token of each row, `state_prefill` many in chunks, of which
`state_chunk` has the arithmetic, and `channel_gates` what differs with a gate a channel; `products` are of both."""

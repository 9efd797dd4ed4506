"""Linear recurrences over states: `state_decode` takes a token of each row, `state_prefill` many in chunks, of which
`state_chunk` has the arithmetic, by `products`."""

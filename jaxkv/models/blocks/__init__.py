"""The blocks of a decoder, and parts that a few families have, one module each. Imported by the decoder."""

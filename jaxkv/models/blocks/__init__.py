"""Parts of blocks that a few families have, one module each. Imported by the decoder and its layers."""

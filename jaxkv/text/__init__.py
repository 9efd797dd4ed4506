"""Text to tokens and back, with a model's own tokenizer and chat template. Import it by name: `import jaxkv.text`.

- `Tokenizer(source)`: of a folder, a GGUF file or a hub name; `encode`, `chat`, `decode` and `stream`.
- `TextStream`: the text of tokens as they come, which never splits a character.

What lives here: nothing of models or caches. It may be imported by the command line. It needs the extra `hf`,
for GGUF files also `gguf`.
"""

from jaxkv.text.tokenizer import TextStream as TextStream, Tokenizer as Tokenizer

__all__ = ["TextStream", "Tokenizer"]

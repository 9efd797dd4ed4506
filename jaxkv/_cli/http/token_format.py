"""The form of vLLM's `/tokenize` and `/detokenize`: the tokens of a text or a chat, and the text of tokens."""

from typing import Any

from jaxkv._cli.http.body import show
from jaxkv._cli.http.openai_format import TEMPLATE_FIELDS, ChatCompletion, check_types, is_integer, refuse_fields


def tokenize(body: dict[str, Any], text: Any, max_model_len: int) -> dict[str, Any]:
    """Returns the answer to a request's body: the tokens of its `prompt`, or of its `messages` as a chat would have
    them.

    Raises:
      ValueError: a field has another form, or is not done here.
    """
    check_types(body, add_special_tokens=bool, return_token_strs=bool)
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError("The body must have prompt, a text, or messages, a chat: one of the two.")
    refuse_fields(body, TEMPLATE_FIELDS)
    if messages is not None:
        (tokens,) = ChatCompletion(body, text).prompts()
    elif isinstance(prompt, str):
        tokens = text.encode(prompt, special=body.get("add_special_tokens") is not False)
    else:
        raise ValueError(f"prompt must be a text, not {show(prompt)}: send several requests for several texts.")
    strings = [text.token_string(token) for token in tokens] if body.get("return_token_strs") else None
    return {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": strings}


def detokenize(body: dict[str, Any], text: Any, vocab_size: int) -> dict[str, Any]:
    """Returns the answer to a request's body: the text of its `tokens`, of special ones the names.

    Raises:
      ValueError: it has no such list, or a token that there is not.
    """
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise ValueError("tokens must be a list of tokens, whole numbers.")
    for token in tokens:
        if not is_integer(token) or not 0 <= token < vocab_size:
            raise ValueError(f"tokens must be whole numbers from 0 to {vocab_size - 1}, not {show(token)}.")
    return {"prompt": text.decode(tokens, special=True)}

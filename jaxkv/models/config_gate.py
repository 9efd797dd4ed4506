"""Decides on the fields of a config.json that no family reads: accepts them, warns, or refuses them.

The check is lenient, since configs carry switches of trainers, servers and converters. The check is safe: a field that
is on and whose name has a word of a decoder's computation is refused, unless it states what the decoder does anyway.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxkv._core.config.validation import PACKAGE_FOLDER, read_list, show
from jaxkv.models.config import DecoderConfig

MOST_NAMES = 10  # in an error
# Fields that transformers writes everywhere and that do not change a decoder's computation: not worth a warning.
HARMLESS = {
    "_name_or_path", "_pad_token_id", "_sliding_window_pattern", "architectures", "attention_dropout", "auto_map",
    "aux_loss_alpha", "cache_implementation", "chunk_size_feed_forward", "dtype", "embd_pdrop", "id2label",
    "ignore_index", "initializer_range", "is_decoder", "label2id", "num_logits_to_keep", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "resid_pdrop", "residual_dropout", "router_aux_loss_coef", "router_jitter_noise", "seq_aux", "torch_dtype",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip
# Fields that must have one of these values where they occur, off or not.
MUST_BE = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
    "is_causal": (True,),
    "causal": (True,),
    "use_rope": (True,),
    "use_rotary_embeddings": (True,),
    "use_rotary_emb": (True,),
    "use_rmsnorm": (True,),
    "use_rms_norm": (True,),
    "scale_attn_weights": (True,),
    "rotary_pct": (1,),
    "partial_rotary_factor": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "lm_head_multiplier": (1,),
}
# Names under which a config repeats what the decoder does. Lengths are limits, and limits change nothing.
REPEATED: dict[str, Callable[[DecoderConfig], Any]] = {}
for _names, _value in (
    ("n_embd d_model dim embed_dim", lambda c: c.embed_dim),
    ("n_layer n_layers num_layers", lambda c: c.num_layers),
    ("n_head n_heads num_heads", lambda c: c.num_heads),
    ("n_kv_heads num_kv_heads num_key_value_heads", lambda c: c.num_kv_heads),
    ("head_size attention_head_dim kv_channels", lambda c: c.head_dim),
    ("ffn_dim n_inner ffn_hidden_size", lambda c: c.mlp_dim),
    ("sliding_window_size sliding_window", lambda c: next((w for w in c.windows if w is not None), None)),
    ("norm_eps layer_norm_eps norm_epsilon layer_norm_epsilon rms_norm_epsilon", lambda c: c.norm_eps),
    ("rope_base rotary_base rotary_emb_base", lambda c: c.ropes[0].theta),
    ("rope_interleave rope_interleaved", lambda c: c.ropes[0].interleaved),
    ("use_qk_norm qk_norm qk_layernorm", lambda c: c.qk_norm),
    ("qkv_bias", lambda c: c.qkv_bias),
    ("attention_bias attention_out_bias", lambda c: c.out_bias),
    ("mlp_bias", lambda c: c.mlp_bias),
    ("attention_multiplier", lambda c: c.attention_scale),
    ("embedding_multiplier", lambda c: c.embed_scale),
    ("tie_embeddings", lambda c: c.tie_embeddings),
    ("shared_expert_intermediate_size", lambda c: c.experts.shared_dim if c.experts else 0),
):
    REPEATED |= dict.fromkeys(_names.split(), _value)
# Whole names of settings of trainers, servers, tokenizers and text generation: they do not describe a decoder...
UNRELATED = re.compile(
    r".*_token_ids?|[a-z]+_token|.*_words_ids|suppress_tokens|.*tokenizer.*|.*template.*|.*trust_remote_code.*"
    r"|.*(version|commit|revision|license|author|language|languages|url|path|_name|tags?|date|description)"
    r"|.*(dropout|pdrop|jitter|initializer|init_std|init_range|init_method|_loss|loss_).*"
    r"|(.*_)?(gradient|train|training|epochs?|learning_rate|warmup|optimizer|seed|batch_size|checkpoint)(_.*)?"
    r"|.*(gradient_|checkpointing|deepspeed|fsdp|wandb|dataset|neftune).*|(lr|weight_decay|adam)(_.*)?"
    r"|(use_)?(flash|sdpa?|xformers?|eager)(_.*)?|.*attn_implementation.*|.*flash_att.*"
    r"|(sequence|tensor|pipeline|context|data|model)_parallel.*|(tp|pp|dp|ep)_(size|degree|plan)|.*_parallel_size"
    r"|.*_cache|cache_.*|max_(sequence|seq|model|new|batch|output|input)_?(length|len|size|tokens)?"
    r"|(model_)?max_(length|seq_length|position.*)|seq_len(gth)?|n_positions|n_ctx|min_length|load_in_[48]bit"
    r"|temperature|top_[kp]|typical_p|do_sample|num_(beams|beam_groups|return_sequences)|.*_penalty|early_stopping"
    r"|(encoder_)?no_repeat_ngram_size|remove_invalid_values|output_scores|sample_packing"
    r"|return_dict_in_generate|torchscript|tf_legacy_loss|use_bfloat16|bf16|fp16|finetuning_task|task_specific_params"
    r"|transformers\.js_config|custom_pipelines|is_llama_config|prefix|finetuned|generation_config|producer"
)
# ... unless one of these is in them, and the name is not one of those below.
STRONG = re.compile(r"rope|rotary|norm|bias|scal|cap|clip|window|chunk|expert|quant|alibi|logit|softmax|position_emb")
TRAINERS = re.compile(
    r"(max_)?grad(ient)?_?(norm|clip).*|clip_grad.*|(use_)?fused?_.*|expert_parallel.*|router_jitter.*"
)
# Words in names of fields that change a decoder. A field without them that is no number is no size or factor.
DECODER = re.compile(
    r"rope|rotary|yarn|theta|freq|norm|bias|scal|multipl|factor|coef|ratio|cap|clip|window|chunk|span|stride|alibi"
    r"|expert|moe|rout|gat|topk|top_k|quant|bits|compress|sparse|attn|attention|head|query|key|kv|qk|latent|lora|rank"
    r"|layer|block|residual|parallel|position|pos_|embed|emb|tie|activ|act_|_act|mlp|ffn|ff_|glu|hidden|intermediate"
    r"|dim|size|width|depth|vocab|causal|mask|direction|cross|encoder|decoder|mamba|ssm|conv|state|recurr|linear|rnn"
    r"|delta|index|temp|logit|soft|sink|shared|group|pattern|skip|altup|laurel|mup|vision|audio|image|video|modal|sight"
    r"|draft|eagle|medusa|mtp|nextn|ngram|memory|adapter|prun|merge|loop|hyper|mixture|interleav|epsilon|_eps|order"
    r"|offset|shift|swa|sliding|local|global|longrope|ntk|mrope|sequen"
)


def drop_ignored(config: Any, ignore: str | Iterable[str]) -> Any:
    """Returns a config without the fields that `ignore` names, nested ones included.

    >>> drop_ignored({"a": 1, "rope_scaling": {"b": 2, "c": 3}}, ("a", "b"))
    {'rope_scaling': {'c': 3}}
    """
    given = [ignore] if isinstance(ignore, str) else read_list("ignore", ignore)
    if wrong := [name for name in given if not isinstance(name, str)]:
        raise ValueError(f"ignore must be names of fields of config.json, not {show(wrong[0])}.")
    names = set(given)
    if not names or not isinstance(config, Mapping):
        return config
    return {name: drop_ignored(value, names) for name, value in config.items() if name not in names}


def check_architectures(config: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuses a config that names other classes than a family's own.

    Raises:
      ValueError: the config names classes, and none of the known ones.
    """
    named = config.get("architectures")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names:
        return
    if not {str(name).lower() for name in names} & {name.lower() for name in known}:
        raise ValueError(
            f"{where} is of the class (architectures) {show(names)}, but the decoder computes {' and '.join(known)}: "
            "a draft head, a classifier or another body is not read. If it is that class by another name, give "
            'ignore=("architectures",).'
        )


def check_left(left: Mapping[str, Any], where: str, decoder: DecoderConfig | None) -> list[str]:
    """Returns the unread fields that are accepted but deserve a warning.

    Args:
      left: the unread fields.
      where: name of the config in errors.
      decoder: the decoder that the config describes; None: the fields are of a nested config, where every field counts.

    Raises:
      ValueError: fields that would change a decoder and are not off; all are named.
    """
    for name, allowed in MUST_BE.items():
        if name in left and not any(_is_same(left[name], value) for value in allowed):
            raise ValueError(
                f"{where} has {name} = {show(left[name])}, which the decoder cannot honour; it knows "
                f"{' and '.join(map(repr, allowed))}."
            )
    left = {name: left[name] for name in sorted(left.keys() - HARMLESS - MUST_BE.keys())}
    refused = [name for name, value in left.items() if not _is_passed(name, value, decoder)]
    if refused:
        some = refused[:MOST_NAMES]
        fields = ", ".join(f"{show(name)[1:-1]} = {show(left[name])}" for name in some)
        fields += f", and {len(refused) - len(some)} more" if len(refused) > len(some) else ""
        names = ", ".join(f'"{show(name)[1:-1]}"' for name in refused[:3]) + ("," if len(refused) == 1 else "")
        names += ", ..." if len(refused) > 3 else ""
        raise ValueError(
            f"{where} has fields that the decoder does not know and so cannot honour: {fields}. If they change nothing "
            f"in this model, give ignore=({names})."
        )
    return list(left)


def warn_passed(names: list[str], where: str) -> None:
    """Warns once of all fields that were accepted."""
    if names:
        warnings.warn(
            f"{where} has fields that are off, say a known size again or say nothing of a decoder, and were passed "
            f"over: {', '.join(show(name)[1:-1] for name in names)}.",
            skip_file_prefixes=(PACKAGE_FOLDER,),
        )


def _is_passed(name: str, value: Any, decoder: DecoderConfig | None) -> bool:
    if name.startswith("_"):
        return True
    if decoder is not None and name in REPEATED:
        said = REPEATED[name](decoder)
        # A switch that is off contradicts a decoder that has it on; a missing size does not.
        return _is_same(value, said) or (_is_off(value) and (_is_off(said) or value is None))
    if _is_off(value):
        return True
    if decoder is None:
        return name == "finetuned"
    lower = name.lower()
    if TRAINERS.fullmatch(lower) or (UNRELATED.fullmatch(lower) and not STRONG.search(lower)):
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number and not DECODER.search(lower)


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, int | float | str | list | dict) and not value)


def _is_same(value: Any, known: Any) -> bool:
    """Tells whether two values are equal, and both or neither are booleans."""
    return isinstance(value, bool) == isinstance(known, bool) and value == known

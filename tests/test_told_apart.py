"""What looks alike and is not, and what is asked for that nothing has: refused, in the words of whoever asks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
import jaxkv.models
import pallas_kernels
from jaxkv._cli.main import main
from jaxkv.models.checkpoints.folder import weight_files
from pallas_kernels.common.quantization import QUANTIZED

KV = jnp.ones((1, 2, 20, 2, 8))


def config(dtype="float32", **fields):
    sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64, num_blocks=8)
    return jaxkv.CacheConfig.uniform(**sizes | fields, dtype=dtype)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_kernels_refuse_bytes_and_scales_without_a_kind(dtype):
    cache = jaxkv.append(jaxkv.init(config(dtype)), KV, KV, [20, 3])
    pool, t = cache.pools[0], cache.tables[0]
    rows = (t.tables, t.lengths, jnp.array([1, 1]))
    q, k = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 2, 8))
    if dtype != "int8":  # whose numbers are what they are
        with pytest.raises(ValueError, match=r"kv holds bytes.*does not name it: give one of int8, float8_e4m3fn"):
            pallas_kernels.paged_attention(q, pool.kv, *rows, kv_scale=pool.scale)
        with pytest.raises(ValueError, match="kv holds bytes"):
            pallas_kernels.paged_attention(q, pool.kv, *rows)
    for write in (
        lambda: pallas_kernels.write_kv(pool.kv, k, k, *rows, kv_scale=pool.scale),
        lambda: pallas_kernels.write_and_attend(q, k, k, pool.kv, *rows, kv_scale=pool.scale),
    ):
        with pytest.raises(ValueError, match=r"kv holds bytes|kv_scale without kind does not say how to store"):
            write()


@pytest.mark.parametrize("other", QUANTIZED)
def test_blocks_of_one_kind_are_not_taken_for_another(other):
    cache = jaxkv.append(jaxkv.init(config("float8_e4m3fn")), KV, KV, [20, 3])
    _, host = jaxkv.swap_out(cache, [0])
    empty = jaxkv.init(config(other))
    if other == "float8_e4m3fn":
        assert jaxkv.swap_in(empty, [0], host).lengths.tolist() == [20, 0]
        return
    with pytest.raises(ValueError, match=rf"blocks of layer 0 are float8_e4m3fn\[.*but the cache's are {other}\["):
        jaxkv.swap_in(empty, [0], host)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        jax.jit(jaxkv.swap_in)(empty, [0], host)


@pytest.mark.parametrize("other", ["bfloat16", "int4", "float8_e5m2"])
def test_a_file_in_another_dtype_is_not_called_another_models(tmp_path, other):
    jaxkv.save(tmp_path / "rows", jaxkv.append(jaxkv.init(config("float32")), KV, KV, [20, 3]))
    with pytest.raises(jaxkv.CacheFileError, match=f"layer 0 in float32, but the cache has {other}") as told:
        jaxkv.load(tmp_path / "rows", into=jaxkv.init(config(other)))
    assert "another model" not in str(told.value)


def test_a_checkpoint_in_another_dtype_is_not_called_another_models(tmp_path):
    engine = jaxkv.Engine(jaxkv.models.small(), max_seqs=1, max_seq_len=32)
    engine.submit([1, 2, 3], 4)
    engine.step()
    engine.save(tmp_path / "engine")
    other = jaxkv.Engine(jaxkv.models.small(dtype=jnp.bfloat16), max_seqs=1, max_seq_len=32)
    with pytest.raises(jaxkv.CacheFileError, match="layer 0 in float32, but the cache has bfloat16"):
        other.load(tmp_path / "engine")


def test_parts_without_bounds_leave_the_others_nothing():
    outs = jnp.array([[[1.0, 2.0]], [[5.0, 6.0]], [[3.0, 4.0]]])
    out, lse = pallas_kernels.merge_attention(outs, jnp.array([[jnp.inf], [0.0], [-jnp.inf]]))
    assert out.tolist() == [[1.0, 2.0]] and lse.tolist() == [np.inf]
    out, lse = pallas_kernels.merge_attention(outs, jnp.array([[jnp.inf], [0.0], [jnp.inf]]))
    assert out.tolist() == [[2.0, 3.0]] and lse.tolist() == [np.inf]
    pull = jax.grad(lambda outs: pallas_kernels.merge_attention(outs, jnp.array([[jnp.inf], [0.0], [2.0]]))[0].sum())
    assert pull(outs).tolist() == [[[1.0, 1.0]], [[0.0, 0.0]], [[0.0, 0.0]]]


@pytest.mark.skipif(not NIGHTLY, reason="four searches to compile")
def test_a_beam_ends_at_any_of_several_tokens():
    model = jaxkv.models.small()
    prompt = list(b"import ")
    cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=32)), [len(prompt), 0])
    logits, cache = model(jnp.array([prompt] * 2), cache=cache, logits_at=jnp.array([len(prompt) - 1] * 2))

    def best(eos):
        search = jax.jit(
            lambda logits, cache: jaxkv.beam_search(model, cache, logits, beams=2, max_new_tokens=3, eos=eos)
        )
        return search(logits, cache)[0].tokens[0].tolist()

    free = best(None)
    stops = {beam[0] for beam in free}
    assert best([]) == free and best(np.array([255])) == best(255)
    ended = best(sorted(stops | {255}))
    assert all(beam[1:] == [-1, -1] for beam in ended if beam[0] in stops)
    with pytest.raises(ValueError, match="eos must be"):
        best("end")


@pytest.mark.parametrize("dtype", [{"k": "int8"}, {}, {"names": ["a"]}, ["int8", "int8"], 5, object()])
def test_what_is_no_dtype_is_shown_as_it_was_given(dtype):
    with pytest.raises(ValueError, match=r"^CacheConfig.dtype must be one of bfloat16, .*, not ") as told:
        config(dtype)
    assert str(told.value).endswith(f"not {dtype!r}.")


def test_a_token_that_was_given_back_is_told_of_once():
    layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, window=4, sink_tokens=4)
    cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=20, block_size=4))
    cache = jaxkv.extend(jaxkv.append(cache, KV, KV, [20, 3]), [1, 0])
    with pytest.raises(IndexError, match="window of 4 and 4 sink tokens, has freed the token of row 0"):
        cache.token(0, 6)


def test_a_folder_is_kept_to_its_bytes_from_the_start(tmp_path):
    cache = jaxkv.append(jaxkv.init(config(block_size=4, num_blocks=16)), KV, KV, [20, 0])
    options = dict(spill_bytes=1 << 20, disk=tmp_path, model="m")
    prefix = jaxkv.PrefixCache(cache.config, disk_bytes=1 << 20, **options)
    prefix.flush(prefix.insert(cache, 0, range(20)))
    held = prefix.files.num_bytes
    less = jaxkv.PrefixCache(cache.config, disk_bytes=held // 2, **options)
    assert 0 < less.files.num_bytes <= held // 2
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) == less.files.num_bytes


@pytest.mark.parametrize("name", ["..", "", ".", "a/b", "sub"])
def test_an_index_names_files_of_its_own_folder(tmp_path, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises((ValueError, FileNotFoundError), match=r"weight_map from tensors to files|lacks sub"):
        weight_files(tmp_path)


def test_half_a_character_on_the_command_line(capsys):
    assert main(["generate", "--prompt", "a\udcffb"]) == 2
    told = capsys.readouterr().err
    assert "'\\udcff', which is no character" in told and "codec" not in told


def test_a_prefix_cache_wants_a_hash_function_and_a_group():
    with pytest.raises(ValueError, match=r"hash_function must be a function of a .* pair, not 5"):
        jaxkv.PrefixCache(config(), hash_function=5)
    prefix = jaxkv.PrefixCache(config())
    assert prefix.pinned(0) == 0
    for group in (9, -1, "0", None):
        with pytest.raises(ValueError, match="group must be"):
            prefix.pinned(group)


@pytest.mark.parametrize("metadata", [{1: "a", "1": "b"}, {"deep": [{"x": {None: 1}}]}, {True: 1}])
def test_names_in_metadata_are_strings(tmp_path, metadata):
    with pytest.raises(ValueError, match=r"metadata must be a dict .* whose names are all strings, but it has"):
        jaxkv.save(tmp_path / "rows", jaxkv.init(config()), metadata=metadata)
    assert not (tmp_path / "rows").exists()

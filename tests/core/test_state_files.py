"""Files of rows with states: other forms of a convolution's last inputs, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from state_trial import ATTENTION, DELTA, ROWS, WEIGHT, make_config

import jaxkv
from jaxkv._files.format import SavedCache, render_header


def made():
    return jaxkv.init(make_config())


FORMS = ((6, 2), (3, 2, 2)), *[((3, 2, 2), (6, 2)), ((3, 2, 2), (2, 2, 3))] * NIGHTLY


@pytest.mark.parametrize("forms", FORMS)
def test_a_file_of_channels_in_other_groups(forms, tmp_path):
    """Older files have no groups."""
    old, new = (make_config(channels_in(x), ATTENTION, snapshot_every=4) for x in forms)
    cache = jaxkv.extend(jaxkv.init(old), [4, 3, 0, 0])
    cache = jaxkv.write_states(cache, {"conv": jnp.arange(ROWS * 12.0).reshape(ROWS, *forms[0])}, layer=0)
    jaxkv.save(tmp_path / "x.safetensors", cache)
    loaded = jaxkv.load(tmp_path / "x.safetensors", new)
    back = jax.jit(lambda cache: jaxkv.truncate(jaxkv.extend(cache, [1, 0, 0, 0]), [4, 3, 0, 0]))
    outs = [convolve(each) for each in (cache, loaded, back(loaded))]
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[1][0], outs[2][0])
    with pytest.raises(jaxkv.CacheFileError, match="it is of another model"):
        jaxkv.load(tmp_path / "x.safetensors", make_config(channels_in((6, 3)), ATTENTION))


@jax.jit
def convolve(cache):
    """Returns what the first layer makes of a token more in rows 0 and 1."""
    return jaxkv.causal_conv(jnp.ones((ROWS, 1, 6)), WEIGHT, jaxkv.extend(cache, [1, 1, 0, 0]), 0)[0]


def channels_in(shape):
    return jaxkv.LayerConfig.recurrent(conv=(shape, "float32"))


def test_a_file_of_other_states_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    jaxkv.save(path, jaxkv.extend(made(), [5, 4, 0, 0]))
    assert jaxkv.describe(path).config == make_config()
    plain = make_config(ATTENTION)
    versions = [
        render_header(SavedCache(config=c, lengths=(), model=None, metadata={}, block_size=4, groups=c.groups))[
            "version"
        ]
        for c in (make_config(), plain)
    ]
    assert versions == ["5", "4"]  # older readers go on reading what they know
    other = jaxkv.LayerConfig.recurrent(state=((2, 4, 5), "float32"))
    with pytest.raises(jaxkv.CacheFileError, match="it is of another model"):
        jaxkv.load(path, make_config(DELTA, ATTENTION, other))
    with pytest.raises(jaxkv.CacheFileError, match="it is of another model"):
        jaxkv.load(path, make_config(DELTA, ATTENTION, ATTENTION))
    with pytest.raises(ValueError, match="but that of the cache sent to has states"):
        jaxkv.send(made(), 0, to=jaxkv.init(make_config(DELTA, ATTENTION, other)))
    _, host = jaxkv.swap_out(jaxkv.extend(made(), [5, 4, 0, 0]), 0)
    with pytest.raises(ValueError, match="The states of these rows are"):
        jaxkv.swap_in(jaxkv.init(make_config(DELTA, ATTENTION, other)), 0, host)

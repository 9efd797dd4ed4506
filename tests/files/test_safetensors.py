"""The reader and writer of safetensors, against the official library where that is installed."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxkv._files import safetensors

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bf16": np.array([1.5, -2.0, 3.0], ml_dtypes.bfloat16),
    "scalar": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "turned": np.arange(6, dtype=np.float16).reshape(2, 3).T,
    "flags": np.array([True, False]),
}


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def same(read):
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        np.testing.assert_array_equal(read[name], tensor)


def test_round_trip(tmp_path):
    safetensors.write(tmp_path / "x", TENSORS)
    same(safetensors.read(tmp_path / "x"))


def test_no_tensors(tmp_path):
    safetensors.write(tmp_path / "x", {})
    assert safetensors.read(tmp_path / "x") == {}


def test_against_the_official_library(tmp_path):
    official = pytest.importorskip("safetensors.numpy", reason="needs the safetensors package")
    safetensors.write(tmp_path / "ours", TENSORS)
    same(official.load_file(tmp_path / "ours"))
    official.save_file({name: np.ascontiguousarray(x) for name, x in TENSORS.items()}, tmp_path / "theirs")
    same(safetensors.read(tmp_path / "theirs"))


def test_nothing_can_be_written_through_what_was_read(tmp_path):
    safetensors.write(tmp_path / "x", TENSORS)
    with pytest.raises(ValueError, match="read-only"):
        safetensors.read(tmp_path / "x")["a"][0] = 0


def test_unknown_dtype(tmp_path):
    with pytest.raises(ValueError, match="no dtype complex64, which z has"):
        safetensors.write(tmp_path / "x", {"z": np.zeros(1, np.complex64)})


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "x"
    safetensors.write(path, {"a": TENSORS["a"]})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated"):
            safetensors.read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="damaged"):
        safetensors.read(path)


ENTRY = dict(dtype="F32", shape=[2], data_offsets=[0, 8])


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"{", "header cannot be read"),
        (b"[]", "header cannot be read"),
        ({"a": 1}, "header cannot be read"),
        ({"a": {}}, "header cannot be read"),
        ({"a": ENTRY | dict(dtype="F128")}, "unknown dtype 'F128'"),
        ({"a": ENTRY | dict(shape=[-2])}, "whole numbers from 0"),
        ({"a": ENTRY | dict(shape=[2.0])}, "whole numbers from 0"),
        ({"a": ENTRY | dict(data_offsets=[0])}, "header cannot be read"),
        ({"a": ENTRY | dict(data_offsets=[-8, 0])}, "whole numbers from 0"),
        ({"a": ENTRY | dict(shape=[3])}, "should take bytes 0 to 12, but its header says 0 to 8"),
        ({"a": ENTRY, "b": ENTRY}, "tensor b, .* should take bytes 8 to 16, but its header says 0 to 8"),
        ({"a": ENTRY | dict(data_offsets=[4, 12])}, "should take bytes 0 to 8, but its header says 4 to 12"),
    ],
)
def test_damaged_headers(tmp_path, header, says):
    write_raw(tmp_path / "x", header, bytes(8))
    with pytest.raises(ValueError, match=says):
        safetensors.read(tmp_path / "x")


def test_a_header_too_long_to_be_one(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        file.write((2 * safetensors.MAX_HEADER).to_bytes(8, "little"))
        file.truncate(3 * safetensors.MAX_HEADER)  # sparse: it takes no room
    with pytest.raises(ValueError, match="no safetensors file: its header would have 200000000 bytes"):
        safetensors.read(tmp_path / "x")

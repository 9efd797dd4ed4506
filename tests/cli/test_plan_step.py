"""A decode step on paper: against the programs of small meshes, and against arithmetic by hand."""

import collections
import dataclasses
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from nightly import NIGHTLY

import jaxkv
import jaxkv.models
from jaxkv._cli.main import main
from jaxkv._cli.plan.capacity import plan
from jaxkv._cli.plan.chips import CHIPS, chip_named
from jaxkv._cli.plan.decode_step import Collective, collectives, decode_step
from jaxkv._cli.plan.devices import Devices

DATA = pathlib.Path(__file__).parents[1] / "data"
COLLECTIVE = re.compile(r"= (\w+)\[([0-9,]*)\]\S* (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)")
WHOLE = jaxkv.models.loader.read_config(DATA / "qwen2")
SMALL = dataclasses.replace(WHOLE, windows=(None,) * 2, ropes=WHOLE.ropes[:1] * 2)


def group_size(line):
    """How many devices take part, in each way in which XLA writes that."""
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(pair.split("=") for pair in found[1].split(","))
        return math.prod(int(sizes[name]) for name in found[2].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    return re.search(r"replica_groups=\{\{(.*?)\}", line)[1].count(",") + 1


def counted(text):
    """Of each kind of collective, by how many devices take part and by its size in bytes, how many a program has."""
    found = collections.Counter()
    for line in text.splitlines():
        if move := COLLECTIVE.search(line):
            (dtype, shape, kind), devices = move.groups(), group_size(line)
            bits = int(re.sub(r"\D", "", dtype) or 8)  # pred has no number
            size = math.prod(int(n) for n in shape.split(",") if n) * bits // 8
            if devices > 1:
                found[kind, devices, size // devices if kind == "all-gather" else size] += 1
    return found


def load(name, folder, mesh):
    if name != "small":
        return jaxkv.models.load(DATA / name, mesh=mesh)
    jaxkv.models.save(jaxkv.models.Decoder(SMALL, rngs=nnx.Rngs(0)), folder)
    return jaxkv.models.load(folder, mesh=mesh)


BY_NIGHT = [(name, shape) for name in ("qwen2", "qwen3_moe", "deepseek_v2") for shape in ("2", "4", "1x1x2", "2x2")]


@pytest.mark.parametrize(("name", "shape"), [("small", "2x1x2"), ("small", "2x2"), *BY_NIGHT * NIGHTLY])
def test_a_plan_is_what_the_program_of_a_mesh_moves_and_holds(name, shape, tmp_path, capsys):
    devices = Devices.read(shape)
    sizes = (devices.data, devices.tensor, devices.context)
    mesh = Mesh(np.array(jax.devices()[: devices.count]).reshape(sizes), ("data", "model", "context"))
    model = load(name, tmp_path, mesh)
    folder = tmp_path if name == "small" else DATA / name
    weights = sum(x.nbytes for x in jax.tree.leaves(model))
    memory = weights + 200_000
    told = f"plan --model {folder} --memory {memory} --weights {weights} --rest 0 --max-seq-len 32 --max-seqs 4"
    assert main([*told.split(), "--devices", shape, "--block-size", "8", "--dtype", "float32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    config = jaxkv.CacheConfig.from_model(model, head_dim_multiple=1, **told["suggestion"])
    cache = jaxkv.init(config, mesh=mesh, **devices.axes)

    def bytes_of_one(tree):
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    held = told["each_device"]
    assert held["cache"] == bytes_of_one(cache.pools) and held["rows"] * devices.data == config.max_seqs == 4
    assert held["weights"] == bytes_of_one(model) and held["cache"] + held["weights"] <= memory

    def decode(model, tokens, cache):
        return model(tokens, cache=jaxkv.extend(cache, jnp.ones(tokens.shape[0], jnp.int32)))

    if devices.data > 1:
        decode = jaxkv.by_rows(decode, whole={0})
    whole = NamedSharding(mesh, P("data"))  # each part of the data has its logits together
    program = jax.jit(decode, donate_argnums=2, out_shardings=(whole, None))
    text = program.lower(model, jnp.ones((4, 1), jnp.int32), cache).compile().as_text()
    expected = collections.Counter()
    for x in collectives(model.config, devices, held["rows"], itemsize=4):
        expected[x.kind, x.devices, x.size] += x.count
    assert counted(text) == expected


def test_groups_are_read_as_xla_writes_them():
    for text, size in (("mesh['a'=2,'b'=3] {'b'}", 3), ("mesh['a'=2,'b'=3] {'a','b'}", 6), ("[2,4]<=[8]", 4),
                       ("{{0,1,2},{3,4,5}}", 3)):  # fmt: skip
        assert group_size(f"x = all-reduce(y), channel_id=1, replica_groups={text}, to_apply=z") == size
    line = "  %x = f32[2,3]{1,0} all-gather(%y), replica_groups=[1,2]<=[2], dimensions={0}"
    assert counted(line) == {("all-gather", 2, 12): 1}


def test_what_does_not_divide_is_not_summed():
    shared = dict(tensor=4, data=1, context=1)
    assert [x.count for x in collectives(SMALL, Devices(**shared), 3)] == [5, 1]
    assert [x.count for x in collectives(dataclasses.replace(SMALL, vocab_size=97), Devices(**shared), 3)] == [4]
    assert [x.count for x in collectives(dataclasses.replace(SMALL, mlp_dim=41), Devices(**shared), 3)] == [3, 1]
    experts = jaxkv.models.loader.read_config(DATA / "qwen3_moe")
    assert [x.count for x in collectives(experts, Devices(**shared), 3)] == [2 * experts.num_layers + 1, 1]
    few = dataclasses.replace(experts, experts=dataclasses.replace(experts.experts, mlp_dim=25))
    sums = next(x.count for x in collectives(few, Devices(**shared), 3))
    assert sums == 2 * few.num_layers + 1 - sum(few.expert_layers)
    assert collectives(SMALL, Devices(1, 8, 1), 3) == [] == collectives(SMALL, Devices(2, 1, 2), 0)


def test_what_is_sent_between_boxes():
    """Of a ring among 16 devices in boxes of 8 each device sends 15 parts, and of what a box has to send one each."""
    h100, tpu = chip_named("h100"), chip_named("V5E")
    total = Collective(kind="all-reduce", over="tensor", devices=16, count=3, size=160)
    assert total.sent == 3 * 2 * 150
    assert total.sent_over(h100) == {h100.link: 840.0, h100.network: 60.0}
    assert total.sent_over(tpu) == {tpu.link: 900.0}
    gather = Collective(kind="all-gather", over="context", devices=4, count=2, size=100)
    assert gather.sent == 600 and gather.sent_over(h100) == {h100.link: 600.0}
    assert gather.sent_over(h100, taken=4) == {h100.link: 400.0, h100.network: 200.0}  # two by two
    assert gather.sent_over(h100, taken=8) == {h100.network: 600.0}
    assert dataclasses.replace(gather, devices=3).sent_over(tpu, taken=2) == {tpu.link: 400.0}


def test_experts_that_no_token_goes_to_are_not_read():
    config = jaxkv.models.loader.read_config(DATA / "qwen3_moe")
    layers, count = config.layer_configs, jaxkv.models.loader.count_parameters(config)
    table, expert = 96 * 32, 3 * 32 * 24
    read = {}
    for rows in (1, 1000):
        found = plan(layers, 10**8, max_seq_len=64, mean_len=10, max_seqs=rows)
        step = decode_step(config, Devices(), found, 2 * count)
        read[rows] = step.read_weights
        dense = count - table - 3 * expert  # of six experts in the one layer that has them a token goes to three
        assert step.flops == pytest.approx(2 * rows * (dense + 2 * 4 * 2 * 16 * 10))
    assert read[1] == pytest.approx(2 * (count - table - 3 * expert))
    assert read[1000] == pytest.approx(2 * (count - table))


def test_layers_that_read_another_s_keys_read_the_cache_too():
    """Gemma 4's layers differ in the width of their heads, too; its table for each layer is read a row a token."""
    config = jaxkv.models.loader.read_config(DATA / "gemma4")
    count = jaxkv.models.loader.count_parameters(config)
    found = plan(config.layer_configs, 10**8, max_seq_len=64, mean_len=10, max_seqs=2)
    step = decode_step(config, Devices(), found, 2 * count)
    local, full = 3 * 2 * 16 * 6, 2 * 2 * 24 * 10  # layers, KV heads, entries, tokens
    assert step.read_cache == pytest.approx(2 * 2 * (local + full) * found.config.dtype.itemsize)
    table = 96 * 5 * 8
    assert step.read_weights == pytest.approx(2 * (count - table))
    assert step.flops == pytest.approx(2 * 2 * (count - table + 4 * (local + full)))


def test_the_bound_of_a_step():
    config, v5e = SMALL, CHIPS["v5e"]
    devices, weights = Devices(2, 3, 4), 10**6
    layers = [devices.layer(layer) for layer in config.layer_configs]
    found = plan(layers, 10**6, max_seq_len=64, mean_len=10, max_seqs=5, dtype="bfloat16")
    step = decode_step(config, devices, found, weights)
    assert step.read_weights == weights  # the table of embeddings is the head's
    assert step.read_cache == 5 * 10 * 2 * (2 * 8 * 2) / 4  # rows, tokens, layers, keys and values of a head, devices
    sums, logits, merges = 5 * 5 * 32 * 2, 5 * 96 // 2 * 4, 2 * 5 * 2 * (8 + 1) * 4 * 3
    assert step.sent == sums + logits + merges
    seconds = step.seconds(v5e)
    assert seconds["read"] == (step.read_weights + step.read_cache) / 819e9 > seconds["compute"] > 0
    assert seconds["step"] == pytest.approx(seconds["read"] + step.sent / 200e9)
    assert step.tokens_per_second(v5e) == pytest.approx(15 / seconds["step"])
    slow = dataclasses.replace(v5e, peak=1e9)
    assert step.seconds(slow)["step"] == pytest.approx(step.flops / 1e9 + seconds["send"])

"""Writes the results of `plan` as text: the answer first, then how the memory is used."""

import collections

from jaxkv._cli.plan.report import AskedRows, DeviceMemory, Needs, Option, Report, count_facts
from jaxkv._cli.plan.step_report import step_as_text
from jaxkv._cli.units import columns
from jaxkv._core.cache.inspection import format_bytes
from jaxkv._core.config.layer_config import LayerConfig

BAR = 60  # characters


def as_text(report: Report) -> str:
    table = _table(report)
    sections = [_answer(report), _head(report), _bar(report.memory), "", table, "", _tail(report)]
    if report.chip is not None:
        sections[-1:-1] = [step_as_text(report.step, report.chip), ""]
    return "\n".join(sections)


def _answer(report: Report) -> str:
    """Answers in a sentence or two whether the requested rows fit, or how many rows fit."""
    memory, chip = report.memory, report.chip
    device = _with_article("device" if chip is None else chip.name)
    room = f"beside {format_bytes(memory.weights)} of weights {device} has {format_bytes(memory.cache)}"
    if not report.asked:
        usual: dict[str, Option] = {}  # of each dtype, in blocks of its default size, or else of the one that is best
        for option in report.options:
            if option.plan is not None:
                sizes = option.plan.config.default_block_size, report.best.config.block_size
                known = usual.get(name := option.dtypes[0])
                if option.block_size in sizes and (known is None or option.block_size == sizes[0]):
                    usual[name] = option
        by_dtype = [
            f"{option.plan.rows * report.devices.data:,} in {name}"
            + " (by XLA only)" * (not report.has_kernel(name, option.block_size))
            for name, option in usual.items() if option.plan
        ]  # fmt: skip
        return f"{_capitalize(room)}: it holds {', '.join(by_dtype)} rows of {report.best.mean_len:,g} tokens each."
    fits = [asked.dtype for asked in report.asked if asked.bytes <= memory.cache]
    read = [dtype for dtype in fits if report.has_kernel(dtype)]
    verdict = f"{read[0]} fits" if read else f"{fits[0]} fits, but no kernel reads it" if fits else "none fits"
    rows = report.best.rows * report.devices.data
    less = "" if fits else f" In {report.best.config.dtype} {rows:,} rows of {report.best.mean_len:,g} tokens do."
    return f"{_needed(report.asked, report.devices.count)}; {room}: {verdict}.{less}"


def _needed(asked: list[AskedRows], devices: int) -> str:
    rows, length = asked[0].rows, asked[0].length
    needs = ", ".join(f"{format_bytes(each.bytes)} in {each.dtype}" for each in asked)
    what = "1 row of {:,} tokens needs" if rows == 1 else f"{rows:,} rows of {{:,}} tokens need"
    return f"{what.format(length)} {needs}" + " of each device" * (devices > 1)


def needs_as_text(needs: Needs) -> str:
    weights = f"the weights take {format_bytes(needs.weights)} ({needs.source})"
    return (
        f"{_needed(needs.asked, needs.devices)}; {weights}.\n"
        "Say how much memory a device has with --memory, such as 80GB, or what it is with --chip, to see what fits."
    )


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aehiou' else 'a'} {name}"


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]


def _head(report: Report) -> str:
    config, memory = report.model, report.memory
    kinds = ", ".join(f"{n} {kind}" for kind, n in collections.Counter(map(_describe_kind, config.layers)).items())
    if states := report.best.bytes_per_row:
        kinds += f"; {format_bytes(states)} of states a row"
    beyond = ""
    if report.max_seq_len > config.max_seq_len:
        beyond = f" The model knows {config.max_seq_len} positions only."
    kept = " or ".join(
        f"{k} KV heads of {d}" for k, d in {(x.num_kv_heads, x.head_dim): 0 for x in config.attention_layers}
    )
    readers = sum(layer.shares_with is not None for layer in config.layers)
    kept += f", {readers} layers reading those of others" if readers else ""
    if config.latent is not None:
        kept = f"latent rows of {config.latent.rank} + {config.latent.rope_dim}"
    if config.compressed is not None:
        kept = f"rows of {config.head_dim} that are keys and values"
    if config.index is not None:
        own = sum(layer.index_dim is not None for layer in config.layers)
        kept += (
            f", and in {own} layers index keys of {config.index.dim}, by which a token chooses the "
            f"{config.index.top_k:,} that it reads"
        )
    devices = report.devices
    whose = f" of each of {devices.count} devices" if devices.count > 1 else ""
    if devices.count > devices.tensor:
        whose += f", {devices.tensor} tensor x {devices.data} data x {devices.context} context,"
    guess = "" if report.is_told else " (a guess: say it with --mean-len or --lengths)"
    return (
        f"{config.family}: {config.num_layers} layers ({kinds}), {kept}.\n"
        f"{memory.total / 1e9:.3g} GB, {format_bytes(memory.total)}, of memory{whose} less "
        f"{format_bytes(memory.weights)} of weights ({memory.source}) and {format_bytes(memory.rest)} to compute in "
        f"leave {format_bytes(memory.cache)} for the cache.\n"
        f"Rows of up to {report.max_seq_len} tokens, {report.best.mean_len:g} on the average{guess}.{beyond}\n"
    )


def _describe_kind(layer: LayerConfig) -> str:
    """Returns what a layer of the cache keeps, as it is said after a number of them."""
    ratio = layer.compress_ratio
    return str(layer.retention) if ratio is None else f"with entries of {ratio} tokens"


def _bar(memory: DeviceMemory) -> str:
    """Draws the device's memory as a bar with a legend."""
    segments = {"weights": (memory.weights, "█"), "cache": (memory.cache, "▒"), "rest": (memory.rest, "·")}
    ends, before = [], 0
    for size, _ in segments.values():
        before += size
        ends.append(round(BAR * before / memory.total))
    line = ""
    for end, (_, mark) in zip(ends, segments.values(), strict=True):
        line += mark * (end - len(line))
    legend = "   ".join(
        f"{mark} {name} {format_bytes(size)}, {size / memory.total:.0%}" for name, (size, mark) in segments.items()
    )
    return f"[{line}]\n {legend}"


def _table(report: Report) -> str:
    lines = [("block_size", "dtype", "bytes/token", "blocks", "tokens", "rows", "full rows", "waste")]
    for block_size, names, found in report.options:
        dtypes = [name + "*" * (not report.has_kernel(name, block_size)) for name in names]
        if found is None:
            lines.append((str(block_size), ", ".join(dtypes), "does not fit", "", "", "", "", ""))
            continue
        facts = count_facts(found, report.devices)
        blocks = " + ".join(f"{n:,}" for n in facts["group_blocks"])
        lines.append(
            (
                str(block_size),
                ", ".join(dtypes),
                format_bytes(found.marginal_bytes),
                blocks,
                f"{facts['tokens']:,}",
                f"{facts['rows']:,}",
                f"{facts['full_rows']:,}",
                f"{found.waste:.2%}",
            )
        )
    table = columns(lines, left=(1,))
    if (chip := report.chip) is not None and any("*" in name for line in lines for name in line[1:2]):
        table += (
            f"\n* no kernel for {'an' if chip.name[0] in 'aehiou' else 'a'} {chip.name} reads it: XLA does, slower."
        )
    return table


def _tail(report: Report) -> str:
    found = report.best
    groups = " + ".join(map(found.config.name_kept, range(len(found.config.groups))))
    several = len(found.config.groups) > 1
    windowed = found.marginal_bytes != found.bytes_per_token
    call = ", ".join(f"{name}={value!r}" for name, value in report.suggestion.items())
    notes = [
        f"bytes/token: what one more takes in a row of {found.mean_len:g}."
        + f" Until its windows are full it is {format_bytes(found.bytes_per_token)}." * windowed,
        f"rows: how many of {found.mean_len:g} tokens on the average fit at once; full rows: how many of "
        f"{report.max_seq_len}. What does not fit waits, or is swapped to the host."
        + " Not one can: give max_seq_len less, or more memory."
        * (found.full_rows == 0),
        "waste: slots that stay empty in the last blocks of rows, on average.",
        f"blocks: in layers that keep {groups}. tokens: in those that keep most." * several,
        _describe_devices(report) if report.devices.count > 1 else "",
        f"\nFor the cache with blocks of {found.config.block_size}:\n  jaxkv.CacheConfig.from_model(model, {call})",
        _describe_least(report),
    ]
    return "\n".join(note for note in notes if note)


def _describe_least(report: Report) -> str:
    """Returns what the rows that were asked for take, where a cache of all the memory is larger than they can use."""
    asked = next((asked for asked in report.asked if asked.dtype == str(report.best.config.dtype)), None)
    if asked is None or report.devices.count > 1 or report.best.full_rows < asked.rows:
        return ""
    rows = f"{asked.rows:,} row{'s' * (asked.rows != 1)} need{'s' * (asked.rows == 1)}"
    return f"Without memory_bytes= it takes the {format_bytes(asked.bytes)} that {rows}: more keeps prefixes alone."


def _describe_devices(report: Report) -> str:
    devices, sums, gathers = report.devices, "", ""
    kept = sorted({layer.num_kv_heads for layer in report.best.config.layers})
    holds = f"{' or '.join(map(str, kept))} KV head{'s' * (kept != [1])} of a layer"
    calls = ", ".join(("config", "mesh=mesh", *(f"{name}={axis!r}" for name, axis in devices.axes.items())))
    how = f"jaxkv.init({calls}) and jaxkv.models.load(folder, mesh=mesh) divide so."
    if devices.count > devices.tensor:
        shape, names = tuple(devices.mesh.values()), tuple(devices.mesh)
        how = f"With mesh = jax.make_mesh({shape}, {names}) " + how
    if devices.context > 1:
        holds += f", one of {devices.context} runs of every block's tokens"
        gathers = f"a gather over {devices.context} a layer"
    if devices.data > 1:
        holds += f", one of {devices.data} parts of the rows"
        how += " jaxkv.by_rows(step) runs a step on all parts, between which nothing is sent."
    if devices.tensor > 1:
        whose = "all" if devices.tensor == devices.count else str(devices.tensor)
        sums = f"two sums over {whose} devices a layer"
    sent = f"send up to {format_bytes(report.step.sent)}, in {' and '.join(filter(None, (sums, gathers)))}"
    rows = report.best.rows * devices.data
    return (
        f"Each device holds {holds}; a decode step of {rows} rows in bfloat16 makes it "
        f"{sent if report.step.sent else 'send nothing'}. {how}{_describe_hosts(report)}"
    )


def _describe_hosts(report: Report) -> str:
    """Says on how many hosts the devices are, and what runs there."""
    if report.chip is None or report.hosts in (None, 1):
        return ""
    group = report.devices.tensor * report.devices.context
    over = -(-group // report.chip.host)
    who = "each serves its own rows" if over == 1 else f"of {over} one submits requests, the others engine.follow()"
    return (
        f" The devices are on {report.hosts} hosts of {report.chip.host}: run the program on each, with "
        f"jaxkv.distributed.initialize() first; {who}."
    )

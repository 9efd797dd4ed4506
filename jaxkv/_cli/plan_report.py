"""What `plan` has found, as text for a person and as JSON for a program."""

import dataclasses
from typing import Any, NamedTuple

from jaxkv._cli.memory_plan import Plan
from jaxkv._cli.plan_devices import Devices
from jaxkv._core.views import format_bytes

BAR = 60  # characters


class Memory(NamedTuple):
    """Bytes of a device and what is in them."""

    total: int
    weights: int
    source: str  # where the weights' size is known from
    rest: int

    @property
    def cache(self) -> int:
        return self.total - self.weights - self.rest


class Option(NamedTuple):
    """A block size and dtypes that cost the same, and the plan; None: it does not fit."""

    block_size: int
    dtypes: list[str]
    plan: Plan | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All that is told."""

    model: Any  # its DecoderConfig
    memory: Memory
    max_seq_len: int
    step_tokens: int
    is_told: bool  # the lengths to expect were said
    options: list[Option]
    devices: Devices

    @property
    def best(self) -> Plan:
        """The one to start from: blocks of 16, where they fit, in the first dtype."""
        fitting = [option.plan for option in self.options if option.plan]
        return next((found for found in fitting if found.config.block_size == 16), fitting[0])

    @property
    def moved(self) -> int:
        """Bytes that each device sends in a decode step of all rows, at the most."""
        return self.devices.moved(self.model, self.best.rows, 2)

    @property
    def _bytes_over_devices(self) -> int:
        """What the cache may take on all devices together."""
        if self.devices.count == 1:
            return self.memory.cache
        return self.best.config.replace(layers=self.model.layer_configs).bytes

    @property
    def suggestion(self) -> dict[str, Any]:
        """The arguments of `CacheConfig.from_model`."""
        config = self.best.config
        fields = {
            "max_seqs": config.max_seqs,
            "max_seq_len": self.max_seq_len,
            "memory_bytes": self._bytes_over_devices,
            "block_size": config.block_size,
            "dtype": str(config.dtype),
        }
        if len(config.groups) > 1:
            fields["step_tokens"] = max(self.step_tokens, config.max_seqs)
        if config.head_dim_multiple > 1:
            fields["head_dim_multiple"] = config.head_dim_multiple
        return fields


def as_json(report: Report) -> dict[str, Any]:
    """Sizes in bytes, lengths in tokens."""
    model, memory = report.model, report.memory
    kept = model.layer_configs[0]
    options = [
        {"block_size": option.block_size, "dtypes": option.dtypes, "fits": option.plan is not None}
        | ({} if option.plan is None else _facts(option.plan))
        for option in report.options
    ]
    return {
        "model": {"family": model.family, "layers": model.num_layers, "num_kv_heads": kept.num_kv_heads,
                  "head_dim": kept.head_dim, "windows": list(model.windows)},
        "memory": {"total": memory.total, "weights": memory.weights, "weights_from": memory.source,
                   "cache": memory.cache, "rest": memory.rest},
        "devices": {"count": report.devices.count, "moved_per_step": report.moved},
        "max_seq_len": report.max_seq_len,
        "mean_len": report.best.mean_len,
        "options": options,
        "suggestion": report.suggestion,
    }  # fmt: skip


def _facts(found: Plan) -> dict[str, Any]:
    return {
        "bytes_per_token": found.bytes_per_token,
        "marginal_bytes_per_token": found.marginal_bytes,
        "group_blocks": list(found.config.group_blocks),
        "tokens": found.tokens,
        "rows": found.rows,
        "full_rows": found.full_rows,
        "waste": found.waste,
        "bytes": found.config.bytes,
    }


def as_text(report: Report) -> str:
    return "\n".join([_head(report), _bar(report.memory), "", _table(report.options), "", _tail(report)])


def _head(report: Report) -> str:
    config, memory = report.model, report.memory
    windows = {w: config.windows.count(w) for w in dict.fromkeys(config.windows)}
    kinds = ", ".join(f"{n} without a window" if w is None else f"{n} of window {w}" for w, n in windows.items())
    beyond = ""
    if report.max_seq_len > config.max_seq_len:
        beyond = f" The model knows {config.max_seq_len} positions only."
    kept = f"{config.num_kv_heads} KV heads of {config.head_dim}"
    if config.latent is not None:
        kept = f"latent rows of {config.latent.rank} + {config.latent.rope_dim}"
    whose = f" of each of {report.devices.count} devices" if report.devices.count > 1 else ""
    guess = "" if report.is_told else " (a guess: say it with --mean-len or --lengths)"
    return (
        f"{config.family}: {config.num_layers} layers ({kinds}), {kept}.\n"
        f"{memory.total / 1e9:.3g} GB, {format_bytes(memory.total)}, of memory{whose} less "
        f"{format_bytes(memory.weights)} of weights ({memory.source}) and {format_bytes(memory.rest)} to compute in "
        f"leave {format_bytes(memory.cache)} for the cache.\n"
        f"Rows of up to {report.max_seq_len} tokens, {report.best.mean_len:g} on the average{guess}.{beyond}\n"
    )


def _bar(memory: Memory) -> str:
    """The device's memory as a line, and what its parts mean."""
    parts = {"weights": (memory.weights, "█"), "cache": (memory.cache, "▒"), "rest": (memory.rest, "·")}
    ends, before = [], 0
    for size, _ in parts.values():
        before += size
        ends.append(round(BAR * before / memory.total))
    line = ""
    for end, (_, mark) in zip(ends, parts.values(), strict=True):
        line += mark * (end - len(line))
    legend = "   ".join(
        f"{mark} {name} {format_bytes(size)}, {size / memory.total:.0%}" for name, (size, mark) in parts.items()
    )
    return f"[{line}]\n {legend}"


def _table(options: list[Option]) -> str:
    header = ("block_size", "dtype", "bytes/token", "blocks", "tokens", "rows", "full rows", "waste")
    lines = [header]
    for block_size, dtypes, found in options:
        if found is None:
            lines.append((str(block_size), ", ".join(dtypes), "does not fit", "", "", "", "", ""))
            continue
        blocks = " + ".join(f"{n:,}" for n in found.config.group_blocks)
        lines.append((str(block_size), ", ".join(dtypes), format_bytes(found.marginal_bytes), blocks,
                      f"{found.tokens:,}", f"{found.rows:,}", f"{found.full_rows:,}",
                      f"{found.waste:.2%}"))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    left = (1,)
    return "\n".join(
        "  ".join(x.ljust(w) if i in left else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def _tail(report: Report) -> str:
    found = report.best
    groups = " + ".join("all tokens" if w is None else f"a window of {w}" for w in found.config.group_windows)
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
        "waste: places that stay empty in the last blocks of rows, on the average.",
        f"blocks: in layers that keep {groups}. tokens: in those that keep most." * several,
        _over(report) * (report.devices.count > 1),
        f"\nFor the cache with blocks of {found.config.block_size}:\n  jaxkv.CacheConfig.from_model(model, {call})",
    ]
    return "\n".join(note for note in notes if note)


def _over(report: Report) -> str:
    kept = sorted({layer.num_kv_heads for layer in report.best.config.layers})
    return (
        f"Each device holds {' or '.join(map(str, kept))} KV head{'s' * (kept != [1])} of a layer; a decode step of "
        f"{report.best.rows} rows in bfloat16 makes it send up to {format_bytes(report.moved)}, in two sums over all "
        "devices a layer. jaxkv.init(config, mesh=mesh) and jaxkv.models.load(folder, mesh=mesh) divide so."
    )

"""Find accesses in PTX that nothing in its text says are aligned: what a GPU dies of, and no interpreter sees."""

import re

MOST = 1 << 32  # as much as anybody asks of an address
SHARED_MEMORY = 1024  # where the driver lets a thread block's own begin
BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
BULK_TENSOR, BULK, BARRIER, MATRIX = 128, 16, 8, 16  # of places in shared memory

INSTRUCTION = re.compile(r"^\s*(@!?%?\w+\s+)?([a-z]\w*)((?:[.:]+\w+)*)\s+([^;]*);|^\$?\w+:", re.MULTILINE)
REGISTER = re.compile(r"%[a-z]+\d+\b")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+")
PARAMETER = re.compile(r"\.param\b[^,)]*?\.align (\d+)[^,)]*?\s(\w+)(?:\[|[,\n)])")


def find_misaligned(assembly: str) -> list[str]:
    """Returns the loads, stores and bulk copies whose addresses need not be multiples of what they take at once."""
    known = _Multiples(assembly)
    return [text for text, address, size in _accesses(assembly) if known.find_multiple(address) % size]


def _instructions(assembly: str):
    """Yields each instruction's text, its name, what follows that, and the operands: registers by the value they have
    there, `%r1_5`, where a straight run of instructions says which that is; else by their own names."""
    latest: dict[str, str] = {}
    for nth, match in enumerate(INSTRUCTION.finditer(assembly)):
        if match[2] is None:
            latest = {}  # others jump here
            continue
        operands = [part.strip() for part in OPERAND.findall(match[4]) if part.strip()]
        reads = slice(0 if not operands or operands[0].startswith("[") else 1, None)
        operands[reads] = [
            REGISTER.sub(lambda m, latest=latest: latest.get(m[0], m[0]), part) for part in operands[reads]
        ]
        if reads.start:
            written = REGISTER.findall(operands[0])
            operands[0] = REGISTER.sub(lambda m, nth=nth: f"{m[0]}_{nth}", operands[0])
            latest |= {name: name if match[1] else f"{name}_{nth}" for name in written}
        yield match[0].strip(), match[2], match[3].replace(":", ".").split(".")[1:], operands


def _accesses(assembly: str):
    """Yields each access's text, its address, and of what that has to be a multiple."""
    for text, op, modifiers, operands in _instructions(assembly):
        places = [part for part in operands if part.startswith("[")]
        if op in ("ld", "st", "red", "atom") and "param" not in modifiers:
            lanes = next((int(m[1:]) for m in modifiers if re.fullmatch(r"v\d", m)), 1)
            kind = next(m for m in reversed(modifiers) if re.fullmatch(r"[bfsu]\d+|bf16x2|f16x2", m))
            yield text, places[0], lanes * (4 if kind.endswith("x2") else BYTES[kind.lstrip("bfsu")])
        elif op in ("ldmatrix", "stmatrix"):
            yield text, places[0], MATRIX
        elif op == "mbarrier":
            yield text, places[0], BARRIER
        elif op == "cp" and "bulk" in modifiers and places:
            if "tensor" in modifiers:  # the other end is a descriptor's, which its maker checks
                shared = [p for p in places if "," not in p and not p.startswith("[%rd")]
                for nth, place in enumerate(shared):
                    yield text, place, BARRIER if nth else BULK_TENSOR
            else:
                yield from ((text, place, BULK) for place in places[:2])


class _Multiples:
    """Of which power of two each register is a multiple, whatever path led there."""

    def __init__(self, assembly: str):
        self.known = {name: int(align) for align, name in PARAMETER.findall(assembly)}
        self.known |= dict.fromkeys(re.findall(r"\.shared\s[^;]*?(\w+)(?:\[\d*\])?;", assembly), SHARED_MEMORY)
        steps = [step[1:] for step in _instructions(assembly) if step[3]]
        changed = True
        while changed:  # from the most downwards
            changed = False
            for op, modifiers, (target, *sources) in steps:
                for register in re.findall(r"%\w+", target if not target.startswith("[") else ""):
                    found = self._result(op, modifiers, sources)
                    for name in (register, register.partition("_")[0]):  # the value, and the register it is one of
                        if found < self.known.get(name, MOST):
                            self.known[name], changed = found, True

    def find_operand(self, operand: str) -> int:
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", operand):
            return min(MOST, (value := int(operand, 0)) & -value or MOST)
        if operand.startswith("%"):
            # Threads and blocks have any number; registers are in no way bound until something is found.
            return 1 if re.match(r"%\w+\.", operand) or not re.search(r"\d", operand) else self.known.get(operand, MOST)
        return self.known.get(operand, 1)

    def find_multiple(self, place: str) -> int:
        return min(self.find_operand(part.strip()) for part in place.strip("[]").split("+"))

    def _result(self, op: str, modifiers: list[str], sources: list[str]) -> int:
        if op == "ld" and "param" in modifiers:
            return self.find_multiple(sources[0])
        if op == "mov" and sources[0].startswith("{"):
            return self.find_operand(sources[0].strip("{} ").split(",")[0].strip())
        if not sources or any(source.startswith(("{", "[")) for source in sources) or "hi" in modifiers:
            return 1
        if op == "selp":
            return min(map(self.find_operand, sources[:2]))
        found = [self.find_operand(source) for source in sources]
        if op in ("mov", "cvt", "cvta", "neg", "add", "sub", "or", "xor", "min", "max", "rem"):
            return min(found)
        if op == "and":
            return max(found)
        if op in ("mul", "mad"):
            return min(found[0] * found[1], *found[2:], MOST)
        if op == "shl" and sources[1].isdigit():
            return min(found[0] << int(sources[1]), MOST)
        if op == "shr" and sources[1].isdigit():
            return max(found[0] >> int(sources[1]), 1)
        return 1

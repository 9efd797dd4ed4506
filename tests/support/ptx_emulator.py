"""Run straight PTX in NumPy, all threads of a block at once: what a kernel's registers hold, without a chip.

It knows the few instructions of kernels that load, convert and store, and says so of any other. Branches, bulk copies
and the matrix unit are beyond it.
"""

import re

import jax.numpy as jnp
import numpy as np

NUMBERS = {"bf16x2": jnp.bfloat16, "f16x2": np.float16, "f32": np.float32}
SHARED = 1 << 20  # bytes, and where the one variable there begins
STATEMENT = re.compile(r"(@!?%\w+\s+)?([a-z]\w*)((?:[.:]+\w+)*)(?:\s+(.*))?$", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]|]+")
NOTHING = ("bar", "fence", "elect", "ret")  # to be done, where threads go in step


def run_kernel(assembly: str, threads: int, arrays: list[np.ndarray]) -> None:
    """Runs one thread block of a kernel on its parameters, arrays that it may write to."""
    body = assembly[assembly.index("{", assembly.index(".entry")) + 1 : assembly.index("\n}")]
    parameters = re.findall(r"\.param\b[^,)]*?(\w+)(?=[,\n)])", assembly[: assembly.index("{")])
    machine = Machine(threads, [x.view(np.uint8).reshape(-1) for x in arrays])
    for nth, name in enumerate(parameters):
        machine.known[name] = np.full(threads, nth + 1 << 32, np.uint64)
    machine.run(body)


def run_inline(program: str, *given: np.ndarray, outputs: int = 1) -> list[np.ndarray]:
    """Returns what a program of inline assembly makes, `$0` and so on, of the registers `u32[n]` behind those."""
    machine = Machine(len(given[0]), [])
    machine.known |= {f"${outputs + i}": x.astype(np.uint64) for i, x in enumerate(given)}
    machine.run(program)
    return [machine.known[f"${i}"].astype(np.uint32) for i in range(outputs)]


class Machine:
    """The registers of some threads by name, as 64 bits each, and the memories that they reach."""

    def __init__(self, threads: int, memories: list[np.ndarray]):
        self.threads, self.memories, self.shared = threads, memories, np.zeros(2 * SHARED, np.uint8)
        self.known = {"%tid.x": np.arange(threads, dtype=np.uint64)}

    def run(self, text: str) -> None:
        text = re.sub(r"//.*|^\s*\.[a-z].*$|^\$\w+:|^\s*[{}]\s*$|^\{", "", text, flags=re.MULTILINE)
        for statement in (part.strip() for part in text.split(";")):
            if statement:
                match = STATEMENT.match(statement)
                assert match and match[1] is None, f"no such statement: {statement}"
                operands = [x.strip() for x in OPERAND.findall(match[4] or "") if x.strip()]
                self.step(match[2], match[3].replace(":", ".").split(".")[1:], operands)

    def read(self, operand: str) -> np.ndarray:
        if operand in self.known:
            return self.known[operand]
        if operand.startswith("__dynamic"):
            return np.full(self.threads, SHARED, np.uint64)
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(self.threads, number & (2**64 - 1), np.uint64)

    def place(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return self.read(base) + np.uint64(int(offset or 0))

    def memory(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes that all threads reach, and where in those."""
        (nth,) = set((place >> np.uint64(32)).tolist())
        return self.memories[nth - 1] if nth else self.shared, (place & np.uint64(2**32 - 1)).astype(np.int64)

    def step(self, op: str, modifiers: list[str], operands: list[str]) -> None:
        if op in NOTHING:
            return
        kind = modifiers[-1] if modifiers else ""
        bits = int(match[1]) if (match := re.fullmatch(r"[bus](\d+)", kind)) else 32
        if op in ("ld", "st"):
            self._move(op, modifiers, bits // 8, operands)
        elif op in ("ldmatrix", "stmatrix"):
            self._move_matrices(op, modifiers, operands)
        elif op == "mma":
            self._multiply_matrices(modifiers, operands)
        elif op == "mov" and operands[0].startswith("{"):
            names, value = operands[0].strip("{}").split(","), self.read(operands[1])
            for nth, name in enumerate(names):
                each = bits // len(names)
                self.known[name.strip()] = value >> np.uint64(nth * each) & np.uint64(2**each - 1)
        elif op == "mov" and operands[1].startswith("{"):
            parts = [self.read(x.strip()) for x in operands[1].strip("{}").split(",")]
            self.known[operands[0]] = sum(x << np.uint64(i * bits // len(parts)) for i, x in enumerate(parts))
        else:
            target, *given = operands
            made = self.compute(op, modifiers, kind, [self.read(x) for x in given])
            wide = 64 if "wide" in modifiers else bits
            self.known[target] = made & np.uint64(2**wide - 1)

    def compute(self, op, modifiers, kind, given) -> np.ndarray:
        if op == "cvt" and kind == "f32" and (pair := NUMBERS.keys() & {*modifiers} - {"f32"}):
            dtype = NUMBERS[pair.pop()]
            halves = [x.astype(np.uint32).view(np.float32).astype(dtype).view(np.uint16) for x in given]
            return halves[0].astype(np.uint64) << np.uint64(16) | halves[1].astype(np.uint64)
        if kind in NUMBERS:
            return self._compute_numbers(op, NUMBERS[kind], given)
        if op == "prmt":
            return _permute_bytes(*(x.astype(np.uint32) for x in given)).astype(np.uint64)
        if op == "lop3":
            a, b, c, table = given
            terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8)]
            return np.bitwise_or.reduce([x for i, x in enumerate(terms) if int(table[0]) >> i & 1])
        if op == "shfl":
            return given[0].reshape(-1, 32)[:, [int(given[1][0])]].repeat(32, axis=1).reshape(-1)
        two = {
            "mov": np.copy, "cvta": np.copy, "cvt": np.copy, "add": np.add, "sub": np.subtract,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift,
            "shr": np.right_shift, "mul": np.multiply, "mad": lambda a, b, c: a * b + c, "rem": np.remainder,
            "div": np.floor_divide, "bfe": lambda a, first, count: a >> first & (np.uint64(1) << count) - np.uint64(1),
        }  # fmt: skip
        assert op in two and "hi" not in modifiers, f"no such instruction: {op}.{'.'.join(modifiers)}"
        return two[op](*given)

    def _compute_numbers(self, op, dtype, given) -> np.ndarray:
        halves = [x.astype(np.uint32).view(dtype).reshape(self.threads, -1).astype(np.float64) for x in given]
        with np.errstate(all="ignore"):
            made = {
                "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax,
                "fma": lambda a, b, c: a * b + c,
            }[op](*halves)  # fmt: skip
            return made.astype(dtype).view(np.uint32).reshape(-1).astype(np.uint64)

    def _move(self, op, modifiers, size, operands) -> None:
        (place,) = (x for x in operands if x.startswith("["))
        (registers,) = (x for x in operands if not x.startswith("["))
        names = [x.strip() for x in registers.strip("{}").split(",")]
        if "param" in modifiers:
            self.known[names[0]] = self.place(place)
            return
        memory, first = self.memory(self.place(place))
        assert not (first % (size * len(names))).any(), f"misaligned: {operands}"
        for nth, name in enumerate(names):
            at = (first + nth * size)[:, None] + np.arange(size)
            if op == "ld":
                padded = np.pad(memory[at], ((0, 0), (0, 8 - size)))
                self.known[name] = np.ascontiguousarray(padded).view(np.uint64)[:, 0]
            else:
                value = np.ascontiguousarray(np.broadcast_to(self.read(name), self.threads))
                memory[at] = value.view(np.uint8).reshape(-1, 8)[:, :size]

    def _move_matrices(self, op, modifiers, operands) -> None:
        """Of 8 x 8 numbers of 16 bits: a lane says where a row is, and four hold it, or if transposed a column."""
        (place,) = (x for x in operands if x.startswith("["))
        (registers,) = (x for x in operands if x.startswith("{"))
        names = [x.strip() for x in registers.strip("{}").split(",")]
        memory, first = self.memory(self.place(place))
        lane, warp = np.arange(self.threads) % 32, np.arange(self.threads) // 32
        for nth, name in enumerate(names):
            rows = lane[:, None] // 4, 2 * (lane[:, None] % 4) + np.arange(2)
            row, column = rows[::-1] if "trans" in modifiers else rows
            at = first[(warp * 32 + nth * 8)[:, None] + row] + 2 * column
            at = (at[..., None] + np.arange(2)).reshape(-1, 4)
            if op == "ldmatrix":
                self.known[name] = np.ascontiguousarray(memory[at]).view(np.uint32)[:, 0].astype(np.uint64)
            else:
                memory[at] = self.read(name).astype(np.uint32)[:, None].view(np.uint8)

    def _multiply_matrices(self, modifiers, operands) -> None:
        """Of 16 x 16 numbers of 16 bits and 16 x 8, in registers of a warp, with a sum of float32."""
        assert modifiers[:2] == ["sync", "aligned"] and modifiers[2:4] == ["m16n8k16", "row"], modifiers
        dtype = {"bf16": jnp.bfloat16, "f16": np.float16}[modifiers[-2]]
        names = [[x.strip() for x in operand.strip("{}").split(",")] for operand in operands]
        lane = np.arange(32)
        lines, pairs = lane[:, None] // 4, 2 * (lane[:, None] % 4) + np.arange(2)

        def matrix(registers, dtype, places, shape):
            """The numbers of each warp, of the registers and where each has its own: rows and columns by lane."""
            found = np.zeros((self.threads // 32, *shape), np.float32)
            for name, (row, column) in zip(registers, places, strict=True):
                numbers = self.read(name).astype(np.uint32).view(dtype).reshape(-1, 32, 4 // np.dtype(dtype).itemsize)
                found[:, row, column] = numbers
            return found

        halves = [(i, j) for j in (0, 8) for i in (0, 8)]
        left = matrix(names[1], dtype, [(lines + i, pairs + j) for i, j in halves], (16, 16))
        right = matrix(names[2], dtype, [(pairs + i, lines) for i in (0, 8)], (16, 8))
        places = [(lines + i, pairs[:, [j]]) for i in (0, 8) for j in range(2)]
        total = left @ right + matrix(names[3], np.float32, places, (16, 8))
        for name, (row, column) in zip(names[0], places, strict=True):
            self.known[name] = np.ascontiguousarray(total[:, row, column]).view(np.uint32).reshape(-1).astype(np.uint64)


def _permute_bytes(a: np.ndarray, b: np.ndarray, choice: np.ndarray) -> np.ndarray:
    of_both = np.stack([np.ascontiguousarray(x)[:, None].view(np.uint8) for x in (a, b)], axis=1).reshape(len(a), 8)
    chosen = [int(choice[0]) >> 4 * i & 15 for i in range(4)]
    signs = (of_both.view(np.int8) >> 7).view(np.uint8)
    picked = np.stack([(signs if i & 8 else of_both)[:, i & 7] for i in chosen], axis=1)
    return np.ascontiguousarray(picked).view(np.uint32)[:, 0]

"""Starts processes that know each other, and hears what they print."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

import jaxkv

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK += " --xla_cpu_parallel_codegen_split_count=1"


def start(script, folder, *arguments, count=2, devices=2):
    """Starts processes of `python script number port folder *arguments`, with so many devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(jaxkv.__file__).parents[1])}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices} {QUICK}"
    return [Process(script, i, [port, folder, *map(str, arguments)], environment) for i in range(count)]


class Process(subprocess.Popen):
    """One of them, and what it has printed so far."""

    def __init__(self, script, number, arguments, environment):
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (it is read to the end)
        command = [sys.executable, script, str(number), *arguments]
        super().__init__(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)

    @property
    def text(self):
        return os.pread(self.log.fileno(), 2**28, 0).decode()


def ended(processes, seconds=300):
    """What each has printed. None is left behind."""
    texts = []
    try:
        for process in processes:
            process.wait(timeout=seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            texts.append(process.text)
            process.log.close()
    return texts


def said(text, name):
    return re.findall(rf"^{name}: (.*)$", text, re.MULTILINE)


def last_words(text):
    """The last line, in which a process says why it ends."""
    return text.rstrip().rpartition("\n")[2]

"""Renders a chat template that somebody else wrote: in jinja2's sandbox, in a process of its own with limits.

A sandbox keeps a template from Python's objects. It does not keep it from looping for ever or filling the memory; a
process can be given so much of both, and be ended.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

CPU_SECONDS = 0.5  # of one rendering; templates take milliseconds
MEMORY = 256 << 20  # bytes of address space
MOST_TEXT = 8 << 20  # characters
PATIENCE = 30.0  # seconds until the process counts as lost, on a machine that is busy

# It is run by an interpreter that knows nothing of jaxkv. A line of JSON each way.
WORKER = r"""
import json, signal, sys
header = json.loads(sys.stdin.readline())
sys.path[:] = header["path"]
try:
    import datetime
    import jinja2, jinja2.ext, jinja2.sandbox
except ImportError:
    print(json.dumps({"missing": "jinja2"}), flush=True)
    sys.exit()
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (header["memory"],) * 2)
except (ImportError, ValueError, OSError):
    resource = None

def limit():
    # A Python handler is called again and again, should a template catch the first call. What runs in C does not hear
    # it, and is ended by the system a second or two later.
    if timed:
        signal.setitimer(signal.ITIMER_PROF, header["seconds"], 0.1)
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 2, hard))

class Generation(jinja2.ext.Extension):
    tags = {"generation"}
    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

def refuse(message):
    raise jinja2.TemplateError(message)

def dumps(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj, attribute):
        raise jinja2.sandbox.SecurityError(f"it reaches for {attribute}, which is not for templates")

env = Sandbox(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
env.filters["tojson"] = dumps
env.globals["raise_exception"] = refuse
env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
timed = hasattr(signal, "setitimer")

class TooLong(BaseException):
    pass

def stop(number, frame):
    raise TooLong

def render(variables):
    size, chunks = 0, []
    for chunk in template.generate(**variables):
        chunks.append(chunk)
        size += len(chunk)
        if size > header["most"]:
            raise MemoryError
    return "".join(chunks)

template = None
if timed:
    signal.signal(signal.SIGPROF, stop)
for line in sys.stdin:
    variables = json.loads(line)
    try:
        limit()
        if template is None:
            template = env.from_string(header["template"])
        answer = {"text": render(variables)}
    except TooLong:
        answer = {"error": "it takes too long"}
    except MemoryError:
        answer = {"error": "it takes too much memory"}
    except RecursionError:
        answer = {"error": "it is nested too deeply"}
    except BaseException as error:
        answer = {"error": (type(error).__name__ + ": " + " ".join(str(error).split()))[:300]}
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        print(json.dumps(answer), flush=True)
    except BaseException:
        print(json.dumps({"error": "it takes too much memory"}), flush=True)
"""


class ChatTemplate:
    """A template and the process that renders it, which is started by the first rendering and lives on.

    Args:
      source: the template.
      where: whose it is, in errors.
    """

    def __init__(self, source: str, where: str):
        self.source, self.where = source, where
        self._process: subprocess.Popen | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._lock = threading.Lock()

    def render(self, variables: Mapping[str, Any]) -> str:
        """Returns the text.

        Raises:
          ValueError: the template is wrong, refuses what it is given, or takes too long or too much memory.
          ModuleNotFoundError: jinja2 is not installed.
        """
        try:
            line = json.dumps(dict(variables))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"Messages and what else a chat template is given must be what JSON can say: {error}."
            ) from None
        with self._lock:
            answer = self._ask(line)
        if "missing" in answer:
            raise ModuleNotFoundError("Chat templates need the extra 'hf', for jinja2: pip install 'jaxkv[hf]'.")
        if "error" in answer:
            raise ValueError(f"The chat template of {self.where} fails: {str(answer['error']).rstrip('.')}.")
        return answer["text"]

    def _ask(self, line: str) -> dict[str, Any]:
        process = self._process if self._process is not None and self._process.poll() is None else self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = self._answers.get(timeout=PATIENCE)
        except (OSError, queue.Empty):
            answer = ""
        if answer:
            return json.loads(answer)
        self.close()  # it was ended, by its own limits or because it does not answer
        return {"error": "it takes too long or too much memory"}

    def _start(self) -> subprocess.Popen:
        self.close()
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._process, self._answers = process, queue.Queue()
        threading.Thread(target=_read, args=(process, self._answers), daemon=True).start()
        header = {
            "path": sys.path,
            "template": self.source,
            "memory": MEMORY,
            "seconds": CPU_SECONDS,
            "most": MOST_TEXT,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(header) + "\n")
        process.stdin.flush()
        return process

    def close(self) -> None:
        """Ends the process; the next rendering starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing):
        if not is_finalizing():  # else the process ends by itself, for its input does
            self.close()


def _read(process: subprocess.Popen, answers: "queue.Queue[str]") -> None:
    """Hands on what the process says, line by line, and "" when it is gone."""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            answers.put(line)
    except ValueError:  # closed meanwhile
        pass
    answers.put("")

"""A process that compiles grammars on trial, each in a child process that ends at its limits of time and memory.

It is a program of its own: ``python -m replicas.grammar_process DESCRIPTOR``. The descriptor is a Unix socket. Its
first line is the number of bytes of xgrammar's tokenizer information, which follows. After that each message brings
another socket, for one trial: a line with the child's process id goes out, a line with the job comes in, and a line
with the verdict goes out. When the other end of a socket closes, the trial or the whole process ends. It imports
xgrammar, but neither vLLM nor what xgrammar itself imports and does not need to compile, so that it starts in a quarter
of a second and not in several.
"""

import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

UNUSED = ("torch", "transformers")
"""Packages that xgrammar imports for its masks and for tokenizers of others. They cost 2 s and 200 MiB."""

NICE = 10
"""Trials give way to the engine's steps."""

THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Number of threads of a compilation. vLLM has eight."""

OUT_OF_MEMORY = ("std::bad_alloc", "Resource temporarily unavailable")
"""Parts of messages of errors of C++ about memory, for objects and for threads."""

GRACE_S = 5.0
"""Seconds after the limit within which the other end of the socket closes it. After them the child ends by itself."""


class Unused(ModuleType):
    """In place of a package of `UNUSED`: each of its names is a class that takes any arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None})


def compiler_alone() -> ModuleType:
    """Import xgrammar without the packages of `UNUSED`, and return it."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi, on which xgrammar is built, can do without it
    importlib.import_module("tvm_ffi")
    sys.modules.update({name: Unused(name) for name in UNUSED})
    return importlib.import_module("xgrammar")


xgrammar = compiler_alone() if __name__ == "__main__" else ModuleType("xgrammar")


def main(descriptor: int) -> None:
    """Serve trials until the other end of the socket closes."""
    os.nice(NICE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that children leave nothing behind
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=descriptor)
    with channel.makefile("rb") as reader:
        tokenizer = xgrammar.TokenizerInfo.deserialize_json(reader.read(int(reader.readline())).decode())
    channel.sendall(b"\n")
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            channel.close()
            _try(socket.socket(fileno=descriptors[0]), tokenizer)
        os.close(descriptors[0])


def _try(connection: socket.socket, tokenizer: Any) -> None:
    """Compile what the connection asks for, answer, and end this process."""
    connection.sendall(b"%d\n" % os.getpid())
    reader = connection.makefile("rb")
    job = json.loads(reader.readline())
    threading.Thread(target=lambda: os._exit(int(bool(reader.read(1)))), daemon=True).start()
    signal.setitimer(signal.ITIMER_REAL, job["seconds"] + GRACE_S)
    limit = _address_space() + job["bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    begun_s = perf_counter()
    try:
        _compile(job, tokenizer)
        verdict: dict[str, Any] = {"seconds": perf_counter() - begun_s}
    except Exception as error:  # noqa: BLE001 - xgrammar raises several kinds, for a grammar that is not valid
        if isinstance(error, MemoryError) or any(part in str(error) for part in OUT_OF_MEMORY):
            os._exit(1)
        verdict = {"error": str(error)}
    connection.sendall(json.dumps(verdict).encode() + b"\n")
    os._exit(0)


def _compile(job: dict[str, Any], tokenizer: Any) -> None:
    """Do what vLLM's backend does for a grammar of this kind."""
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=THREADS, cache_enabled=False)
    spec = job["spec"]
    match job["kind"]:
        case "json":
            compiler.compile_json_schema(spec, any_whitespace=job["any_whitespace"])
        case "regex":
            compiler.compile_regex(spec)
        case "grammar":
            compiler.compile_grammar(spec)
        case "structural_tag":
            tag = json.loads(spec)
            if "structures" in tag:
                items = [
                    xgrammar.StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
                    for one in tag["structures"]
                ]
                compiler.compile_structural_tag(items, tag["triggers"])
            else:
                compiler.compile_structural_tag(spec)
        case "lark":
            compiler.compile_lark(spec)
        case kind:
            raise ValueError(f"unknown kind {kind!r}")


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[1]))

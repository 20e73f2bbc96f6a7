"""Bounds the time and memory of grammars before the engine compiles them.

A compilation in the engine cannot be stopped. Therefore each grammar that is not surely small is first compiled in a
process that can be ended (`replicas.grammar_process`). If that succeeds within the limits, the engine compiles it too.
The compiled grammar itself is not sent to the engine: xgrammar 0.2.8 can serialize it, but time and size are quadratic
in the number of rules (1,000 optional properties: compiled in 7 s, 635 MB of JSON after 145 s).

It uses these names of vLLM 0.29 (tests/contracts/test_grammar_trials.py checks what they do): XgrammarBackend,
get_structured_output_key, choice_as_grammar, grammar_is_likely_lark, VLLMValidationError.
"""

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, BinaryIO

from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from cluster.api.structured_output_limits import SMALL_S, TO_COMPILE, estimated_s, is_surely_small
from replicas.fair_threads import FairThreads
from replicas.vllm_versions import grammar_tokenizer, lark_grammar

logger = logging.getLogger("ray.serve")

MAX_S = 20.0
"""Maximum seconds of a compilation, with as many threads as in the engine and a low priority."""

MAX_SMALL_S = 1.0
"""Maximum seconds of a trial among the small ones. It goes on among the large ones, from the beginning."""

MAX_BYTES = 1 << 30
"""Maximum bytes of address space of a compilation."""

START_S = 60.0
"""Maximum seconds until the process is ready."""

LARGE_AT_ONCE = max(1, min(2, (os.cpu_count() or 1) // 4))
"""Number of large grammars that are tried at once."""

TRIES = 2
"""Number of processes in which a grammar is tried, if they are killed."""

REMEMBERED = 1024
"""Maximum number of grammars whose verdict is remembered."""


class Exceeded(Enum):
    """The limit at which a trial was ended. The value is for the client."""

    TIME = f"needs more than {MAX_S:g} s"
    MEMORY = f"needs more than {MAX_BYTES >> 20} MiB"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar that was compiled within the limits."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Invalid:
    """A grammar that cannot be compiled."""

    message: str


Verdict = Compiled | Invalid | Exceeded


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a request asks for, as the arguments of xgrammar's compiler: its kind and its text."""

    kind: str
    spec: str
    any_whitespace: bool = True

    @property
    def digest(self) -> bytes:
        """A key of this grammar."""
        return hashlib.sha256(f"{self.kind} {self.any_whitespace} {self.spec}".encode()).digest()

    @property
    def needs_no_trial(self) -> bool:
        """Whether it is surely small."""
        return self.kind == "json" and is_surely_small(self.spec)


class GrammarRejected(VLLMValidationError):  # type: ignore[misc]
    """A request whose grammar cannot be compiled, or not within the limits. vLLM answers it with status 400."""

    def __str__(self) -> str:
        return str(self.args[0])


class TrialCancelled(Exception):
    """Nobody waits for the trial any longer."""


class Trial:
    """One trial. It can be cancelled from another thread."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._lock = threading.Lock()
        self._child: int | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the child process, if there is one. The trial then raises TrialCancelled."""
        with self._lock:
            self._is_cancelled = True
            self._kill()

    def run(self, process: "GrammarProcess", max_s: float, max_bytes: int) -> Verdict:
        """Compile in a child process, and wait for the verdict.

        Raises:
            TrialCancelled: it was cancelled.
            OSError: the process cannot be started.
        """
        for _ in range(TRIES):
            with process.connect() as connection, connection.makefile("rb") as reader:
                connection.settimeout(START_S)
                if self._begin(reader):
                    return self._verdict(connection, reader, max_s, max_bytes)
        raise OSError("the process that compiles grammars on trial is killed each time")

    def _begin(self, reader: BinaryIO) -> bool:
        """Read the child's process id. Return False if the process was killed before it made a child."""
        with suppress(OSError):
            if pid := reader.readline():
                with self._lock:
                    self._child = int(pid)
                return True
        return False

    def _verdict(self, connection: socket.socket, reader: BinaryIO, max_s: float, max_bytes: int) -> Verdict:
        job = {"spec": self._grammar.spec, "kind": self._grammar.kind, "any_whitespace": self._grammar.any_whitespace}
        line = b""
        try:
            if not self._is_cancelled:
                connection.settimeout(max_s)
                connection.sendall(json.dumps(job | {"seconds": max_s, "bytes": max_bytes}).encode() + b"\n")
                line = reader.readline()
        except TimeoutError:
            with self._lock:
                self._kill()
            return Exceeded.TIME
        except OSError:
            pass  # the child was killed
        finally:
            with self._lock:
                self._child = None
        if self._is_cancelled:
            raise TrialCancelled
        if not line:
            return Exceeded.MEMORY
        answer = json.loads(line)
        return Compiled(answer["seconds"]) if "seconds" in answer else Invalid(answer["error"])

    def _kill(self) -> None:
        if self._child is not None:  # its connection is open, so that the id is still its own
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)


class GrammarProcess:
    """The process of `replicas.grammar_process`. It starts with `start_ahead` or the first trial, and ends with this
    process.

    Args:
        tokenizer: returns xgrammar's tokenizer information as JSON.
    """

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id. None: it has not started."""
        return None if self._process is None else self._process.pid

    def start_ahead(self) -> None:
        """Begin to start the process in a thread, so that no trial waits for it."""
        threading.Thread(target=self._start_first, name="grammars", daemon=True).start()

    def connect(self) -> socket.socket:
        """Return a connection to a new child process. Start the process if it does not run.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for _ in range(2):  # the process may have ended since the last trial
                channel = self._channel or self._start()
                try:
                    socket.send_fds(channel, [b"\n"], [theirs.fileno()])
                    return ours
                except OSError:
                    self._stop()
        ours.close()
        raise OSError("the process that compiles grammars on trial ends at once")

    def close(self) -> None:
        """End the process and its children."""
        with self._lock:
            self._stop()

    def _start_first(self) -> None:
        with self._lock:
            if self._channel is not None:
                return
            try:
                self._start()
            except OSError:
                logger.exception("the process that tries grammars did not start; the next trial starts it again")
                self._stop()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "replicas.grammar_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # xgrammar writes warnings that quote the client's pattern
                # Each arena of C's heap reserves address space, which is limited.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1"},
            )
        self._channel = ours
        ours.settimeout(START_S)
        tokenizer = self._tokenizer().encode()
        ours.sendall(b"%d\n" % len(tokenizer) + tokenizer)
        if not ours.recv(1):
            raise OSError("the process that compiles grammars on trial does not start")
        return ours

    def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class GrammarTrials:
    """Tries grammars, small ones apart from large ones, and remembers the verdicts.

    Args:
        backend: vLLM's name of the backend of structured outputs. Only xgrammar's grammars are tried.
        any_whitespace: whether the JSON that matches a schema may have whitespace.
        process: where they are compiled.
        max_s: maximum seconds of a trial.
        max_bytes: maximum address space of a trial.
    """

    def __init__(
        self,
        backend: str,
        process: GrammarProcess,
        *,
        any_whitespace: bool = True,
        max_s: float = MAX_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._backend = backend
        self._any_whitespace = any_whitespace
        self.process = process
        self._max_s = max_s
        self._max_bytes = max_bytes
        self._small, self._large = FairThreads(1), FairThreads(LARGE_AT_ONCE)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def start(self) -> None:
        """Start the process ahead of the first trial, if there can be one."""
        if self._tries:
            self.process.start_ahead()

    @property
    def _tries(self) -> bool:
        return self._backend in ("xgrammar", "auto")

    async def check(self, outputs: Any, tenant: str, field: str) -> float | None:
        """Check that the engine may compile a request's grammar. If the caller is cancelled, the trial ends.

        Args:
            outputs: vLLM's StructuredOutputsParams.
            tenant: whose request it is. Tenants take turns.
            field: the field of the request that has the grammar.

        Returns:
            How long a trial took in seconds, or None if none was necessary.

        Raises:
            GrammarRejected: it cannot be compiled, or not within the limits.
            OSError: trials are not possible.
        """
        grammar = grammar_of(outputs, self._any_whitespace) if self._tries else None
        if grammar is None or grammar.needs_no_trial:
            return None
        match await self._verdict(grammar, tenant):
            case Compiled(seconds):
                return seconds
            case Exceeded() as exceeded:
                raise GrammarRejected(f"{field}: {exceeded.value} {TO_COMPILE}", parameter=field)
            case Invalid(message):
                if self._backend == "auto":
                    return None  # vLLM tries another backend
                raise GrammarRejected(f"{field}: cannot be compiled: {message}", parameter=field)

    async def _verdict(self, grammar: Grammar, tenant: str) -> Verdict:
        if (known := self._verdicts.get(grammar.digest)) is not None:
            return known
        verdict: Verdict = Exceeded.TIME
        if estimated_s(grammar.spec) <= SMALL_S:
            verdict = await self._tried(self._small, grammar, tenant, min(MAX_SMALL_S, self._max_s))
        if verdict is Exceeded.TIME:
            verdict = await self._tried(self._large, grammar, tenant, self._max_s)
        if not isinstance(verdict, Exceeded):  # a busy machine may have exceeded a limit
            self._verdicts[grammar.digest] = verdict
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        return verdict

    async def _tried(self, threads: FairThreads, grammar: Grammar, tenant: str, max_s: float) -> Verdict:
        trial = Trial(grammar)

        def run() -> Verdict:
            # The prompts of one request have the same grammar.
            return self._verdicts.get(grammar.digest) or trial.run(self.process, max_s, self._max_bytes)

        try:
            verdict: Verdict = await asyncio.wrap_future(threads.submit(tenant, run))
        except asyncio.CancelledError:
            trial.cancel()
            raise
        return verdict


def grammar_of(outputs: Any, any_whitespace: bool) -> Grammar | None:
    """Return the grammar of vLLM's StructuredOutputsParams. None: nothing is compiled, or vLLM rejects it."""
    if outputs is None or outputs.all_constraints_none():
        return None
    try:
        kind, spec = get_structured_output_key(outputs)
        if kind is Kind.CHOICE:
            return Grammar("grammar", choice_as_grammar(json.loads(spec)), any_whitespace)
        if kind is Kind.GRAMMAR and grammar_is_likely_lark(spec):
            return Grammar(*lark_grammar(spec), any_whitespace)
    except (ValueError, TypeError, AttributeError):
        return None
    return None if kind is Kind.JSON_OBJECT else Grammar(kind.name.lower(), spec, any_whitespace)


def trials_of(client: Any) -> GrammarTrials:
    """Return the trials of an engine.

    Args:
        client: vLLM's AsyncLLM.
    """
    config = client.vllm_config
    settings = config.structured_outputs_config

    def tokenizer() -> str:
        """What vLLM's backend makes of the tokenizer."""
        backend = XgrammarBackend(
            config,
            tokenizer=grammar_tokenizer(cached_tokenizer_from_config(config.model_config)),
            vocab_size=config.model_config.get_vocab_size(),
        )
        info: str = backend.compiler.compile_regex("a").tokenizer_info.serialize_json()
        return info

    return GrammarTrials(
        settings.backend, GrammarProcess(tokenizer), any_whitespace=not settings.disable_any_whitespace
    )

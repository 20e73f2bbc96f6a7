"""A local cluster on one machine: it starts Redis, Ray and the application, and stops all of their processes.

Ray is not imported before `LocalCluster.start` has set the environment that Ray reads at import.
"""

import errno
import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from cluster.config.models import ReplicaConfig
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import CaesuraError
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.local.haproxy import ENABLE, haproxy_environment
from cluster.local.ports import free_ports
from cluster.local.redis_watch import RedisWatch
from cluster.local.standby import Standby
from cluster.observing.logs import FORMAT_VARIABLE
from cluster.proxy.load_shedding import MAX_IN_FLIGHT_VARIABLE
from cluster.proxy.middleware import IMPORT_PATH

ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""If it is 0, Ray's node has the address 127.0.0.1, and Ray listens there only. Otherwise Ray replaces that address."""

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAYLLM_ENABLE_WORKER_PROCESS_SETUP_HOOK": "0",  # it imports vLLM in every worker, also in those that never need it
    "RAY_enable_worker_prestart": "0",  # idle workers cost memory and, at the start, the time of those that are needed
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # of 15 otherwise: engine and ingress would wait for every other process of the machine
    "MALLOC_ARENA_MAX": "2",  # of glibc's usual eight a core each keeps free pieces: memory grew for hours
    "RAY_JEMALLOC_LIB_PATH": "",  # Ray's own processes are preloaded with it otherwise, and grow even when idle
    "RAY_task_events_report_interval_ms": "0",  # the GCS would keep what Serve's controller waited for, each time
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": IMPORT_PATH,
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "cluster.local.serve_clock.never_back",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""The environment of a local cluster's processes. Variables that the caller has set keep their values."""

MARK = "CAESURA_CLUSTER_ID"
"""Environment variable that marks the processes of one local cluster, whatever their parent is."""

BYTECODE = Path.home() / ".cache" / "caesura" / "bytecode"
"""Directory of compiled Python files, if the caller's environment has PYTHONDONTWRITEBYTECODE."""

TOKEN = Path.home() / ".ray" / "auth_token"
"""The file with the token that Ray's processes demand from each other. Ray makes one that all users can read."""

NAMESPACE = "caesura"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 128 << 20
"""Size of Ray's object store, which is hardly used, since requests and answers are sent inline."""
RAY_STARTS, RAY_GAVE_UP = 3, "timed out during startup"
"""Number of attempts to start Ray, and the text of the error after which it is tried again. On a busy machine, Ray
gives up after half a minute, and its processes continue to run."""

START_SLACK_S = 60.0
"""Seconds that the start may take in addition to ``replicas.start_timeout_s``."""
POLL_S = 0.2
SHUTDOWN_SLACK_S = 5.0
"""Seconds that ingresses may take in addition to `http.shutdown_s` until all requests have ended."""
STOP_TIMEOUT_S = 10.0
"""Seconds for a process to end by itself before it is killed."""
LOG_LINES = 15
"""Number of lines of a log that a failed start shows."""

Step = Callable[[str], AbstractContextManager[None]]
"""A function from a step's name to a context that lasts as long as the step."""


CORES_FOR_TWO = 8
"""Number of cores from which on two ingresses serve, if the configuration does not set their number."""


def ingresses(config: CaesuraConfig, cores: int) -> int:
    """Return the number of ingresses on a machine. With two, requests are served while one of them is replaced."""
    http = config.http
    return http.ingress_replicas if "ingress_replicas" in http.model_fields_set or cores < CORES_FOR_TWO else 2


class StartFailed(CaesuraError):
    """A local cluster did not start. The message has the cause and the last lines of the log."""


class ClusterFailed(CaesuraError):
    """A local cluster lost a part that it cannot do without."""


class LocalCluster:
    """Caesura on one machine, as a context manager. If ``RAY_ADDRESS`` is set, it uses that Ray cluster and does not
    stop it.

    Args:
        config: the configuration. ``redis.url: embedded``, ``http.port: 0`` and a number of ingresses that is not set
            are replaced with actual values.
        step: called for each step of the start and the stop.
        clock: measures deadlines.
        hurried: when it is set, `stop` does not wait for requests in flight.

    Raises:
        StartFailed: ``http.port`` is 0, and ``http.host`` cannot be listened on.
    """

    def __init__(
        self,
        config: CaesuraConfig,
        *,
        step: Step = lambda name: nullcontext(),
        clock: Clock | None = None,
        hurried: threading.Event | None = None,
    ) -> None:
        port = config.http.port or _free_port(config.http.host)
        update = {"port": port, "ingress_replicas": ingresses(config, len(os.sched_getaffinity(0)))}
        self.config = config.model_copy(update={"http": config.http.model_copy(update=update)})
        self._step = step
        self._clock = clock or MonotonicClock()
        self._stack = ExitStack()
        self._mark = uuid.uuid4().hex
        self._attached = "RAY_ADDRESS" in os.environ
        self._family: list[psutil.Process] = []
        self._redis_watch: RedisWatch | None = None
        self._standby: Standby | None = None
        self._serves = False
        """Whether ingresses may have requests in flight."""
        self._hurried = hurried or threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """URL of the HTTP server, without a slash at the end."""
        return f"http://{self.config.http.host}:{self.config.http.port}"

    @property
    def logs(self) -> Path:
        """Folder of the ingresses', replicas' and controller's logs on this machine. The cluster has to run."""
        import ray

        return Path("/tmp/ray", ray.get_runtime_context().get_session_name(), "logs", "serve")

    @property
    def metrics_addresses(self) -> list[str]:
        """`host:port` of each node's metrics, for Prometheus. The cluster has to run."""
        import ray

        return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]

    @property
    def processes(self) -> list[psutil.Process]:
        """The running processes of this cluster, without the caller's."""
        return _marked(self._mark)

    def start(self) -> None:
        """Start the cluster, and return when a model answers.

        Raises:
            StartFailed: the cluster did not start. Everything that was started has been stopped.
        """
        self._check_port()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything that was started. Processes that do not end in time are killed. A second call has no
        effect.
        """
        if self._serves:
            self._serves = False
            with self._step("requests in flight"):
                self._end_requests()
        with self._step("stop"):
            self._family = self.processes
            self._stack.close()

    def check(self) -> None:
        """Check the parts that are watched in this process.

        Raises:
            ClusterFailed: the embedded Redis has ended and is not restarted.
        """
        if self._redis_watch is not None and self._redis_watch.failure is not None:
            raise ClusterFailed(self._redis_watch.failure)

    def _start(self) -> None:
        self._enter_environment()
        if not self._attached and ENABLE not in os.environ:  # otherwise others than our processes may have the port
            standby = Standby(self.config.http.host, self.config.http.port, self._clock)
            self._standby = self._stack.enter_context(standby)
        with self._step("tool statistics store"):
            self._start_store()
        with self._step("Ray"):
            self._start_ray()
        with self._step("application"):
            self._run_application()
        deadline_s = self._clock.now_s() + self.config.replicas.start_timeout_s + START_SLACK_S
        models = (f"{_number(own.replicas)} x model {model}" for model, own in self.config.served.items())
        with self._step(", ".join(models)):
            self._await_running(deadline_s)
        self._serves = True
        with self._step("first answer"):
            self._await_ready(deadline_s)

    def _check_port(self) -> None:
        """Check that nobody listens on the port, since the ingresses of two clusters could share it.

        Raises:
            StartFailed: it cannot be listened on.
        """
        _listener(self.config.http.host, self.config.http.port).close()

    def _enter_environment(self) -> None:
        before = dict(os.environ)
        wanted, http = {**ENVIRONMENT, ONE_MACHINE: "0"}, self.config.http
        if os.environ.get(ENABLE) == "1":
            wanted |= haproxy_environment(self.config, self._stack.enter_context(TemporaryDirectory("-caesura")))
        for name, value in wanted.items():
            os.environ.setdefault(name, value)
        os.environ[MARK] = self._mark
        os.environ[FORMAT_VARIABLE] = self.config.logs.format
        behind = http.ingress_replicas if os.environ.get(ENABLE) == "0" else 1  # ingresses behind one process
        os.environ[MAX_IN_FLIGHT_VARIABLE] = str(http.max_concurrent_requests * behind)
        if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
            # Otherwise each of a dozen processes would compile torch and vLLM, which takes half of the start.
            os.environ.setdefault("PYTHONPYCACHEPREFIX", str(BYTECODE))
            sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]
        self._stack.callback(restore_environment, os.environ, before)
        if not self._attached:
            self._stack.callback(self._end_stragglers)

    def _start_store(self) -> None:
        store = self.config.redis
        if store.url == "embedded":
            path = None if store.path is None else Path(store.path)
            redis = self._stack.enter_context(EmbeddedRedis(path))
            self._redis_watch = self._stack.enter_context(RedisWatch(redis))
            self.config = self.config.model_copy(update={"redis": store.model_copy(update={"url": redis.url})})

    def _start_ray(self) -> None:
        import ray

        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if self._attached:
            ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        else:
            others = self.processes
            for left in reversed(range(RAY_STARTS)):
                try:
                    self._start_own_ray()
                    break
                except Exception as error:
                    if not left or RAY_GAVE_UP not in str(error):
                        raise
                _kill([process for process in self.processes if process not in others])
        self._stack.callback(ray.shutdown)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if callable(handler):  # the caller's handler is restored, since Ray's ends the process at once
                    signal.signal(number, handler)

    def _start_own_ray(self) -> None:
        import ray
        from ray._private import ray_constants

        if os.environ[ONE_MACHINE] == "0":  # Ray has read the environment of this process before it was set
            self._stack.callback(setattr, ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)
            ray_constants.ENABLE_RAY_CLUSTER = False
        make_token_private(TOKEN)
        # "local" starts a new Ray, even if another one runs on this machine.
        ray.init(
            "local",
            num_cpus=self._cpus(),
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=LOOPBACK,
        )

    def _cpus(self) -> int:
        """Return Ray's number of logical CPUs, which is the number that the deployments reserve.

        If the machine has fewer, the replicas share them.
        """
        every = [own.replicas for own in self.config.served.values()]
        reserved = sum(replicas.servers * replicas.cpus * (1 + replicas.devices) for replicas in every)
        return max(1, math.ceil(reserved + self.config.http.ingress_replicas))

    def _run_application(self) -> None:
        from ray import serve

        with _quiet():
            from cluster.app import APPLICATION, build

        http = self.config.http
        if self._attached:
            self._stack.callback(serve.delete, APPLICATION)
        serve.start(
            proxy_location="HeadOnly" if ENABLE in os.environ else "Disabled",
            http_options={"host": http.host, "port": http.port},
            logging_config={
                "log_level": "WARNING",
                "enable_access_log": False,
                "encoding": "JSON" if self.config.logs.format == "json" else "TEXT",
            },
        )
        target = serve.RunTarget(target=build(self.config), name=APPLICATION, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def _end_requests(self) -> None:
        """Let ingresses accept no more requests, and wait until those in flight have ended."""
        from ray import serve

        from cluster.app import APPLICATION

        if self._standby is not None:
            self._standby.stop()
        within_s = self.config.http.shutdown_s
        deadline_s = self._clock.now_s() + within_s + SHUTDOWN_SLACK_S
        try:
            calls = serve.get_app_handle(APPLICATION).broadcast("shut_down", within_s)
            while self._clock.now_s() < deadline_s and not self._hurried.is_set():
                with suppress(TimeoutError):
                    calls.results(timeout_s=POLL_S)
                    return
        except Exception as error:  # noqa: BLE001 - the processes end in any case
            logger.warning("requests in flight could not be ended in order: %s", error)

    def _await_running(self, deadline_s: float) -> None:
        from ray import serve

        from cluster.app import APPLICATION

        while self._clock.now_s() < deadline_s:
            state = serve.status().applications.get(APPLICATION)
            if state is not None and state.status == "RUNNING":
                return
            if state is not None and (state.status == "DEPLOY_FAILED" or _keeps_failing(state)):
                raise StartFailed(f"the application failed to start\n{self._complaints(state)}")
            time.sleep(POLL_S)
        raise StartFailed(
            f"the model was not loaded in time\n{self._complaints(serve.status().applications[APPLICATION])}"
        )

    def _await_ready(self, deadline_s: float) -> None:
        told = "no connection"
        while self._clock.now_s() < deadline_s:
            try:
                answer = httpx.get(f"{self.url}/ready", timeout=STOP_TIMEOUT_S)
            except httpx.TransportError as error:
                told = str(error)
            else:
                if answer.is_success:
                    return
                told = answer.text
            time.sleep(POLL_S)
        raise StartFailed(f"{self.url}/ready does not answer 200: {told}")

    def _complaints(self, state: Any) -> str:
        """Return Serve's messages about the deployments, and the end of the newest replica's log."""
        lines = [
            f"{name}: {deployment.message}" for name, deployment in state.deployments.items() if deployment.message
        ]
        youngest = max(self.logs.glob("replica_*.log"), key=lambda path: path.stat().st_mtime, default=None)
        if youngest is not None:
            tail = youngest.read_text(errors="replace").splitlines()[-LOG_LINES:]
            lines += [f"the end of {youngest}:", *tail]
        return "\n".join(lines)

    def _end_stragglers(self) -> None:
        _, alive = psutil.wait_procs({*self._family, *self.processes}, timeout=STOP_TIMEOUT_S)
        _kill(alive)


def make_token_private(path: Path) -> None:
    """Make Ray's token readable for this user only, and make a new one if there is none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:  # only this user can enter it
        new = Path(folder, path.name)
        new.touch(0o600)
        new.write_text(secrets.token_hex(32))
        with suppress(FileExistsError):
            path.hardlink_to(new)  # never a half-written file, and never instead of another one
    with suppress(PermissionError):  # another user's, which Ray reads or refuses itself
        path.chmod(0o600)


def _number(replicas: ReplicaConfig) -> str:
    return f"{replicas.least} to {replicas.most}" if replicas.is_elastic else str(replicas.count)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)


def _keeps_failing(state: Any) -> bool:
    """Return whether a replica has failed to start. On a local cluster, the next attempt would fail for the same
    reason.
    """
    return any(
        deployment.status == "UNHEALTHY" or "failed to start" in deployment.message
        for deployment in state.deployments.values()
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log lines of vLLM and Serve in this process while they are imported, as they would be on a
    terminal.
    """
    for name in ("ray.serve", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    before = os.environ.get("VLLM_LOGGING_LEVEL")
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    try:
        yield
    finally:
        if before is None:
            del os.environ["VLLM_LOGGING_LEVEL"]
        else:
            os.environ["VLLM_LOGGING_LEVEL"] = before


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes that inherited the mark, and their descendants.

    A process that sets its title may overwrite its environment, as Ray's agents do. Their parent still has the mark.
    """
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found |= {process, *process.children(recursive=True)}
    return list(found)


def restore_environment(environment: MutableMapping[str, str], before: Mapping[str, str]) -> None:
    """Undo all changes since ``before``. Variables that stay are never missing, since other threads may read them."""
    for name in environment.keys() - before.keys():
        del environment[name]
    environment.update(before)


def _free_port(host: str) -> int:
    """Return a free port.

    Raises:
        StartFailed: the host cannot be listened on.
    """
    try:
        return free_ports(1, host)[0]
    except OSError as error:
        raise _cannot_listen(host, 0, error) from error


def _listener(host: str, port: int) -> socket.socket:
    """Listen on a port.

    Raises:
        StartFailed: it cannot be listened on.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> StartFailed:
    if error.errno == errno.EADDRINUSE:
        return StartFailed(
            f"http.port: {host}:{port} is in use; end the program that listens there, or set another port"
        )
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
    return StartFailed(f"http.host: {host}:{port} cannot be listened on: {why}")

"""The configuration: its sources and their order, the complaints, the YAML and the schema, and `caesura config`."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from cluster import cli
from cluster.config.loader import RENAMED, _known_keys, config_schema, dump_config, load_config, parse_assignment
from cluster.config.models import RESERVED_ENGINE_KWARGS, TINY
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import ConfigError, TraceError
from cluster.core.registry import POLICIES, ROUTERS
from replicas.settings import unknown_engine_arguments


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "caesura.yaml"


def complaints(path: Path | None, text: str = "", environment: Any = None, overrides: Any = None) -> list[str]:
    if path is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(path, environment or {}, overrides)
    return str(refused.value).splitlines()


def test_nothing_said_is_the_built_in_model(file: Path) -> None:
    config = load_config(None, {})
    assert config == CaesuraConfig()
    assert config.model.source == TINY
    file.write_text("", encoding="utf-8")
    assert load_config(file, {}) == config
    file.write_text("# all commented out\nhttp:\npolicy:\n", encoding="utf-8")
    assert load_config(file, {}) == config


def test_flags_override_variables_override_the_file(file: Path) -> None:
    file.write_text("http: {port: 1, host: a, max_json_depth: 10}\nengine: {max_num_seqs: 4}\n", encoding="utf-8")
    environment = {"CAESURA__HTTP__PORT": "2", "CAESURA__HTTP__HOST": "b", "PATH": "/bin", "CAESURA_OTHER": "x"}
    config = load_config(file, environment, {"http.port": 3, "engine.max_model_len": 64})
    assert (config.http.port, config.http.host, config.http.max_json_depth) == (3, "b", 10)
    assert config.engine == {"max_num_seqs": 4, "max_model_len": 64}


@pytest.mark.parametrize(
    ("name", "value", "path", "expected"),
    [
        ("CAESURA__HTTP__PORT", "9000", "http.port", 9000),
        ("caesura__Http__Port", "9000", "http.port", 9000),
        ("CAESURA__HTTP__ADMIN", "no", "http.admin", False),
        ("CAESURA__SLO__TTFT_S", "null", "slo.ttft_s", None),
        ("CAESURA__SLO__TTFT_S", "1e1", "slo.ttft_s", 10.0),
        ("CAESURA__MODEL__ID", "org/name", "model.id", "org/name"),
        ("CAESURA__REDIS__URL", "redis://:secret@host:6379/0", "redis.url", "redis://:secret@host:6379/0"),
        ("CAESURA__POLICY__PARAMETERS", "{turn_value: 0.2}", "policy.parameters", {"turn_value": 0.2}),
        ("CAESURA__ENGINE__MAX_MODEL_LEN", "4096", "engine", {"max_model_len": 4096}),
    ],
)
def test_variables_are_yaml(name: str, value: str, path: str, expected: Any) -> None:
    found: Any = load_config(None, {name: value})
    for key in path.split("."):
        found = getattr(found, key)
    assert found == expected


VARIABLES = [
    ("CAESURA__HTTP__PROT", "1", "CAESURA__HTTP__PROT: http.prot: unknown key; did you mean http.port? (got 1)"),
    ("CAESURA__HTTP__PORT", "no", "CAESURA__HTTP__PORT: http.port: must not be true or false (got False)"),
    ("CAESURA__REPLICAS__COUNT", "two", "CAESURA__REPLICAS__COUNT: replicas.count: input should be a valid integer"),
    ("CAESURA__COLOUR", "red", "CAESURA__COLOUR: colour: unknown key; "),
    ("CAESURA__", "1", "CAESURA__: names no key"),
    ("CAESURA__HTTP____PORT", "1", "CAESURA__HTTP____PORT: names no key"),
    ("CAESURA__HTTP__PORT", "[1", "CAESURA__HTTP__PORT: not a YAML value (got '[1')"),
    ("CAESURA__HTTP__HOST", "2024-13-45", "CAESURA__HTTP__HOST: not a YAML value (got '2024-13-45')"),
    ("CAESURA__MODEL__ID__X", "1", "CAESURA__MODEL__ID__X: model.id: is not a section (got 'm')"),
]


@pytest.mark.parametrize(("name", "value", "complaint"), VARIABLES, ids=[row[0] for row in VARIABLES])
def test_wrong_variables_are_named(file: Path, name: str, value: str, complaint: str) -> None:
    (line,) = complaints(file, "model: {id: m}\n", {name: value})
    assert line.startswith(complaint)


FILES: dict[str, tuple[str, str]] = {
    "unknown key": ("http:\n  prot: 5\n", "http.prot: unknown key; did you mean http.port? (got 5, line 2)"),
    "unknown section": (
        "colours: {}\n",
        "colours: unknown key; there are: auth, batches, cost_model, engine, http, limits, logs, metrics, model, "
        "model_routing, models, policy, predictor, programs, records, redis, replicas, router, slo, tenants, tools, "
        "tracing (got {}, line 1)",
    ),
    "out of range": (
        "http: {port: 70000}\n",
        "http.port: input should be less than or equal to 65535 (got 70000, line 1)",
    ),
    "wrong type": ("replicas: {count: many}\n", "replicas.count: input should be a valid integer"),
    "a least number without a largest": (
        "replicas:\n  min: 2\n",
        "replicas.min: needs max, the largest number of replicas (got 2, line 2)",
    ),
    "bounds of groups of ranks": (
        "replicas: {max: 2, data_parallel_size: 2}\n",
        "replicas.data_parallel_size: needs a fixed count: groups of ranks do not follow the load (got 2, line 1)",
    ),
    "bounds the wrong way round": ("replicas: {min: 3, max: 2}\n", "replicas.min: exceeds max (2) (got 3, line 1)"),
    "a number and bounds": (
        "replicas: {count: 2, max: 4}\n",
        "replicas.count: is the number of replicas if it does not follow the load; remove it or max (got 2, line 1)",
    ),
    "not a section": ("http: 5\n", "http: must be a section of keys and values (got 5, line 1)"),
    "unknown policy": (
        "policy: {name: best}\n",
        f"policy.name: unknown policy 'best'; choose one of: {', '.join(POLICIES)} (got 'best', line 1)",
    ),
    "unknown router": ("router: {name: best}\n", "router.name: unknown router 'best'; choose one of: "),
    "policy parameter": (
        "policy:\n  name: continuum\n  parameters:\n    delta: 2\n",
        "policy.parameters.delta: input should be less than 1 (got 2, line 4)",
    ),
    "unknown policy parameter": (
        "policy: {parameters: {turn_vlaue: 2}}\n",
        "policy.parameters.turn_vlaue: unknown key; did you mean policy.parameters.turn_value? (got 2, line 1)",
    ),
    "parameter of a policy without any": (
        "policy: {name: vllm, parameters: {delta: 0.1}}\n",
        "policy.parameters.delta: unknown key (got 0.1, line 1)",
    ),
    "engine argument of another type": (
        "engine:\n  max_num_seqs: many\n",
        "engine.max_num_seqs: must be integer or null (got 'many', line 2)",
    ),
    "engine argument of another type, of a further model": (
        "models:\n  large:\n    engine:\n      dtype: float23\n",
        'models.large.engine.dtype: must be "auto" or "half" or "float16" or "bfloat16" or "float" or "float32" '
        "(got 'float23', line 4)",
    ),
    "reserved engine argument": (
        "engine:\n  scheduler_cls: x\n",
        "engine.scheduler_cls: is decided by policy.name; set that instead (line 2)",
    ),
    "disaggregated prefill by vLLM's connector": (
        "engine:\n  kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_both}\n",
        "engine.kv_transfer_config: separates prefill from decode (NixlConnector), which does not work with holds "
        "(ADR 17); use replicas.disk_tier to move KV between replicas",
    ),
    "disaggregated prefill by roles": (
        "engine:\n  kv_transfer_config: {kv_connector: MultiConnector, kv_role: kv_producer}\n",
        "engine.kv_transfer_config: separates prefill from decode (kv_role kv_producer), which",
    ),
    "transfers that other keys decide": (
        "models:\n  large:\n    engine:\n      kv_transfer_config: {kv_connector: OffloadingConnector}\n",
        "models.large.engine.kv_transfer_config: is decided by replicas.cpu_offload_bytes, replicas.disk_tier and "
        "replicas.kv_store; set these",
    ),
    "key that is no text": ("5: x\n", "5: keys should be strings"),
    "long value": ("http: {port: " + "x" * 500 + "}\n", "http.port: input should be a valid integer"),
}


TIERS: list[tuple[str, str]] = [
    ("disk_tier: {path: kv, bytes: 1048576}", "replicas.disk_tier.path: "),
    ("disk_tier: {path: /kv}", "replicas.disk_tier.bytes: "),
    ("disk_tier: {path: /kv, bytes: 5}", "replicas.disk_tier.bytes: "),
    ("cpu_offload_bytes: 0, disk_tier: {path: /kv, bytes: 1048576}", "replicas.disk_tier: needs the host tier"),
    ("kv_store: {name: other}", "replicas.kv_store.name: "),
    ("accelerator: gpu, kv_store: {name: lmcache}", "replicas.kv_store.address: is required by lmcache"),
    ("accelerator: gpu, kv_store: {name: mooncake}", "replicas.kv_store.config_file: is required by mooncake"),
    (
        "accelerator: gpu, kv_store: {name: mooncake, config_file: /m.json, address: 'h:1'}",
        "replicas.kv_store.address: has no effect with mooncake",
    ),
    ("kv_store: {name: lmcache, address: 'h:1'}", "replicas.kv_store: lmcache needs GPUs"),
    (
        "accelerator: gpu, cpu_offload_bytes: 5, kv_store: {name: lmcache, address: 'h:1'}",
        "replicas.kv_store: takes the place of the host tier",
    ),
    (
        "accelerator: gpu, disk_tier: {path: /kv, bytes: 1048576}, kv_store: {name: lmcache, address: 'h:1'}",
        "replicas.kv_store: takes the place of disk_tier",
    ),
]


@pytest.mark.parametrize(("text", "complaint"), TIERS, ids=[complaint for _, complaint in TIERS])
def test_tiers_that_cannot_work_are_rejected_by_name(file: Path, text: str, complaint: str) -> None:
    (line,) = complaints(file, f"replicas: {{{text}}}\n")
    assert line.startswith(f"{file}: {complaint}")


@pytest.mark.parametrize(
    ("tier", "key", "reason"),
    [
        ("{name: lmcache, address: 'h:1'}", "kv_store", "lmcache finds KV by the name of the model"),
        ("{path: /kv, bytes: 1048576}", "disk_tier", "an adapter has only a name"),
    ],
)
def test_a_tier_that_knows_no_adapters_is_rejected_for_a_model_with_some(
    file: Path, tier: str, key: str, reason: str
) -> None:
    replicas = f"replicas: {{accelerator: gpu, {key}: {tier}}}\n"
    (line,) = complaints(file, f"model: {{adapters: {{a: {{path: /a}}}}}}\n{replicas}")
    assert line.startswith(f"{file}: replicas.{key}: ")
    assert "model.adapters" in line
    assert reason in line
    (line,) = complaints(file, f"models:\n  large:\n    adapters: {{a: {{path: /a}}}}\n    {replicas}")
    assert line.startswith(f"{file}: models.large.replicas.{key}: ")
    (line,) = complaints(file, f"engine: {{enable_lora: true}}\n{replicas}")
    assert "engine.enable_lora: is decided by model.adapters" in line


def test_mooncake_knows_adapters(file: Path) -> None:
    store = "kv_store: {name: mooncake, config_file: /m.json}"
    file.write_text(f"model: {{adapters: {{a: {{path: {file.parent}}}}}}}\nreplicas: {{accelerator: gpu, {store}}}\n")
    assert load_config(file, {}).model.adapters


OLD_KEYS: list[tuple[str, str]] = [
    ("store: {url: 'redis://h:1'}\n", "store: is called redis now (got "),
    (
        "control: {timeout_s: 1, hold_limit_s: 5}\n",
        "control: is called limits now; control.hold_limit_s is called limits.max",
    ),
    ("limits: {idle_program_s: 5}\n", "limits.idle_program_s: is called limits.program_ttl_s now (got 5, line 1)"),
    ("keys: {file: /k}\n", "keys: is called auth now (got "),
    ("classes: {a: [{model: tiny}]}\n", "classes: is called model_routing now (got "),
    ("replicas: {host_bytes: 0}\n", "replicas.host_bytes: is called replicas.cpu_offload_bytes now (got 0, line 1)"),
    (
        "models: {big: {replicas: {host_bytes: 0}}}\n",
        "models.big.replicas.host_bytes: is called models.big.replicas.cpu_offload_bytes now (got 0, line 1)",
    ),
    ("predictor: {share_s: 1}\n", "predictor.share_s: is called predictor.sync_interval_s now (got 1, line 1)"),
]


@pytest.mark.parametrize(("text", "complaint"), OLD_KEYS, ids=[text.partition("\n")[0] for text, _ in OLD_KEYS])
def test_an_old_key_is_rejected_with_its_new_name(file: Path, text: str, complaint: str) -> None:
    (line,) = complaints(file, text)
    assert line.startswith(f"{file}: {complaint}")


def test_an_old_key_in_the_environment_is_rejected_with_its_new_name(file: Path) -> None:
    (line,) = complaints(file, "", {"CAESURA__STORE__URL": "redis://h:1"})
    assert line.startswith("CAESURA__STORE__URL: store: is called redis now")


def test_a_parameter_that_was_removed_is_named(file: Path) -> None:
    (line,) = complaints(file, "policy: {name: vllm, parameters: {hopeless_share: 0.1}}\n")
    assert line.startswith(f"{file}: policy.parameters.hopeless_share: is not a setting any more")


@pytest.mark.parametrize("new", sorted({new for new in RENAMED.values() if new is not None}))
def test_every_new_name_is_a_key(new: str) -> None:
    *section, key = new.split(".")
    assert key in _known_keys(tuple(section), {})


@pytest.mark.parametrize("case", FILES)
def test_wrong_keys_are_told_with_their_path(file: Path, case: str) -> None:
    text, complaint = FILES[case]
    (line,) = complaints(file, text)
    assert line.startswith(f"{file}: {complaint}")
    assert len(line) < len(str(file)) + 250


@pytest.mark.parametrize("key", RESERVED_ENGINE_KWARGS)
def test_every_reserved_engine_argument_names_a_key_that_exists(key: str) -> None:
    (line,) = complaints(None, overrides={f"engine.{key}": 1})
    assert line == f"--set engine.{key}: engine.{key}: is decided by {RESERVED_ENGINE_KWARGS[key]}; set that instead"
    section, name = RESERVED_ENGINE_KWARGS[key].split(".")
    assert name in type(getattr(CaesuraConfig(), section)).model_fields


def test_an_override_changes_no_section_that_shares_an_alias(file: Path) -> None:
    file.write_text(
        "models:\n  a: {source: x, engine: &e {max_model_len: 8192}}\n  b: {source: y, engine: *e}\n"
        "  c: {source: z, engine: {<<: *e, seed: 1}}\n"
    )
    models = load_config(file, {}, {"models.a.engine.max_model_len": 4096}).models
    assert [models[name].engine["max_model_len"] for name in "abc"] == [4096, 8192, 8192]


def test_all_complaints_at_once(file: Path) -> None:
    parameters = "policy: {name: continuum, parameters: {beta: 0, delta: 0}}"
    lines = complaints(file, f"http: {{port: -1}}\nslo: {{ttft_s: 0}}\n{parameters}\n")
    paths = [line.removeprefix(f"{file}: ").split(":")[0] for line in lines]
    assert sorted(paths) == ["http.port", "policy.parameters.beta", "policy.parameters.delta", "slo.ttft_s"]


BROKEN: dict[str, tuple[bytes, str]] = {
    "not YAML": (b"http:\n  port: [1\n", "line 3, column 1: not valid YAML: "),
    "tab": (b"http:\n\tport: 1\n", "line 2, column 1: not valid YAML: "),
    "two documents": (b"a: 1\n---\nb: 2\n", "line 2, column 1: not valid YAML: "),
    "object": (b"a: !!python/object/apply:os.getcwd []\n", "line 1, column 4: not valid YAML: could not determine"),
    "date that is none": (b"a: 2024-13-45\n", "not valid YAML: month must be"),
    "control character": (b"a: \x01\n", "not valid YAML: "),
    "unhashable key": (b"? [a]\n: 1\n", "line 1, column 3: not valid YAML: found unhashable key"),
    "list": (b"- a\n", "must be a mapping of keys to values (got ['a'])"),
    "text": (b"hello\n", "must be a mapping of keys to values (got 'hello')"),
    "repeated key": (b"http:\n  port: 1\n  host: a\n  port: 2\n", "http.port: stands twice (lines 2 and 4)"),
    "repeated section": (b"http: {}\nhttp: {}\n", "http: stands twice (lines 1 and 2)"),
    "not text": (b"\xff\xfe\xff", "cannot be read: "),
    "very deep": (b"[" * 100_000, "not valid YAML: "),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(file: Path, case: str) -> None:
    content, complaint = BROKEN[case]
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load_config(file, {})
    assert str(refused.value).startswith(f"{file}: {complaint}")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_config(tmp_path / "none.yaml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, {})


def test_model_paths(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "m").mkdir(parents=True)
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path))
    file.write_text("model: {source: ./m}\n", encoding="utf-8")
    assert load_config(file, {}).model.source == str(tmp_path / "m")
    for source in ("../m", "~/m", str(tmp_path / "m")):
        assert load_config(file, {"CAESURA__MODEL__SOURCE": source}).model.source == str(tmp_path / "m")
    assert load_config(file, {}, {"model.source": "./m"}).model.source == str(elsewhere / "m")
    assert load_config(file, {}, {"model.source": "m"}).model.source == "m"
    assert load_config(file, {}, {"model.source": "org/m"}).model.source == "org/m"


@pytest.mark.parametrize("source", ["./none", "../none", "~/none", "/none"])
def test_missing_model_paths(file: Path, source: str) -> None:
    (line,) = complaints(file, f"http: {{}}\nmodel: {{source: {source}}}\n")
    assert line.startswith(f"{file}: model.source: no such path: /")
    assert line.endswith(f"(got {source!r}, line 2)")
    (line,) = complaints(file, "", overrides={"model.source": source})
    assert line.startswith("--set model.source: model.source: no such path: ")


MOUNTED = {"auth.file": "keys.yaml", "predictor.bundle": "bundle"}


@pytest.mark.parametrize("key", MOUNTED)
def test_paths_of_keys_and_bundles(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    section, name = key.split(".")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path))

    def read(given: str, **overrides: Any) -> Any:
        file.write_text(f"{section}: {{{name}: {given}}}\n", encoding="utf-8")
        return getattr(getattr(load_config(file, {}, overrides), section), name)

    for given in ("there", "./there", "~/there", str(tmp_path / "there")):
        assert read(given) == str(tmp_path / "there")
    assert read("there", **{key: "here"}) == str(elsewhere / "here")
    # A mounted secret is a link to a file that is replaced.
    (tmp_path / "link").symlink_to(elsewhere)
    for given in ("link", str(tmp_path / "link")):
        assert read(given) == str(tmp_path / "link")
    file.write_text(f"{section}: {{{name}: ~nobody-of-this-name/there}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=key):
        load_config(file, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a.b=1", ("a.b", 1)), ("a=b=c", ("a", "b=c")), ("a=", ("a", None)), ("a=[1, x]", ("a", [1, "x"]))],
)
def test_assignments(text: str, expected: tuple[str, Any]) -> None:
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["a.b", "=1", " =1", "a=[", ""])
def test_wrong_assignments(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_assignment(text)


def test_empty_part_of_a_dotted_key() -> None:
    assert complaints(None, overrides={"http..port": 1}) == [
        "--set http..port: names no key: a part of its path is empty"
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_dump_fills_in_every_default_and_reads_back(file: Path, name: str) -> None:
    config = load_config(None, {}, {"policy.name": name, "engine.max_model_len": 64, "http.port": 5})
    file.write_text(dump_config(config), encoding="utf-8")
    dumped = yaml.safe_load(file.read_text(encoding="utf-8"))
    parameters = POLICIES.load(name)
    assert dumped["policy"]["parameters"].keys() == parameters.model_fields.keys()
    assert dumped["http"].keys() == type(config.http).model_fields.keys()
    assert dumped.keys() == CaesuraConfig.model_fields.keys()
    again = load_config(file, {})
    assert dump_config(again) == dump_config(config)
    assert again.engine == {"max_model_len": 64}


def test_schema_is_a_schema_that_describes_every_key() -> None:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for name, section in {"": schema, **schema["$defs"]}.items():
        assert section["description"], name
        for key, described in section.get("properties", {}).items():
            assert "$ref" in described or described["description"], f"{name}.{key}"
    assert schema["$defs"]["PolicyConfig"]["properties"]["name"]["enum"] == list(POLICIES)
    assert schema["$defs"]["RouterConfig"]["properties"]["name"]["enum"] == list(ROUTERS)


@pytest.mark.parametrize("name", POLICIES)
def test_schema_has_the_parameters_of_every_policy(name: str) -> None:
    schema = config_schema()
    model = POLICIES.load(name)
    assert schema["$defs"][model.__name__].get("properties", {}).keys() == model.model_fields.keys()
    validator = jsonschema.Draft202012Validator(schema)
    config = load_config(None, {}, {"policy.name": name})
    assert not list(validator.iter_errors(yaml.safe_load(dump_config(config))))
    assert list(validator.iter_errors({"policy": {"name": name, "parameters": {"no_such": 1}}}))


def test_parameters_of_a_router() -> None:
    ours = load_config(None, {}, {"router.parameters.max_moves": 1, "limits.program_ttl_s": 60})
    assert (ours.placement.max_moves, ours.placement.program_ttl_s) == (1, 60.0)
    assert not list(jsonschema.Draft202012Validator(config_schema()).iter_errors(yaml.safe_load(dump_config(ours))))
    rays = load_config(None, {}, {"router.name": "consistent_hash", "router.parameters.num_fallback_replicas": 0})
    assert rays.placement is None
    assert yaml.safe_load(dump_config(rays))["router"]["parameters"] == {"num_fallback_replicas": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"http": {"prot": 1}},
        {"policy": {"name": "best"}},
        {"policy": {"name": "continuum", "parameters": {"delta": 2}}},
        {"policy": {"parameters": {"hopeless_share": 2}}},
        {"http": {"port": -1}},
        {"router": {"name": "best"}},
        {"router": {"parameters": {"hysterisis": 2}}},
        {"router": {"name": "caesura", "parameters": {"max_moves": -1}}},
    ],
)
def test_schema_refuses_what_is_refused(wrong: dict[str, Any], file: Path) -> None:
    assert list(jsonschema.Draft202012Validator(config_schema()).iter_errors(wrong))
    assert complaints(file, yaml.safe_dump(wrong))


def test_unknown_engine_arguments() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    names = ["max_model_len", "max_modle_len", "enable_log_requests", "chat_template", "colour"]
    assert unknown_engine_arguments(names) == ["max_modle_len", "colour"]
    assert unknown_engine_arguments(RESERVED_ENGINE_KWARGS) == []
    for arguments in (AsyncEngineArgs, FrontendArgs):
        assert unknown_engine_arguments([field.name for field in dataclasses.fields(arguments)]) == []


def test_engine_arguments_are_checked_without_importing_vllm() -> None:
    script = (
        "import sys; from replicas.settings import unknown_engine_arguments as unknown;"
        "assert unknown(['colour']) == ['colour']; assert not {'vllm', 'torch', 'triton'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


RUN = CliRunner()


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["caesura", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_command_show(file: Path) -> None:
    file.write_text("http: {port: 1}\n", encoding="utf-8")
    shown = RUN.invoke(
        cli.app,
        ["config", "show", "--config", str(file), "--set", "http.host=h", "--set", "slo.e2e_s=2"],
        env={"CAESURA__HTTP__PORT": "7"},
    )
    assert shown.exit_code == 0
    values = yaml.safe_load(shown.stdout)
    assert (values["http"]["port"], values["http"]["host"], values["slo"]["e2e_s"]) == (7, "h", 2.0)


def test_command_schema() -> None:
    printed = RUN.invoke(cli.app, ["config", "schema"])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == config_schema()


def test_command_check(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("engine: {max_model_len: 64}\n", encoding="utf-8")
    assert run_main(monkeypatch, "config", "check", "--config", str(file)) == 0
    assert capsys.readouterr().out.endswith(f"{file} is valid\n")
    file.write_text("engine: {max_modle_len: 64, max_num_seqs: 1, colour: 2}\n", encoding="utf-8")
    assert run_main(monkeypatch, "config", "check", "--config", str(file)) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{file}: engine.max_modle_len: vLLM has no such engine argument",
        f"{file}: engine.colour: vLLM has no such engine argument",
    ]
    further = "models: {big: {engine: {max_modle_len: 64}}, small: {engine: {max_model_len: 64}}}\n"
    file.write_text(f"engine: {{colour: 2}}\n{further}", encoding="utf-8")
    assert run_main(monkeypatch, "config", "check", "--config", str(file)) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{file}: engine.colour: vLLM has no such engine argument",
        f"{file}: models.big.engine.max_modle_len: vLLM has no such engine argument",
    ]
    assert run_main(monkeypatch, "config", "check") == 0
    assert capsys.readouterr().out == "built-in configuration is valid\n"


def test_check_names_keys_and_bundles_that_do_not_exist(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("auth: {file: keys.yaml}\npredictor: {bundle: ./bundle}\n", encoding="utf-8")
    load_config(file, {})  # the machine that serves may have them
    assert run_main(monkeypatch, "config", "check", "--config", str(file)) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{file}: predictor.bundle: {tmp_path}/bundle: No such file or directory",
        f"{file}: auth.file: {tmp_path}/keys.yaml: No such file or directory",
    ]
    (tmp_path / "keys.yaml").touch()
    (tmp_path / "bundle").mkdir()
    assert run_main(monkeypatch, "config", "check", "--config", str(file)) == 0


def test_main_tells_errors_without_a_traceback(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("http: {port: x}\n", encoding="utf-8")
    assert run_main(monkeypatch, "config", "show", "-c", str(file)) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(f"{file}: http.port: ")
    assert "Traceback" not in streams.err

    def refuse() -> None:
        raise TraceError("trace.jsonl:3: arrival_s: must be a number")

    monkeypatch.setattr(cli, "app", refuse)
    assert run_main(monkeypatch) == 2
    assert capsys.readouterr().err == "trace.jsonl:3: arrival_s: must be a number\n"


def test_what_other_libraries_do_to_the_shared_loader_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constructors = yaml.SafeLoader.yaml_constructors
    monkeypatch.setitem(constructors, "tag:yaml.org,2002:timestamp", constructors["tag:yaml.org,2002:str"])
    path = tmp_path / "caesura.yaml"
    path.write_text("a: 2024-13-45\n")
    with pytest.raises(ConfigError, match="month must be"):
        load_config(path, {}, {})


def test_a_complaint_repeats_no_secret(file: Path) -> None:
    tool = {"kind": "http", "headers": {"Authorization": "s3cret"}}
    wrong = {
        "redis.url": "reddis://user:s3cret@host/0",
        "tracing.otlp_endpoint": "ftp://s3cret@host/",
        "tools.defined.a": tool,
        "tools.defined.b": {**tool, "url": "http://u:s3cret@host/"},
        "tools.defined.c": {**tool, "url": "http://host/", "headers": {"A": ["s3cret"]}},
        "tools.defined.d": {"kind": "command", "argv": ["x"], "environment": {"not a name": "s3cret"}},
    }
    said = "\n".join(complaints(file, "", None, wrong))
    assert "s3cret" not in said and "***" in said
    assert all(key in said for key in wrong)

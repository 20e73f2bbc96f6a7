"""What the configuration lets a tenant use."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from cluster.auth.keys import read_keys, utc_now
from cluster.auth.tenants import TenantLimit, Tenants, kept_apart
from cluster.cli import app
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import ConfigError
from cluster.core.replica_snapshot import prefix_blocks, prompt_of, salt_of
from cluster.core.tools import ToolId, ToolOffer


def offered(tool: ToolId) -> ToolOffer:
    return ToolOffer(tool.tool, {}, here=True, tool=tool)


def config(tenant: dict[str, Any], **more: Any) -> CaesuraConfig:
    tools = {
        "defined": {
            "search": {"kind": "python", "entry": "math:sqrt"},
            "shell": {"kind": "python", "entry": "math:sin"},
        }
    }
    return CaesuraConfig.model_validate({"tools": tools, "tenants": {"acme": tenant}, **more})


def test_who_is_not_configured_may_use_everything() -> None:
    tenants = Tenants(config({}))
    tools = [offered(ToolId.of_operator("search")), offered(ToolId.of_operator("shell"))]
    for tenant in ("acme", "other"):
        assert tenants.may_name(tenant, "tiny") and tenants.tools(tenant, tools) == tools
        assert tenants.max_programs(tenant) is None


def test_tools_are_those_named_and_those_brought() -> None:
    tenants = Tenants(config({"tools": ["search"]}))
    search, shell = offered(ToolId.of_operator("search")), offered(ToolId.of_operator("shell"))
    brought, unnamed = offered(ToolId.of_request("shell", "look")), ToolOffer("search", {}, here=True)
    assert tenants.tools("acme", [search, shell, brought, unnamed]) == [search, brought]
    assert tenants.tools("other", [search, shell, brought, unnamed]) == [search, shell, brought]


def test_models_are_those_named() -> None:
    tenants = Tenants(config({"models": ["tiny"]}, models={"big": {"source": "tiny"}}))
    assert [tenants.may_name("acme", model) for model in ("tiny", "big", "auto:coding")] == [True, False, False]


def test_limits_are_shared_by_the_ingresses() -> None:
    tenant = {"requests_per_s": 10.0, "burst": 5, "max_concurrent": 5, "max_programs": 3}
    tenants = Tenants(config(tenant, http={"ingress_replicas": 2}))
    assert tenants.limits() == {"acme": TenantLimit(5.0, 3, 3)}
    assert tenants.max_programs("acme") == 2


@pytest.mark.parametrize(
    ("body", "tenant", "salt"),
    [
        ({}, "default", None),
        ({"cache_salt": None}, "default", None),
        ({}, "acme", "acme"),
        ({"cache_salt": None}, "acme", "acme"),
        ({"cache_salt": "acme"}, "default", "/acme"),
        ({"cache_salt": "acme"}, "other", "other/acme"),
        ({"cache_salt": "/acme"}, "other", "other//acme"),
        ({"cache_salt": ""}, "acme", ""),  # the replica refuses these
        ({"cache_salt": 5}, "acme", 5),
    ],
)
def test_no_salt_is_another_tenants(body: dict[str, Any], tenant: str, salt: Any) -> None:
    before = dict(body)
    assert kept_apart(body, tenant).get("cache_salt") == salt
    assert body == before


def test_prefixes_of_tenants_are_not_the_routers_same() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 4000}]}
    named = [
        prefix_blocks(prompt_of(salted), salt_of(salted))
        for salted in (body, kept_apart(body, "acme"), kept_apart(body, "other"), kept_apart(body, "acme"))
    ]
    assert named[1] == named[3] != () and not {*named[0]} & {*named[1]} and not {*named[1]} & {*named[2]}


def test_weights_are_the_routers() -> None:
    assert config({"weight": 3.0}).placement.tenant_weights == {"acme": 3.0}


@pytest.mark.parametrize(
    ("tenant", "said"),
    [
        ({"models": ["large"]}, "acme.models: there is no 'large'"),
        ({"models": ["auto:code"]}, "acme.models: there is no 'auto:code'"),
        ({"tools": ["rm"]}, "acme.tools: there is no 'rm'; there are: search, shell"),
        ({"burst": 0}, "greater than or equal to 1"),
        ({"requests_per_s": 0}, "greater than 0"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_what_there_is_not_cannot_be_allowed(tenant: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(tenant)


class TestTheCommand:
    def test_a_new_keys_entry_fits_the_file(self, tmp_path: Path) -> None:
        made = CliRunner().invoke(app, ["keys", "new", "--tenant", "acme", "--role", "serve", "--role", "metrics"])
        assert made.exit_code == 0
        told, _, entries = made.stdout.partition("\n")
        key = told.rpartition(" ")[2]
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": yaml.safe_load(entries)}))
        caller = read_keys(tmp_path / "keys.yaml").find(key, utc_now())
        assert caller is not None and caller.tenant == "acme" and len(caller.roles) == 2
        assert key not in entries
        checked = CliRunner().invoke(app, ["keys", "check", str(tmp_path / "keys.yaml")])
        assert (checked.exit_code, checked.stdout) == (0, "acme: 1 (metrics, serve)\n")

    @pytest.mark.parametrize("wrong", [["--tenant", "a/b"], ["--tenant", "a", "--role", "root"]])
    def test_what_is_no_key_is_refused(self, wrong: list[str]) -> None:
        made = CliRunner().invoke(app, ["keys", "new", *wrong])
        assert isinstance(made.exception, ConfigError) and "caesura keys new: keys.0." in str(made.exception)

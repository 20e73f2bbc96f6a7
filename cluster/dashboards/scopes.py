"""What the variables of the dashboards narrow down: each scope is put to every selector that has its labels."""

from cluster.dashboards.promql import PROCESS, Scope

MODEL = ("model", 'model=~"$model"')
ENGINE_MODEL = ("model_name", 'model_name=~"$model"')
TENANT = ("tenant", 'tenant=~"$tenant"')
TOOL = ("tool", 'tool=~"$tool"')

CLUSTER = Scope((MODEL, ENGINE_MODEL, TENANT, TOOL))
"""All replicas together."""

REPLICAS = Scope((MODEL, ENGINE_MODEL), always=(f'{PROCESS}=~"$replica"',))
"""The replicas that were chosen: for metrics that replicas tell."""

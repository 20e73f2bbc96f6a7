"""Every panel of the dashboards and every rule resolves on a live cluster that a real Prometheus scrapes."""

import shutil

import pytest

from cluster.bench.runner import Silent
from cluster.proof.observe import Load, observe
from cluster.serving import LocalCluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
    ),
]


def test_no_panel_is_empty_and_no_rule_errs(cluster: LocalCluster) -> None:
    findings = observe(cluster, Load(rate_per_s=2.0, duration_s=6.0), Silent())
    answers = (*findings.answers, *findings.through_ingress)
    assert [one for one in answers if not one.verdict.will_do] == []
    assert findings.unknown_metrics == ()
    # Whether a turn was good can differ where it was just in time; whether there was one cannot.
    assert [one for one in findings.comparisons if one.exact and not one.agrees] == []

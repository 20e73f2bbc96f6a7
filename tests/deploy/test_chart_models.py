"""What models need of their pods: weights, and memory for their host tiers."""

from typing import Any

import pytest

from tests.deploy.chart import PRESETS, Refused, needs_helm, of_kind, template
from tests.deploy.value_sets import LARGE, gpu_group, gpus

pytestmark = needs_helm

GIB = 1 << 30


def test_adapters_and_draft_models_are_downloaded_too() -> None:
    """Workers do not connect to the hub where there is a download."""
    drafts = {
        name: {"method": method, "model": model, "num_speculative_tokens": 2}
        for name, method, model in (
            ("first", "eagle3", "org/eagle"),
            ("one", "draft_model", "./draft"),
            ("two", "draft_model", "org/draft"),
            ("three", "ngram", "[ngram]"),
        )
    }
    adapters = {"c": {"path": "org/third"}, "d": {"path": "org/adapter"}}
    config = {
        "model": {"adapters": {"a": {"path": "org/adapter"}, "b": {"path": "/models/b"}}},
        "engine": {"speculative_config": drafts["first"]},
        "models": {
            "one": {"source": "/models/one", "adapters": adapters, "engine": {"speculative_config": drafts["one"]}},
            "two": {"engine": {"speculative_config": drafts["two"]}},
            "three": {"engine": {"speculative_config": drafts["three"]}},
        },
    }
    job = of_kind(template({"config": config}, preset="gpu"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert sorted(container["args"]) == ["Qwen/Qwen3-8B", "org/adapter", "org/draft", "org/eagle", "org/third"]


def test_revisions_and_the_tokenizers_of_other_repositories_are_downloaded() -> None:
    draft = {"method": "eagle3", "model": "org/eagle", "revision": "draft-1", "num_speculative_tokens": 2}
    tokenizer = {"tokenizer": "org/words", "tokenizer_revision": "v3", "hf_config_path": "org/config"}
    config = {
        "engine": {"revision": "v2", "tokenizer": "org/words", "speculative_config": draft},
        "models": {
            "one": {"source": "org/one", "engine": tokenizer},
            "two": {"source": "/models/two", "engine": {"revision": "v9"}},
        },
    }
    job = of_kind(template({"config": config}, preset="gpu"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert sorted(container["args"]) == [
        "Qwen/Qwen3-8B@v2",
        "org/config (no weights)",
        "org/eagle@draft-1",
        "org/one",
        "org/words (no weights)",
        "org/words@v3 (no weights)",
    ]


def test_code_of_models_has_a_folder_that_can_be_written() -> None:
    for group in of_kind(template(preset="gpu"), "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        (folder,) = [one["value"] for one in container["env"] if one["name"] == "HF_MODULES_CACHE"]
        (mount,) = [one for one in container["volumeMounts"] if folder.startswith(f"{one['mountPath']}/")]
        assert mount["name"] == "tmp" and not mount.get("readOnly")


@pytest.mark.parametrize("preset", PRESETS)
def test_both_clusters_of_an_upgrade_reach_the_models(preset: str) -> None:
    """The workers of the second cluster may be on another node, where a ReadWriteOnce volume is not mounted."""
    for claim in template(preset=preset):
        if claim["kind"] == "PersistentVolumeClaim":
            assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def tiers(each: int, gpus_of_pod: int, size: str, replicas: dict[str, Any]) -> dict[str, Any]:
    return {
        "config": {**LARGE, "replicas": {**replicas, "cpu_offload_bytes": each * GIB}},
        "workerGroups": {
            **gpu_group(4, gpus_of_pod, sharedMemory=size),
            # Too small for tiers, but the models fit elsewhere; and a group in which they do not run.
            "small": gpu_group(1, gpus_of_pod)["big"],
            "tools": gpu_group(1, 0)["big"],
        },
    }


@pytest.mark.parametrize(
    ("each", "gpus_of_pod", "needed", "replicas"),
    [
        (4, 4, 8, gpus(4, 2)),  # two replicas in a pod
        (4, 4, 4, gpus(1, 2)),  # the only one
        (8, 4, 4, gpus(1, 8)),  # a part of one
        (8, 4, 2, gpus(1, 4, 4)),
        (1, 4, 4, {**gpus(1, 1), "data_parallel_size": 4}),
    ],
)
def test_shared_memory_has_room_for_the_host_tiers_of_a_pod(
    each: int, gpus_of_pod: int, needed: int, replicas: dict[str, Any]
) -> None:
    """vLLM keeps them in /dev/shm."""
    assert template(tiers(each, gpus_of_pod, f"{needed}Gi", replicas), preset="cpu")
    with pytest.raises(Refused, match=f"has less than {needed * GIB} bytes, which config.replicas.cpu_offload_bytes"):
        template(tiers(each, gpus_of_pod, f"{needed * 1024 - 1}Mi", replicas), preset="cpu")


def test_a_further_model_has_host_tiers_too_and_a_size_must_be_readable() -> None:
    further = {"source": "/models/b", "replicas": {**gpus(1, 4), "cpu_offload_bytes": 2 * GIB}}
    for size, message in (("1Gi", "which config.models.b.replicas.cpu_offload_bytes"), ("9K", "9K is no number")):
        values = {"config": {"models": {"b": further}}, "workerGroups": gpu_group(1, 4, sharedMemory=size)}
        with pytest.raises(Refused, match=f"workerGroups.big.sharedMemory: .*{message}"):
            template(values, preset="cpu")

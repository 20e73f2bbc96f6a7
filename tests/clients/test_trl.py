"""TRL's client of a generation server, as docs/rollouts.md shows it: an agent's turns with exact tokens.

`make clients` installs TRL in `.cache/clients`. It runs on the packages of `.venv`, which has PyTorch and vLLM.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.installed import INSTALLED, SHOWN, WITHIN_S, require
from tests.docs.pages import DOCS, FENCE, ROOT
from tests.serving.served import EXACT, served

pytestmark = pytest.mark.cluster

PACKAGES = INSTALLED / "trl"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    require(PACKAGES / "trl")
    file = tmp_path_factory.mktemp("trl") / "caesura.yaml"
    engine = {name: EXACT[name] for name in ("max_model_len", "max_num_seqs", "dtype")}
    file.write_text(f"http: {{port: 0}}\nreplicas: {{kv_cache_bytes: {32 << 20}}}\nengine: {engine}\n")
    with served(file) as url:
        yield url


def test_trls_client_gets_the_tokens_that_were_recorded(url: str, tmp_path: Path) -> None:
    page = (DOCS / "rollouts.md").read_text()
    [text] = [block["text"] for block in FENCE.finditer(page) if "VLLMClient" in block["text"]]
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [sys.executable, "-"],
        cwd=tmp_path,
        env=variables | {"PYTHONPATH": f"{PACKAGES}:{ROOT}"},
        input=text.replace(SHOWN, url),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with httpx.Client(base_url=url, timeout=60) as client:
        for sample in range(2):
            turns = client.get(f"/v1/programs/trl-{sample}/tokens").raise_for_status().json()["data"]
            assert [(turn["status"], turn["parent"]) for turn in turns] == [("completed", "trl")] * 2
            assert f"trl-{sample}: {[turn['answers'][0]['token_ids'] for turn in turns]}" in done.stdout

"""Fails where a word stands that the project has given up for the field's term: part of `make check`.

A line names a pattern and what to write in its place. Decisions (docs/adr), the changelog and results may use any word.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

GIVEN_UP = {
    r"hopeless": "slo_missed; queue_timeout for the error code",
    r"comebacks?\b": "resume, resume_estimator",
    r"farewells?\b": "move notification",
    r"sightings?\b": "replica health",
    r"\brota\b": "round robin",
    r"\b(at|in front of|behind) the door\b|\bKeyDoor\b": "ingress, AuthMiddleware, rejected",
    r"\bTurnBook\b|\bSloLedger\b|\bSharedLedger\b": "SloTracker, SharedSloTracker",
    r"\bProgramFront\b|\bFrontQueue\b|\bReplicaBook\b": "PlacementEngine, AdmissionQueue, ReplicaState",
    r"\bUntold\b|\bNoTraces\b|\bNoForecasts\b|\bUntraced\b": "a Null object",
    r"\bUnforeseen\b|\bForecasted\b": "NullPrediction, Prediction",
    r"caesura_(holds_ended|step_pace|concluded_programs|refusals)": "kv_pins_released, step_time_ratio, ...",
    r"\bhold_limit_s\b|\bidle_program_s\b": "max_pin_s, program_ttl_s",
    r"\bpatience_s?\b": "timeout",
}

IN_PRODUCT = {
    r"\b(is|are|was|were|be|been) told\b|\btells? (of|the|it|them|us|that)\b": "reports, receives, shows, knows"
}
"""Looked for outside of the tests only."""

READ = {".py", ".md", ".yaml", ".yml", ".toml", ".tpl", ".sh", ".txt"}
EXEMPT = ("CHANGELOG.md", "docs/adr/", "benchmarks/results/", ".ci/words.py", "replicas/tiny/")
RENAMES = ("cluster/config/loader.py", "tests/words/test_config.py")
"""They name old configuration keys, which are rejected with the new ones."""


def main() -> int:
    """Print each place; the exit status is 1 if there is one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = 0
    for name in listed.splitlines():
        path = ROOT / name
        if path.suffix not in READ or name.startswith((*EXEMPT, *RENAMES)) or not path.is_file():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, better in (GIVEN_UP if name.startswith("tests/") else GIVEN_UP | IN_PRODUCT).items():
                if re.search(pattern, line, re.IGNORECASE):
                    print(f"{name}:{number}: {line.strip()[:90]}\n    write: {better}")
                    found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

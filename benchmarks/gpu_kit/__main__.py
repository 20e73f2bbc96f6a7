"""Checks and measures Caesura on a machine with one CUDA GPU: ``make gpu``, or ``python -m benchmarks.gpu_kit``.

Each part is a process of its own with a limit of ten minutes. Parts that have passed with the same code, device,
versions and model are not run again. Results, logs and the report are in out/gpu. Without a GPU, all parts are skipped
with the reason; ``--device cpu --quick`` rehearses them with a small model. The exit status is 1 if a part has failed.
"""

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu_kit.parts import CPU, CUDA, LIMIT_S, PARTS, chosen
from benchmarks.gpu_kit.report import summary, write
from benchmarks.gpu_kit.runner import FAILED, Options, probed, ran_before, run_parts

ROOT = Path(__file__).parents[2]


def main(argv: list[str] | None = None) -> int:
    """Run the parts, write the report; exit status 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help=f"only these, with commas: {','.join(p.name for p in PARTS)}")
    parser.add_argument("--device", choices=(CUDA, CPU), default=CUDA, help="cpu: a rehearsal (default: cuda)")
    parser.add_argument("--model", type=Path, default=None, help="a model's folder; else one with random weights")
    parser.add_argument("--quick", action="store_true", help="small sizes and short times")
    parser.add_argument("--again", action="store_true", help="also run what has passed")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="folder of the results (out/gpu)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "gpu", help="folder of the random models")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of a part at most (600)")
    arguments = parser.parse_args(argv)
    try:
        parts = chosen([name for name in arguments.parts.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        parser.error(f"--model {arguments.model}: there is no {arguments.model / 'config.json'}")
    options = Options(
        arguments.device, arguments.out.resolve(), arguments.cache.resolve(), arguments.model, arguments.quick,
        arguments.again, arguments.limit_s,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the part is ended, too
    facts = probed(options)
    records = {}
    for part in PARTS:
        if part not in parts and (before := ran_before(part.files(options.out), facts)):
            records[part.name] = before | {"earlier": True}
    for record in run_parts(parts, options, facts):
        why = f": {record['reason']}" if record["reason"] else ""
        print(f"{record['part']:18} {record['status']}{' (earlier)' * record.get('earlier', False)}{why}", flush=True)
        records[record["part"]] = record
        known = [records[part.name] for part in PARTS if part.name in records]
        page = write(known, facts, options.out)
    print(f"{summary(known)}; {page}")
    return 1 if any(records[part.name]["status"] == FAILED for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())

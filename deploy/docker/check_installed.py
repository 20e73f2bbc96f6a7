"""Run by the image's build, from its standard input: are our packages the installed ones, and whole?

Started like this, Python looks for modules in the working directory first, as it does for `python -c` and for Ray's
workers: a checkout there would be imported in place of what was installed.
"""

import sys
import sysconfig
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("cluster", "replicas", "router", "tools_runtime", "predictor_service")

installed = Path(sysconfig.get_path("purelib")).resolve()
caesura = distribution("caesura")
wrong = []
for name in PACKAGES:
    spec = find_spec(name)
    origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if origin is None or not origin.is_relative_to(installed):
        wrong.append(f"{name} is imported from {origin}, not from {installed}")
listed = [Path(str(caesura.locate_file(file))) for file in caesura.files or ()]
if not listed:
    wrong.append("the installation has no list of its files")
wrong += [f"{path} is missing" for path in listed if not path.exists()]
# Not code, and found only when the built-in model is first made.
if not any(path.match("replicas/tiny/*.jinja") for path in listed):
    wrong.append("the built-in model's chat template was not packaged")
if wrong:
    sys.exit("\n".join(wrong))
sys.stdout.write(f"caesura {caesura.version} is imported from {installed}\n")

"""The reference page of the presets: their costs, and how far measured steps are from them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.offline.reference.pages import code, page, table
from replicas.presets import DEVICES, MODELS, fit_file, fit_of, preset, preset_names

INTRODUCTION = """\
A preset is the cost model of an LLM on a GPU. `caesura simulate --preset` and the key `cost_model` take its name.
`llama-3.1-8b/h100x2` is tensor-parallel over two GPUs in place of the usual number, and `opt-13b/h800@2023` is vLLM
0.2. The efficiencies were fitted to public measurements: `replicas/silicon/README.md` has their sources and licences,
and `caesura profile --from-silicon` makes a fit again. Caesura itself was not run on a GPU.
That file also compares presets with steps of the same shapes that torch alone ran on an H100 and an H200.

Errors are predicted over measured times of steps that were not fitted: the median, and the 10th to the 90th
percentile. They are of the GPU that the efficiency was measured on. The sources themselves differ by 10 to 25% on the
same GPU."""

OTHERS = """\
## Other sources

No row of these was fitted. `served` and `*_e2e` are times of live engines. They contain host time, which presets leave
out because today's engines overlap it with the GPU. The engine of vLLM 0.7.3 does not overlap it. `vidur` measured
layers without attention. Another number of ranks than the usual one is less exact for small models, because the time
of a layer's small kernels is assumed not to depend on it."""

PHASES = ("decode", "prefill", "mixed")
DECODE = (64, 2000)
"""Sequences, and tokens of each, of the decode step that the page shows."""
PROMPT_TOKENS = 2000
HEAD = ("preset", "GPUs", "KV, tokens", "step, tokens", "64 decodes, ms", "2,000 tokens, ms", "measured on", *PHASES)

Errors = Mapping[str, Any]


def presets_page() -> str:
    """Return the reference of the presets."""
    names = list(preset_names())
    fits = {fit_of(name): fit_file(fit_of(name)) for name in (*names, f"{names[0]}@2023")}
    others = [error for fit in fits.values() for error in fit["held_out_errors"] if not _steps(fit, error)]
    head = ("GPU", "source", "engine", "model", "times", "rows", "error")
    return page(
        "Presets",
        INTRODUCTION,
        table(HEAD, (_row(name, fits[fit_of(name)]) for name in names)),
        OTHERS,
        table(head, _other_rows(others)),
    )


def _steps(fit: Errors, error: Errors) -> bool:
    """Return whether an error is of whole steps of the fitted source, at the model's usual number of ranks."""
    usual = error["ranks"] == MODELS.get(error["model"], MODELS["llama-3.1-8b"]).tensor_parallel
    return usual and error["source"] == fit["fitted_source"] and error["phase"] in PHASES


def _row(name: str, fit: Errors) -> tuple[str, ...]:
    model, _, device = name.partition("/")
    cost, (sequences, context) = preset(name), DECODE
    found = {
        error["phase"]: error for error in fit["held_out_errors"] if _steps(fit, error) and error["model"] == model
    }
    measured = DEVICES[device].measured_on if found else f"{DEVICES[device].measured_on}, other models"
    return (
        code(name),
        str(MODELS[model].tensor_parallel),
        f"{cost.kv_capacity_tokens:,}",
        f"{cost.step_tokens:,}",
        f"{1e3 * cost.decode_step_s(sequences, sequences * context):.1f}",
        f"{1e3 * cost.prefill_s(PROMPT_TOKENS):.1f}",
        measured,
        *(_ratios(found[phase]) if phase in found else "" for phase in PHASES),
    )


def _other_rows(errors: Sequence[Errors]) -> Iterator[tuple[str, ...]]:
    for error in sorted(errors, key=lambda one: (one["device"], one["source"], one["model"], one["ranks"])):
        model = f"{error['model']} x{error['ranks']}"
        named = (error["device"], error["source"], error["engine"], model, error["phase"])
        yield (*named, str(error["rows"]), _ratios(error))


def _ratios(error: Errors) -> str:
    if error["rows"] == 1:
        return f"{error['ratio']:.2f}"
    return f"{error['ratio']:.2f} ({error['p10']:.2f} to {error['p90']:.2f})"

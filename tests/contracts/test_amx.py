"""Whoever runs vLLM on CPU may use AMX, and so may those that it forks."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

from replicas.amx import ask_for_amx

XTILE_DATA = 1 << 18
ASKS = """
import ctypes, os
from vllm.plugins import load_general_plugins

def allowed():
    libc, mask = ctypes.CDLL(None), ctypes.c_ulong()
    assert libc.syscall(158, 0x1022, ctypes.byref(mask)) == 0  # arch_prctl, ARCH_GET_XCOMP_PERM
    print(mask.value, flush=True)

allowed()
load_general_plugins()
allowed()
if os.fork():
    os.wait()
else:
    allowed()
"""


def test_vllm_knows_the_plugin() -> None:
    found = [point.load() for point in entry_points(group="vllm.general_plugins") if point.name == "caesura_amx"]
    assert found == [ask_for_amx]


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_the_plugin_asks_for_the_process_and_its_forks() -> None:
    told = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, timeout=120, check=True)
    assert [bool(int(line) & XTILE_DATA) for line in told.stdout.split()[-3:]] == [False, True, True]

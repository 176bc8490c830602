"""Counting launches and bytes in the text of a compiled program."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

PROGRAM = """HloModule jit_run, is_scheduled=true

%fused_update (p0: bf16[8,64], p1: bf16[1,64], p2: s32[]) -> bf16[8,64] {
  %p0 = bf16[8,64]{1,0} parameter(0)
  %p1 = bf16[1,64]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = bf16[8,64]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

%fused_slice (p0.1: bf16[8,64], p1.1: s32[]) -> bf16[1,64] {
  %p0.1 = bf16[8,64]{1,0} parameter(0)
  %p1.1 = s32[] parameter(1)
  %dynamic-slice.1 = bf16[1,64]{1,0} dynamic-slice(%p0.1, %p1.1, %p1.1), dynamic_slice_sizes={1,64}
  ROOT %negate.1 = bf16[1,64]{1,0} negate(%dynamic-slice.1)
}

%body (arg: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {
  %arg = (s32[], /*index=1*/bf16[8,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %cache = bf16[8,64]{1,0} get-tuple-element(%arg), index=1
  %row = bf16[1,64]{1,0} fusion(%cache, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(run)/neg"}
  %attended = (bf16[1,64], f32[4]) custom-call(%row, %cache), custom_call_target="mosaic_gpu", metadata={op_name="nsa_"}
  %out = bf16[1,64]{1,0} get-tuple-element(%attended), index=0
  %copy.1 = bf16[1,64]{1,0} copy(%out)
  %after = bf16[8,64]{1,0} fusion(%cache, %copy.1, %i), kind=kLoop, calls=%fused_update
  ROOT %result = (s32[], bf16[8,64]{1,0}) tuple(%i, %after)
}

%condition (arg.1: (s32[], bf16[8,64])) -> pred[] {
  %arg.1 = (s32[], bf16[8,64]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: bf16[8,64]) -> bf16[8,64] {
  %x = bf16[8,64]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], /*index=1*/bf16[8,64]{1,0}) tuple(%zero, %x)
  %while.1 = (s32[], /*index=1*/bf16[8,64]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %last = bf16[8,64]{1,0} get-tuple-element(%while.1), index=1
}
"""


@pytest.fixture(scope="module")
def launches(plain_names: None) -> Any:
    return importlib.import_module("launches")


def test_launches_and_bytes_of_a_loop(launches, monkeypatch):
    """Whole caches counted where one row moves, launches outside the loop, a kernel behind a tuple missed."""
    program = launches.Program(PROGRAM)
    assert program.step() == "body"
    assert [x.name for _, x in program.launches("body")] == ["row", "attended", "copy.1", "after"]
    row, index = 128, 4
    sizes = [program.bytes_of(at, x) for at, x in program.launches("body")]
    assert sizes == [2 * row + index, (row + 16) + (row + 8 * row), 2 * row, 2 * row + index]
    monkeypatch.setattr(launches, "CACHE", 500)
    count = program.count()
    assert count["launches"] == 4 and count["round_trips"] == 3
    assert count["kinds"]["attention"] == {"launches": 1, "bytes": 2 * row + 16}
    assert count["kinds"]["copies"]["launches"] == 1


def test_layers_are_differences(launches):
    def counted(number: int) -> dict[str, Any]:
        part = {"launches": number, "bytes": 10 * number}
        return {**part, "round_trips": number - 1, "kinds": {"fusions": part}}

    layers = launches.by_layer(counted(30), counted(50), (counted(36), counted(48)))
    assert layers["refresh"]["launches"] == 10 and layers["reuse"]["launches"] == 6
    assert layers["step"]["launches"] == 20 and layers["step"]["bytes"] == 200
    assert layers["refresh"]["kinds"] == {"fusions": {"launches": 10, "bytes": 100}}

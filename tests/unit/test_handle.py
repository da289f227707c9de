"""Handles and layouts: what two ends must agree on, and the wire that carries it."""

from dataclasses import fields, replace

import pytest

from kvtransfer.core.handle import PROTOCOL, KVHandle, KVLayout
from kvtransfer.messages import handle_from_wire, handle_to_wire, layout_from_wire, layout_to_wire

LAYOUT = KVLayout(
    "m", num_layers=30, num_kv_heads=3, head_dim=64, page_size=16, dtype="bfloat16", tp_size=2
)


def test_a_page_is_one_record_of_known_size() -> None:
    assert LAYOUT.page_bytes == 2 * 30 * 3 * 64 * 16 * 2
    assert replace(LAYOUT, dtype="float32").page_bytes == 2 * LAYOUT.page_bytes
    assert KVHandle("r", "h:1", "i", 40, 3, LAYOUT).num_bytes == 3 * LAYOUT.page_bytes


@pytest.mark.parametrize("name", [field.name for field in fields(KVLayout)])
def test_a_mismatch_names_the_field_and_both_values(name: str) -> None:
    """FAULTS 63: no field is left out."""
    value = getattr(LAYOUT, name)
    other = replace(LAYOUT, **{name: value * 2})
    assert LAYOUT.mismatch(other) == f"{name}: {value!r} here, {value * 2!r} there"
    assert LAYOUT.mismatch(replace(LAYOUT)) is None


def test_the_wire_loses_nothing() -> None:
    handle = KVHandle("r", "10.0.0.1:7000", "i-1", 40, 3, LAYOUT)
    assert layout_from_wire(layout_to_wire(LAYOUT)) == LAYOUT
    assert handle_from_wire(handle_to_wire(handle)) == handle


def test_a_worker_of_a_release_that_knew_no_protocol_is_refused() -> None:
    wire = layout_to_wire(LAYOUT)
    wire.ClearField("protocol")
    assert LAYOUT.mismatch(layout_from_wire(wire)) == f"protocol: {PROTOCOL} here, 0 there"

"""Handles and layouts as protobuf, and back."""

from dataclasses import asdict

from kvtransfer.core.handle import KVHandle, KVLayout
from protos import evenflow_pb2 as pb


def layout_to_wire(layout: KVLayout) -> pb.Layout:
    return pb.Layout(**asdict(layout))


def layout_from_wire(wire: pb.Layout) -> KVLayout:
    return KVLayout(
        model=wire.model,
        num_layers=wire.num_layers,
        num_kv_heads=wire.num_kv_heads,
        head_dim=wire.head_dim,
        page_size=wire.page_size,
        dtype=wire.dtype,
        tp_size=wire.tp_size,
        protocol=wire.protocol,
    )


def handle_to_wire(handle: KVHandle) -> pb.Handle:
    return pb.Handle(
        request_id=handle.request_id,
        source=handle.source,
        incarnation=handle.incarnation,
        num_tokens=handle.num_tokens,
        num_pages=handle.num_pages,
        layout=layout_to_wire(handle.layout),
    )


def handle_from_wire(wire: pb.Handle) -> KVHandle:
    return KVHandle(
        request_id=wire.request_id,
        source=wire.source,
        incarnation=wire.incarnation,
        num_tokens=wire.num_tokens,
        num_pages=wire.num_pages,
        layout=layout_from_wire(wire.layout),
    )

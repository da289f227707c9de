"""Handles and layouts as protobuf messages and back."""

from kvtransfer.core.handle import KVHandle, KVLayout
from protos import evenflow_pb2 as pb


def layout_to_proto(layout: KVLayout) -> pb.Layout:
    return pb.Layout(
        model=layout.model,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        dtype=layout.dtype,
        tp_size=layout.tp_size,
    )


def layout_from_proto(message: pb.Layout) -> KVLayout:
    return KVLayout(
        model=message.model,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        page_size=message.page_size,
        dtype=message.dtype,
        tp_size=message.tp_size,
    )


def handle_to_proto(handle: KVHandle) -> pb.Handle:
    return pb.Handle(
        request_id=handle.request_id,
        source=handle.source,
        incarnation=handle.incarnation,
        num_tokens=handle.num_tokens,
        num_pages=handle.num_pages,
        layout=layout_to_proto(handle.layout),
    )


def handle_from_proto(message: pb.Handle) -> KVHandle:
    return KVHandle(
        request_id=message.request_id,
        source=message.source,
        incarnation=message.incarnation,
        num_tokens=message.num_tokens,
        num_pages=message.num_pages,
        layout=layout_from_proto(message.layout),
    )

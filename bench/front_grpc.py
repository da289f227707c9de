"""A client of the gRPC door for ``bench.front``. It notes when responses come, and reads none."""

import asyncio
import time

import grpc

from protos import evenflow_pb2 as pb

METHOD = "/evenflow.v1.Inference/Generate"


class GrpcDoor:
    """``open`` begins a stream; all share one connection."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._generate = self._channel.unary_stream(
            METHOD, pb.GenerateRequest.SerializeToString, bytes
        )

    async def open(self, name: str, prompt: list[int], num_tokens: int) -> "GrpcStream":
        options = pb.Options(request_id=name, max_tokens=num_tokens, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), options=options)
        return GrpcStream(name, self._generate(request))

    async def close(self) -> None:
        await self._channel.close(None)


class GrpcStream:
    """One completion, as it comes."""

    def __init__(self, name: str, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, bytes]"):
        self.name = name
        self._arrived: list[tuple[float, bytes]] = []
        self.ended = asyncio.create_task(self._read(call))

    async def _read(self, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, bytes]") -> None:
        async for response in call:
            self._arrived.append((time.monotonic(), response))

    def events(self) -> list[tuple[float, bytes]]:
        return self._arrived

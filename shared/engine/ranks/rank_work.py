"""What a rank process computes: its part of each step, and copies of its part of the KV cache."""

from __future__ import annotations

from threading import Thread

import msgspec
import torch

from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.processes.rank_process import RankContext
from shared.engine.ranks.channel import Channel, ChannelClosed
from shared.engine.ranks.messages import (
    CheckDevice,
    Command,
    Copied,
    CopyCommand,
    CopyFailed,
    CopyReply,
    RankSetup,
    ReadKv,
    RunStep,
    WriteKv,
    ZeroBlocks,
)
from shared.engine.ranks.rank_executor import RankExecutor, load_rank
from shared.engine.ranks.remote_masks import RemoteMasks
from shared.engine.ranks.step_codec import decode_step, encode_output
from shared.engine.runners.warm_up import idle_step
from shared.log import configure_logging
from shared.numerics import exchange_of

_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class ModelWork:
    """See RankWork."""

    def __init__(self, context: RankContext) -> None:
        """Raises CheckpointError, ConfigError."""
        configure_logging(f"rank-{context.rank}")
        setup = msgspec.msgpack.decode(context.config, type=RankSetup)
        torch.set_num_threads(setup.num_threads)
        self._mesh = context.mesh(exchange=exchange_of(setup.activations))
        self._executor, self.identity = load_rank(setup, self._mesh)
        self._masks = RemoteMasks(None if setup.masks < 0 else Channel.of(setup.masks))
        copies = Channel.of(setup.copies[context.rank])
        Thread(target=_serve_copies, args=(self._executor, copies), daemon=True).start()

    def run(self, step: int, plan: bytes) -> bytes:
        match _decoder.decode(plan):
            case RunStep(inputs=data):
                self._masks.begin_step()
                return encode_output(self._executor.run(decode_step(data, self._masks.mask)))
            case CheckDevice():
                block_size = self._executor.kv_layout.block_size
                self._executor.run(idle_step(block_size, [2, 1], temperature=1.0))
            case ZeroBlocks(block_ids=block_ids):
                self._executor.zero_blocks(block_ids)
                _wait_for_all(self._mesh)
        return b""


def _wait_for_all(mesh: Mesh) -> None:
    """The answering rank returns after all others have called this."""
    stage, _ = mesh.shape.place(mesh.rank)
    token = torch.zeros(1, 1)
    if stage > 0:
        token = mesh.recv(token.shape, token.dtype)
    if mesh.shape.tp > 1:
        mesh.gather(token, 0)
    if stage + 1 < mesh.shape.pp:
        mesh.send(token)


def _serve_copies(executor: RankExecutor, channel: Channel) -> None:
    while True:
        try:
            command: CopyCommand = channel.receive(CopyCommand)
        except ChannelClosed:
            return
        channel.send(_copied(executor, command))


def _copied(executor: RankExecutor, command: CopyCommand) -> CopyReply:
    """A copy outside of the cache fails alone."""
    where = command.where if isinstance(command, WriteKv) else command
    tokens = where.block_table, where.first_token, where.num_tokens
    try:
        match command:
            case ReadKv(group=group):
                out = bytearray(where.num_tokens * executor.kv_layout.group_bytes_per_token(group))
                executor.read_kv(*tokens, memoryview(out), group)
                return Copied(bytes(out))
            case WriteKv(payload=payload):
                executor.write_kv(*tokens, memoryview(payload), where.group)
    except ValueError as error:
        return CopyFailed(str(error))
    return Copied()

"""What a replica says of itself to whoever connects."""

from __future__ import annotations

import asyncio

from headrace.core.errors import EngineError
from headrace.core.messages import Hello
from headrace.core.wire import FrameError, gateway_decoder

TIMEOUT_S = 60.0


async def greeting(path: str) -> Hello:
    """The Hello of the replica that listens on ``path``; EngineError if none comes."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                decoder = gateway_decoder()
                while data := await reader.read(1 << 16):
                    for message in decoder.feed(data):
                        if isinstance(message, Hello):
                            return message
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, FrameError) as error:
        raise EngineError(f"the replica at {path} cannot be reached: {error}") from error
    raise EngineError(f"the replica at {path} hung up without a greeting")

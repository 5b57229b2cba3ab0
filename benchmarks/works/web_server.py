"""The server of the files behind HTTP: prints its port, and ends with its standard input. It imports no torch.

A path ends with the number of a file, so clients of S3 can ask for it, too, as an object of any bucket.
"""

import asyncio
import sys
from contextlib import suppress

import numpy as np

MACHINE = "127.0.0.1"
FILE_BYTES = 65_536
FILES = 4096
LATENCY_S, JITTER_S = 0.008, 0.004
"""What passes before an answer: a constant, and an exponentially distributed rest with this mean."""


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests until the client is gone."""
    data = np.random.default_rng(0).bytes(FILE_BYTES + FILES)
    waits_s = LATENCY_S + np.random.default_rng(1).exponential(JITTER_S, FILES)
    dated = 'Last-Modified: Sat, 28 Nov 2026 00:00:00 GMT\r\nETag: "0"\r\n'  # clients of S3 ask for both
    head = f"HTTP/1.1 200 OK\r\n{dated}Content-Length: {FILE_BYTES}\r\n\r\n".encode()
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            number = int(request.split(maxsplit=2)[1].rpartition(b"/")[2])
            await asyncio.sleep(waits_s[number])
            writer.write(head + data[number : number + FILE_BYTES])
            await writer.drain()
    writer.close()


async def _serve() -> None:
    listening = await asyncio.start_server(_answer, MACHINE, 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(_serve())

"""Load files over HTTP: hundreds of requests in flight from a few workers.

    python examples/async_http.py
    python examples/async_http.py --num-workers 2 --files 200 --concurrency 16

It starts its own web server, which answers each request after some 10 ms. ``Files`` is an asynchronous dataset: each
worker has one session of aiohttp, and up to ``--concurrency`` requests at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from typing import Any

import aiohttp
import torch
from aiohttp import web

from dpex import AsyncDataset, DpexDataLoader, WorkerConfig

FILE_BYTES = 16_384
LATENCY_S = 0.01


class Files(AsyncDataset):
    """Sample: the bytes of a file, uint8 of shape (16384,)."""

    def __init__(self, url: str, count: int) -> None:
        self.url = url
        self.count = count
        self._session: Any = None
        self._loop: Any = None

    def __len__(self) -> int:
        return self.count

    def session(self) -> aiohttp.ClientSession:
        """Return the session of this process's event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            self._loop = loop
        return self._session

    async def aclose(self) -> None:
        """Close the session: dpex awaits this once in each process."""
        if self._session is not None:
            await self._session.close()

    async def fetch(self, index: int) -> bytes:
        """Wait for a file, while other samples do, too."""
        async with self.session().get(f"{self.url}/{index}") as answer:
            answer.raise_for_status()
            return await answer.read()

    def decode(self, index: int, raw: bytes) -> torch.Tensor:
        """Return the sample. Transforms that draw random numbers belong here."""
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


async def answer(request: web.Request) -> web.Response:
    """Answer with a file of the number in the request, after a while."""
    await asyncio.sleep(LATENCY_S)
    return web.Response(body=bytes([int(request.match_info["number"]) % 256]) * FILE_BYTES)


def serve(ready: threading.Event, ports: list[int]) -> None:
    """Serve until the program ends."""

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{number}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        ready.set()
        await asyncio.Event().wait()

    asyncio.run(run())


def main() -> None:
    """Read all files once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", default="auto", help='a number, or "auto"')
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=64, help="requests at the same time, of each worker")
    options = parser.parse_args()
    ready, ports = threading.Event(), []
    threading.Thread(target=serve, args=(ready, ports), daemon=True).start()
    ready.wait()
    loader = DpexDataLoader(
        Files(f"http://127.0.0.1:{ports[0]}", options.files),
        batch_size=16,
        shuffle=True,
        num_workers="auto" if options.num_workers == "auto" else int(options.num_workers),
        worker_config=WorkerConfig(concurrency=options.concurrency),
    )
    began, count, total = time.perf_counter(), 0, 0
    with loader:
        for batch in loader:
            count += len(batch)
            total += int(batch[:, 0].sum())
        seconds = time.perf_counter() - began
        print(f"{count} files, checksum {total}, in {seconds:.1f} s: {count / seconds:.0f} files per second")


if __name__ == "__main__":
    main()

"""Files behind HTTP: a real server in a process of its own on this machine, which answers after a while."""

import asyncio
import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.machine import services
from benchmarks.works import ENDLESS
from benchmarks.works.web_server import FILES, MACHINE


@contextmanager
def server() -> Iterator[int]:
    """The server, running; its port."""
    command = [sys.executable, "-m", "benchmarks.works.web_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        services.add(process.pid)
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


class Downloads(Dataset[torch.Tensor]):
    """Sample: one file, uint8 of shape (65536,), over a connection that each thread of each process keeps."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._forget()

    def _forget(self) -> None:
        self.local, self.pid = threading.local(), os.getpid()

    def __getstate__(self) -> int:
        return self.port

    def __setstate__(self, port: int) -> None:
        self.port = port
        self._forget()

    def __len__(self) -> int:
        return ENDLESS

    def _connection(self) -> http.client.HTTPConnection:
        if self.pid != os.getpid():
            self._forget()  # a connection from before a fork belongs to the parent
        if not hasattr(self.local, "connection"):
            self.local.connection = http.client.HTTPConnection(MACHINE, self.port, timeout=30)
        connection: http.client.HTTPConnection = self.local.connection
        return connection

    def __getitem__(self, index: int) -> torch.Tensor:
        connection = self._connection()
        connection.request("GET", f"/{index % FILES}")
        body = bytearray(connection.getresponse().read())
        return torch.frombuffer(body, dtype=torch.uint8)


class AiohttpDownloads(Dataset[torch.Tensor]):
    """As `Downloads`, by aiohttp: one client for each event loop."""

    library = "aiohttp"

    def __init__(self, port: int) -> None:
        import_module(self.library)  # before the clock starts
        self.port = port
        self._client: Any = None
        self._loop: Any = None

    def __len__(self) -> int:
        return ENDLESS

    def _opened(self) -> Any:
        """A new client."""
        import aiohttp

        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def _body(self, url: str) -> bytes:
        async with self._client.get(url) as answer:
            body: bytes = await answer.read()
            return body

    async def aclose(self) -> None:
        """Close the connections of this process."""
        if self._client is not None:
            await self._client.close()

    async def __getitem__(self, index: int) -> torch.Tensor:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._client, self._loop = self._opened(), loop
        body = await self._body(f"http://{MACHINE}:{self.port}/{index % FILES}")
        return torch.frombuffer(bytearray(body), dtype=torch.uint8)


class FsspecDownloads(AiohttpDownloads):
    """As `AiohttpDownloads`, by the HTTP file system of fsspec."""

    library = "fsspec.implementations.http"

    def _opened(self) -> Any:
        import fsspec

        return fsspec.filesystem("http", asynchronous=True, skip_instance_cache=True)

    async def _body(self, url: str) -> bytes:
        body: bytes = await self._client._cat_file(url)
        return body

    async def aclose(self) -> None:
        if self._client is not None:
            await (await self._client.set_session()).close()

"""`python -m zerostall.agent.vault`: holds images in the memory of one GPU. Started by the agent, and ends with it.

What is captured it does not copy into its memory: trainers do, with their own GPU's copy engines. It brings what they
say is whole to host memory, chunk by chunk on a stream of the least priority, and takes the checksums there; it
fetches copies of what lies in other vaults; and where GPUDirect Storage is there, it writes files (`shelf`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time

from zerostall import config, native
from zerostall.agent.shelf import Locker, Shelf
from zerostall.core.copiers import choose_checking
from zerostall.errors import CapabilityError, CapacityError, DeviceError, ZerostallError
from zerostall.telemetry import log
from zerostall.wire import lockers as w
from zerostall.wire.channel import Channel, ClosedError, drop

_PR_SET_PDEATHSIG = 1


class Vault:
    """Does what the agent says, one thing after the other; files are written meanwhile, by a thread of their own.

    Args:
        budget: most bytes it lends; None for half of what is free when it is first asked.
    """

    def __init__(self, channel: Channel[w.ToVault], gpu: str, budget: int | None) -> None:
        seen = {facts.uuid: facts for facts in native.visible_devices()}
        if gpu not in seen:
            raise CapabilityError(f"{gpu} is none of the GPUs here: {', '.join(seen) or 'there is none'}")
        self._channel = channel
        self._device = native.Device(seen[gpu].ordinal)
        self._pool = native.Pool("vault", choose_checking(config.cores(), config.copy_threads()).threads)
        self._budget = budget if budget is not None else self._device.memory[0] // 2
        self._lockers: dict[int, Locker] = {}
        self._segments: dict[int, native.Segment] = {}
        self._sending = threading.Lock()
        self._shelf = Shelf(self._device, self._lockers, self._segments, self._send)
        channel.send(w.Ready(name=seen[gpu].name, budget=self._budget))

    def serve(self) -> None:
        """Until the agent is gone."""
        while True:
            try:
                heard = self._channel.receive()
            except ClosedError:
                return
            for message, fds in heard:
                try:
                    self._handle(message, fds)
                finally:
                    drop(fds)

    def _handle(self, message: w.ToVault, fds: list[int]) -> None:
        match message:
            case w.Lend():
                self._send(self._lend(message))
            case w.TakeBack(key=key):
                self._lockers.pop(key, None)
                self._shelf.forget(key)
            case w.Show():
                self._show(message, fds[0])
            case w.Hide(key=key):
                with self._shelf.filling:
                    if segment := self._segments.pop(key, None):
                        segment.close()
            case w.Drain():
                self._send(self._drain(message))
            case w.Mirror():
                self._send(self._mirror(message))
            case w.ShowFile(key=key):
                self._shelf.show(key, fds[0])
            case w.HideFile(key=key):
                self._shelf.hide(key)
            case w.Write():
                self._shelf.write(message)

    def _send(self, message: w.FromVault) -> None:
        with self._sending:
            self._channel.send(message)

    def _lend(self, request: w.Lend) -> w.Opened | w.Declined:
        lent = sum(locker.memory.nbytes for locker in self._lockers.values())
        why = ""
        for places in range(request.places, 0, -1):
            nbytes = places * request.stride
            if lent + nbytes > self._budget:
                why = f"an image of {request.stride} bytes is over its budget: {lent} of {self._budget} are lent"
                continue
            try:
                memory = native.Vault(self._device, nbytes)
            except CapacityError:
                why = f"the GPU has no {nbytes} bytes to spare, only {self._device.memory[0]}"
                continue
            self._lockers[request.key] = Locker(memory, request.stride)
            log.info("vault: %d bytes for %d images are lent", nbytes, places)
            return w.Opened(key=request.key, handle=memory.handle(), places=places)
        return w.Declined(key=request.key, reason=why)

    def _show(self, message: w.Show, fd: int) -> None:
        if message.key in self._segments:
            return
        segment = self._segments[message.key] = native.Segment.attach(fd, message.nbytes)
        start = time.perf_counter()
        try:
            segment.pin(self._device, stretch=message.stride, threads=self._pool.threads)
        except (DeviceError, CapacityError) as error:
            self._send(w.Slow(reason=f"host memory could not be registered with CUDA: {error}"))
        else:
            seconds = time.perf_counter() - start
            log.info("vault: %d bytes of host memory registered in %.3f s", message.nbytes, seconds)

    def _drain(self, order: w.Drain) -> w.Emptied | w.Stuck:
        locker, segment = self._lockers.get(order.locker), self._segments.get(order.memory)
        if locker is None or segment is None or order.offset + order.nbytes > segment.nbytes:
            return w.Stuck(id=order.id, reason="the vault does not have it")
        start = time.perf_counter()
        try:
            job = native.Unload(
                self._pool,
                self._device,
                locker.memory,
                order.place * locker.stride,
                segment.address + order.offset,
                order.nbytes,
                chunk_bytes=order.chunk_bytes,
                runs=order.runs,
            )
            job.wait(None)
        except (ZerostallError, ValueError) as error:
            return w.Stuck(id=order.id, reason=str(error.args[0]))
        image = segment.address + order.offset
        ghosts = [at for at, nbytes, held in order.samples if native.crc32c_memory(image + at, nbytes) != held]
        seconds = time.perf_counter() - start
        return w.Emptied(id=order.id, checksums=tuple(job.checksums), seconds=seconds, ghosts=tuple(ghosts))

    def _mirror(self, order: w.Mirror) -> w.Mirrored | w.Stuck:
        locker = self._lockers.get(order.locker)
        if locker is None:
            return w.Stuck(id=order.id, reason="the vault does not have it")
        try:
            source = native.Peer(self._device, order.handle)
            try:
                job = native.Relay(
                    self._pool,
                    self._device,
                    locker.memory,
                    order.place * locker.stride,
                    peer=source.address + order.offset,
                    runs=order.runs,
                )
                job.wait(None)
            finally:  # the memory is the other vault's own again
                source.close()
        except (ZerostallError, ValueError) as error:
            return w.Stuck(id=order.id, reason=str(error.args[0]))
        return w.Mirrored(id=order.id)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; at once if it has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Serve one agent; 0 when it is gone."""
    parser = argparse.ArgumentParser(prog="zerostall.agent.vault", description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the connection to the agent")
    parser.add_argument("--parent", type=int, required=True, help="process id of the agent")
    parser.add_argument("--gpu", required=True, help="UUID")
    parser.add_argument("--budget", type=int, default=None, help="bytes; half of what is free by default")
    options = parser.parse_args(arguments)
    end_with_parent(options.parent)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the agent says when
        signal.signal(ignored, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # never pushes training off a core when it wakes up
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    channel: Channel[w.ToVault] = Channel(socket.socket(fileno=options.socket), w.ToVault)
    try:
        Vault(channel, options.gpu, options.budget).serve()
    except ZerostallError as error:
        with contextlib.suppress(ClosedError):
            channel.send(w.Closed(reason=str(error.args[0])))
        log.error("vault of %s: %s", options.gpu, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

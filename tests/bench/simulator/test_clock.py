"""The virtual clock: order of timers, sockets before jumps, threads hold it, a standstill is an error."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.bench.simulator.clock import DeadlockError, run


def test_timers_fire_in_order_and_the_clock_jumps_to_each() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[str, float]] = []
        done = loop.create_future()
        loop.call_later(7200.0, lambda: (fired.append(("late", loop.time())), done.set_result(None)))
        loop.call_later(0.5, lambda: fired.append(("early", loop.time())))
        loop.call_later(0.5, lambda: fired.append(("early too", loop.time())))
        await done
        return fired

    assert run(main()) == [("early", 0.5), ("early too", 0.5), ("late", 7200.0)]


def test_sleeping_takes_virtual_time_only() -> None:
    async def main() -> float:
        await asyncio.gather(*(asyncio.sleep(1e6) for _ in range(10)))
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(1e6)


def test_what_is_in_a_socket_is_read_before_the_clock_moves() -> None:
    async def main() -> tuple[bytes, float]:
        loop = asyncio.get_running_loop()

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(300_000))
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        timer = loop.call_later(1.0, writer.transport.abort)
        writer.write(b"x" * 300_000)
        answer = await reader.read(-1)
        timer.cancel()
        writer.close()
        server.close()
        return answer, loop.time()

    answer, now = run(main())
    assert len(answer) == 300_000
    assert now == 0.0


def test_the_clock_stands_still_while_a_thread_works() -> None:
    async def main() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        may_end = threading.Event()
        order: list[str] = []
        work = loop.run_in_executor(None, may_end.wait)
        loop.call_later(0.001, lambda: order.append("timer"))
        threading.Timer(0.01, may_end.set).start()
        await work
        order.append("thread")
        at_end = loop.time()
        await asyncio.sleep(1)
        return " ".join(order), at_end

    assert run(main()) == ("thread timer", 0.0)


def test_a_standstill_is_reported() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError, match="wait for ever"):
        run(main())

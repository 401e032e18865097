"""Gateway processes beside one router process: each answers, and each shows the sums of all."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import re
from pathlib import Path

from headrace.core.knobs import GatewayConfig, RouterConfig
from headrace.core.launch import GatewaySpec, RouterSpec, ServedModelSpec
from headrace.core.routing import Endpoint
from headrace.fleet.children import gateway_process, router_process
from headrace.gateway.server import bind_socket
from headrace.router.remote import RemotePlacer
from tests.gateway.fake_replica import FakeReplica, Plan
from tests.gateway.tiny import CHAT, EOS, MODEL, write_tokenizer

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def ask(port: int, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        raw = None if body is None else json.dumps(body)
        connection.request("GET" if raw is None else "POST", path, raw)
        response = connection.getresponse()
        return response.status, response.read()


def generated(page: bytes) -> float:
    found = re.search(rb'headrace_generation_tokens_total\{model_name="tiny"\} (\S+)', page)
    assert found is not None, page
    return float(found[1])


async def test_two_gateways_answer_and_add_up_their_counters(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    replica = FakeReplica(tmp_path / "r.sock", vocab_size=400, eos=EOS, plan=lambda request: Plan([70, 71]))
    router_socket = str(tmp_path / "router.sock")
    router = router_process(RouterSpec(socket=router_socket, router=RouterConfig()))
    fleet = RemotePlacer(router_socket, peer="supervisor", log=logging.getLogger("headrace.test"))
    gateways, ports = [], []
    async with contextlib.AsyncExitStack() as stack:
        await replica.start()
        stack.push_async_callback(replica.close)
        await router.start()
        stack.push_async_callback(router.stop, 5.0)
        fleet.start()
        stack.push_async_callback(fleet.close)
        fleet.set_endpoint(Endpoint(replica_id="fake", model=MODEL, address=replica.path))
        for index in range(2):
            listener = stack.enter_context(bind_socket(GatewayConfig(port=0)))
            ports.append(listener.getsockname()[1])
            spec = GatewaySpec(
                gateway_id=f"gateway-{index}",
                listener=listener.fileno(),
                router_socket=router_socket,
                models=[ServedModelSpec(model=MODEL, names=["tiny"], folder=str(folder))],
                gateway=GatewayConfig(shutdown_grace_s=1.0),
                router=RouterConfig(),
            )
            gateways.append(gateway_process(spec))
        for gateway in gateways:
            stack.push_async_callback(gateway.stop, 5.0)
        await asyncio.gather(*[gateway.start() for gateway in gateways])
        async with asyncio.timeout(30):
            for port in ports:
                while (await asyncio.to_thread(ask, port, "/ready"))[0] != 200:
                    await asyncio.sleep(0.02)
            for port in [*ports, ports[0]]:
                status, answer = await asyncio.to_thread(ask, port, CHAT, BODY)
                assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 3
            for port in ports:
                while generated((await asyncio.to_thread(ask, port, "/metrics"))[1]) < 9:
                    await asyncio.sleep(0.05)
                page = (await asyncio.to_thread(ask, port, "/metrics"))[1]
                assert generated(page) == 9
                assert b'headrace_replica_placements_total{model_name="tiny",replica="fake"} 3.0' in page

"""Stand-ins for prefill and decode servers of vLLM (NIXL, 0.32) and SGLang: two servers that tell each other
what the real ones do beside HTTP, and check every field of either half.

vLLM     the prefill side keeps blocks under a name until they are pulled, once; the decode side pulls them by
         the name in kv_transfer_params, or computes a prompt for which it gets none
SGLang   both sides of a room must come, with the same request
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from tests.router.external import engines
from tests.router.external.engines import SAMPLING, answer_of
from tests.router.external.stand_in import Caught, Exchange, StandIn, only

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VLLMPair:
    """``mode``: how the prefill side answers: "params", "none" (no connector), "abort" (as vLLM answers when
    its engine gave the request up), or "hang"."""

    def __init__(self, prefill: StandIn, decode: StandIn, *, scale_out: bool = True) -> None:
        self.mode = "params"
        self.kept: dict[str, list[int]] = {}  # name -> prompt, until it is pulled
        self.pulled: list[str] = []
        self.computed: list[list[int]] = []  # prompts that the decode side had to compute
        self.prefill_bodies: list[dict[str, Any]] = []
        self.num_gone = 0  # prefill halves whose caller closed
        self.status: tuple[int, Any] | None = None
        self._names = itertools.count(1)
        self.decode = engines.vllm(decode, scale_out=scale_out)
        engines.vllm(prefill, scale_out=scale_out)
        for path in ("/inference/v1/generate", "/v1/completions"):
            is_generate = path.startswith("/inference")
            if is_generate and not scale_out:
                continue
            prefill.post(path, self._prefill(is_generate))
            decode.post(path, self._decode(decode.routes[path], is_generate))

    def _prefill(self, is_generate: bool) -> Any:
        async def route(exchange: Exchange) -> None:
            body = exchange.json
            if not body:
                raise Caught("token_ids is required")
            own = {"request_id", "model", "stream", "kv_transfer_params"}
            if is_generate:
                only(body, own | {"token_ids", "sampling_params"})
                params, prompt = body["sampling_params"], body["token_ids"]
                only(params, SAMPLING | {"detokenize"})
            else:
                only(body, own | SAMPLING | {"prompt", "return_token_ids"})
                params, prompt = body, body["prompt"]
            assert body["stream"] is False and params["max_tokens"] == 1
            assert params.get("min_tokens", 0) == 0
            assert body["kv_transfer_params"] == ASKED
            assert "logprobs" not in params and "prompt_logprobs" not in params
            assert exchange.headers["x-request-id"] == body["request_id"].rpartition("-")[0]
            self.prefill_bodies.append(body)
            if self.status is not None:
                exchange.reply(self.status[1], self.status[0])
                return
            if self.mode == "hang":
                await exchange.gone.wait()
                self.num_gone += 1
                return
            choice = {"index": 0, "token_ids": [999], "finish_reason": "length", "text": "x"}
            handed: dict[str, Any] | None = None
            if self.mode == "params":
                name = f"blocks-{next(self._names)}"
                self.kept[name] = prompt
                handed = {
                    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]],
                    "remote_engine_id": "engine", "remote_request_id": name, "remote_host": "10.0.0.1",
                    "remote_port": 5600, "tp_size": 1, "remote_num_tokens": len(prompt),
                    "remote_blocks_expiry_time": None, "transfer_mode": "pull",
                }  # fmt: skip
            elif self.mode == "abort":
                choice |= {"token_ids": [], "finish_reason": "abort"}
            exchange.reply({"choices": [choice], "kv_transfer_params": handed})

        return route

    def _decode(self, answer: Any, is_generate: bool) -> Any:
        async def route(exchange: Exchange) -> None:
            body = exchange.json
            if body:
                params = body.pop("kv_transfer_params", None)
                prompt = body["token_ids" if is_generate else "prompt"]
                if params is None:
                    self.computed.append(prompt)
                else:
                    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
                    only(params, set(ASKED) | {"remote_request_id", "tp_size", "remote_num_tokens",
                                               "remote_blocks_expiry_time", "transfer_mode"})  # fmt: skip
                    assert self.kept.pop(params["remote_request_id"]) == prompt, "not these blocks, or twice"
                    self.pulled.append(params["remote_request_id"])
                exchange.body = encoded(body)
            await answer(exchange)

        return route


class SGLangPair:
    """``prefill_ends``: the prefill side's last word: None for a good end, or a status and a message; it then
    comes once the decode half is there, which waits for ever. ``once``: only of the next one."""

    def __init__(self, prefill: StandIn, decode: StandIn, *, bootstrap_port: int = 8998) -> None:
        self.bootstrap_port = bootstrap_port
        self.rooms: dict[int, dict[str, Any]] = {}  # room -> the prefill half
        self.used: list[int] = []
        self.came = asyncio.Event()  # a decode half
        self.prefill_ends: tuple[int, str] | None = None
        self.once = False
        self.failed: set[int] = set()  # rooms
        self.prefill_hangs = False
        self.dies_late: asyncio.Event | None = None  # set: the prefill side goes once its part is done
        self.num_prefill_gone = 0
        self.decode = engines.sglang(decode)
        self.prefill = engines.sglang(prefill)
        self.decode_bodies: list[dict[str, Any]] = []
        prefill.post("/generate", self._prefill(prefill))
        decode.post("/generate", self._decode(decode.routes["/generate"]))

    def _meet(self, body: dict[str, Any]) -> int:
        """Takes the bootstrap fields out of a half and checks them."""
        host, port, room = (body.pop(f"bootstrap_{name}") for name in ("host", "port", "room"))
        assert (host, port) == ("127.0.0.1", self.bootstrap_port)
        assert isinstance(room, int) and 0 <= room < 2**63
        return room

    def _prefill(self, server: StandIn) -> Any:
        async def route(exchange: Exchange) -> None:
            body = exchange.json
            room = self._meet(body)
            assert room not in self.used, "a room is used once"
            self.used.append(room)
            self.rooms[room] = body
            if self.prefill_hangs:
                await exchange.gone.wait()
                self.num_prefill_gone += 1
                return
            ends = self.prefill_ends
            if ends is not None:
                self.failed.add(room)
                self.prefill_ends = None if self.once else ends
                await self.came.wait()
            if ends is not None and ends[0] >= 500:
                exchange.reply({"error": {"message": ends[1]}}, ends[0])
                return
            exchange.start_stream()
            ending: dict[str, Any] = {"type": "length", "length": 1}
            if ends is not None:
                ending = {"type": "abort", "message": ends[1]}
            token, _, _ = answer_of(body["input_ids"], 1, [])
            meta = {"id": body["rid"], "finish_reason": ending, "prompt_tokens": 3, "completion_tokens": 1}
            if self.dies_late is not None:
                await self.dies_late.wait()
                exchange.reset()
                return
            exchange.event({"text": "x", "output_ids": token, "meta_info": meta})
            exchange.end_stream()

        return route

    def _decode(self, answer: Any) -> Any:
        async def route(exchange: Exchange) -> None:
            body = exchange.json
            room = self._meet(body)
            self.decode_bodies.append(dict(body))
            self.came.set()
            waited = 0
            while room not in self.rooms or self.prefill_hangs or room in self.failed:
                if exchange.gone.is_set():
                    self.decode.num_gone += 1
                    return
                waited += 1
                assert waited < 5000, "a decode half without its other"
                await asyncio.sleep(0.001)
            assert self.rooms[room] == body, "both halves are the same request"
            exchange.body = encoded(body)
            await answer(exchange)

        return route


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()

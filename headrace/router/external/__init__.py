"""Inference servers that are not ours, behind Headrace's gateway.

recognise   which server it is and what it offers           monitor     is it there, how busy is it
http_client one keep-alive pool a worker                     kv_events   what vLLM's cache holds
engine files: vllm, sglang, llama_server, tensorrt_llm, openai_text
worker      tokens in and out                                text_worker bodies as they are
"""

from __future__ import annotations

import logging

from headrace.core.routing import Capabilities, Endpoint
from headrace.router.external.monitor import ExternalMonitor, MonitorListener
from headrace.router.external.text_worker import TextWorker
from headrace.router.external.worker import ExternalWorker

__all__ = [
    "ExternalMonitor",
    "ExternalWorker",
    "MonitorListener",
    "TextWorker",
    "make_monitor",
    "make_worker",
]


def make_worker(
    endpoint: Endpoint, capabilities: Capabilities, *, log: logging.Logger, silence_s: float = 60.0
) -> ExternalWorker | TextWorker:
    """What a gateway sends requests to; connects when there is something to send. ``silence_s``: after so
    long without a byte a server that holds requests is asked whether it is there.

    A TextWorker when the endpoint is text only or takes no tokens. Call it in the event loop it shall use
    and ``await worker.close()`` at the end. A member whose ``instance`` or ``capabilities`` changed needs a
    new one.
    """
    if endpoint.text_only or not capabilities.tokens:
        return TextWorker(endpoint, capabilities, log=log, silence_s=silence_s)
    return ExternalWorker(endpoint, capabilities, log=log, silence_s=silence_s)


def make_monitor(endpoint: Endpoint, listener: MonitorListener, *, log: logging.Logger) -> ExternalMonitor:
    """Watches one server for the router from ``start()`` until ``await close()``."""
    return ExternalMonitor(endpoint, listener, log=log)

"""The processes of ``--gateways K``: one router, K gateways that accept on one socket.

Started in the order router, replicas (by the supervisor), gateways; stopped in the order gateways, replicas,
router, so that nothing is asked of a process that is gone.
"""

from __future__ import annotations

from headrace.core.launch import GatewaySpec, RouterSpec
from headrace.fleet.child import Child


def router_process(spec: RouterSpec) -> Child:
    """``python -m headrace.router``, supervised; whatever connects to it connects again after a restart."""
    return Child("the router", "headrace.router", spec)


def gateway_process(spec: GatewaySpec) -> Child:
    """``python -m headrace.gateway``, supervised. It inherits the listening socket ``spec.listener``, which
    must stay open here, so that callers who connect while a gateway restarts are served by the others."""
    return Child(spec.gateway_id, "headrace.gateway", spec, pass_fds=(spec.listener,))

"""``deepspeed.runtime.pipe.p2p``."""

from __future__ import annotations

from ds_hf.deepspeed_api.stage_messages import can_send_recv, init_process_groups, recv, recv_obj, send, send_obj, wait

from ..._missing import missing

__all__ = ["can_send_recv", "init_process_groups", "recv", "recv_obj", "send", "send_obj", "wait"]
__getattr__ = missing(__name__)

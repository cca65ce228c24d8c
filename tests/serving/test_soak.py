"""A minute of many clients on adapters that come, go and change."""

from __future__ import annotations

from pathlib import Path

from .conftest import StartServer
from .soak import Soak, flags, make_contents
from .test_metrics import Page

ON = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


def test_200_clients_get_what_they_asked_for_while_20_adapters_change(
    start_server: StartServer, tmp_path: Path
) -> None:
    contents, base = make_contents(tmp_path)
    server = start_server(*flags(tmp_path), folder=tmp_path, **ON)
    result = Soak(server, contents, base).run(60)
    assert result["wrong"][:5] == []
    counts = result["counts"]
    # All of it happened, and often.
    for kind in ("streams", "whole answers", "answers of the base", "answers during a change", "404 while it was away"):
        assert counts[kind] > 50, counts
    for kind in ("loads", "replacements", "unloads", "refused replacements"):
        assert counts[kind] > 20, counts
    # From the second 20 s to the third: what a leak of one small adapter per change would exceed.
    assert result["resident_mib"]["growth"] < 8, result
    assert result["resident_mib"]["last_third"] < 400
    assert Page(server).value("manylora:adapter_evictions_total") > 50
    # Nothing is left of it: names, requests, bytes.
    assert server.ids() == ["base"]
    assert server.client.get("/load").json() == {"server_load": 0}
    assert server.text("base")
    assert server.stop() == 0

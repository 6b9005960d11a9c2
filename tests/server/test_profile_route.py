"""POST /start_profile and /stop_profile."""

from pathlib import Path

from nanovllm import AsyncLLM, demo_model
from tests.server.conftest import running

BODY = {"prompt": "A KV cache", "max_tokens": 4, "temperature": 0}


def test_a_profile_of_a_server(tmp_path: Path) -> None:
    llm = AsyncLLM(demo_model.MODEL, max_model_len=64, profile_dir=str(tmp_path))
    with running(llm) as server:
        refused = server.send("/stop_profile", {})
        assert refused.status == 400
        assert "start_profile" in refused.error["message"]
        for path in ("/start_profile", "/stop_profile"):  # any page may send that to this machine
            assert server.send(path, b"", Origin="http://evil.example").status == 403
        assert server.send("/start_profile", method="POST").status == 200
        assert server.send("/start_profile", {}).status == 400
        assert server.send("/v1/completions", BODY).status == 200
        reply = server.send("/stop_profile", method="POST")
        assert reply.status == 200
        assert sorted(reply.body["files"]) == sorted(map(str, tmp_path.iterdir()))
        assert len(reply.body["files"]) == 2
    llm.shutdown()

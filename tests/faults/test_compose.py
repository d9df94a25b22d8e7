"""The very commands of deploy/compose.yaml serve a request."""

from __future__ import annotations

from pathlib import Path

from compose_here import chat, services_here

QUESTION = "hello " * 30  # long enough for a hand-over


def test_the_services_of_the_profile_sim_serve_a_request(tiny_model: Path) -> None:
    """Keys are made, links encrypted, health asked for; all end well on SIGTERM."""
    with services_here("sim", model=tiny_model) as here:
        assert set(here.running) == {"sim-prefill", "sim-decode", "sim-frontend"}
        url = here.url("sim-frontend", 8000)
        answer = chat(url, QUESTION, 8)

        ids = answer["nvext"]["completion_token_ids"]
        assert len(ids) == answer["usage"]["completion_tokens"] == 8
        assert len(answer["nvext"]["prompt_token_ids"]) >= 16
        assert "goes on" not in here.log("sim-frontend")
        for role, other in (("frontend", "worker"), ("worker", "frontend")):
            keys = (here.folder / f"{role}-keys").iterdir()
            assert {path.name for path in keys} == {
                *(f"{role}.secret", f"{role}.public", f"{other}.public")
            }

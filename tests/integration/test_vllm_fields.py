"""What is recorded of vLLM is what is installed."""

from __future__ import annotations

import pytest
from api_docs import recorded, vllm_fields

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(180),  # importing vLLM takes long
    pytest.mark.filterwarnings("default"),  # and warns of much
]


def test_the_recorded_fields_of_vllm_are_the_installed_ones() -> None:
    """Another release may have other fields: record them, and decide on each."""
    assert recorded()["vllm"] == vllm_fields(), "scripts/api_docs.py --record"

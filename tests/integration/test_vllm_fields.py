"""What is recorded of vLLM is what is installed."""

from __future__ import annotations

from importlib import import_module

import pytest
from api_docs import recorded, vllm_fields

from tokenwire.worker.vllm import tables

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(180),  # importing vLLM takes long
    pytest.mark.filterwarnings("default"),  # and warns of much
]


def test_the_recorded_fields_of_vllm_are_the_installed_ones() -> None:
    """Another release may have other fields: record them, and decide on each."""
    assert recorded()["vllm"] == vllm_fields(), "scripts/api_docs.py --record"


def test_the_recorded_tables_are_as_wide_as_the_installed_ones() -> None:
    """What does not fit into them is to be refused, and what does is not."""
    sampler = import_module("vllm.v1.worker.gpu.sample.logit_bias")
    envs = import_module("vllm.envs")
    config = import_module("vllm.config").VllmConfig

    assert sampler.MAX_NUM_ALLOWED_TOKEN_IDS == tables.MAX_ALLOWED_TOKEN_IDS
    assert sampler.MAX_NUM_LOGIT_BIAS_TOKENS == tables.MAX_LOGIT_BIASES
    assert 0 < sampler.MAX_NUM_STOP_TOKEN_IDS - tables.MAX_STOP_TOKEN_IDS <= 16
    assert envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS == tables.MAX_BAD_WORD_TOKENS
    assert isinstance(config.use_v2_model_runner, property)

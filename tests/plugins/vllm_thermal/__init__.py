"""Tests of the parts of vllm-thermal that need no vLLM."""

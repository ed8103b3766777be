"""Adapters for host frameworks: vLLM, LMCache, torchtitan, torch_checkpointing and Orbax."""
